"""Published encoder-decoder models of texts."""

from __future__ import annotations

import json

from tests.model.published import Published

_BASE = dict(d_model=768, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=3072, decoder_ffn_dim=3072)
_M2M = dict(
    normalize_before=None,
    normalize_embedding=None,
    add_final_layer_norm=None,
    model_type="m2m_100",
    activation_function="relu",
    scale_embedding=True,
    max_length=200,
    num_beams=5,
)


def _bart(**changes: object) -> str:
    base = json.loads(
        """{"activation_dropout": 0.1, "activation_function": "gelu", "add_bias_logits": false,
        "add_final_layer_norm": false, "attention_dropout": 0.1, "bos_token_id": 0, "classif_dropout": 0.1,
        "classifier_dropout": 0.0, "d_model": 1024, "decoder_attention_heads": 16, "decoder_ffn_dim": 4096,
        "decoder_layerdrop": 0.0, "decoder_layers": 12, "decoder_start_token_id": 2, "dropout": 0.1,
        "early_stopping": true, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "encoder_layerdrop": 0.0,
        "encoder_layers": 12, "eos_token_id": 2, "forced_bos_token_id": 0, "forced_eos_token_id": 2,
        "gradient_checkpointing": false, "init_std": 0.02, "is_encoder_decoder": true,
        "max_position_embeddings": 1024, "model_type": "bart", "no_repeat_ngram_size": 3, "normalize_before": false,
        "normalize_embedding": true, "num_beams": 4, "num_hidden_layers": 12, "pad_token_id": 1,
        "scale_embedding": false, "use_cache": true, "vocab_size": 50265}"""
    )
    return json.dumps(base | changes)


def _t5(**changes: object) -> str:
    base = json.loads(
        """{"architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512,
        "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0,
        "is_encoder_decoder": true, "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512,
        "num_heads": 8, "num_layers": 6, "output_past": true, "pad_token_id": 0,
        "relative_attention_num_buckets": 32, "task_specific_params": {"summarization": {"num_beams": 4}},
        "use_cache": true, "vocab_size": 32128}"""
    )
    return json.dumps(base | changes)


def _gated_t5(**changes: object) -> str:
    """Return the config.json of a gated T5; `transformers` 5 ties its head, but the folders store a separate matrix."""
    sizes = dict(d_ff=1024, num_heads=6, num_layers=8, num_decoder_layers=8, relative_attention_max_distance=128)
    return _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False, **{**sizes, **changes})


PUBLISHED_SEQ2SEQ = {
    "t5-small": Published(60_506_624, _t5()),
    "t5-base": Published(222_903_552, _t5(d_ff=3072, d_model=768, num_heads=12, num_layers=12)),
    "flan-t5-small": Published(76_961_152, _gated_t5()),
    "flan-t5-base": Published(
        247_577_856, _gated_t5(d_ff=2048, d_model=768, num_heads=12, num_layers=12, num_decoder_layers=12)
    ),
    "mt5-small": Published(300_176_768, _gated_t5(model_type="mt5", vocab_size=250112)),
    "byt5-small": Published(
        299_637_760, _gated_t5(d_ff=3584, d_model=1472, num_layers=12, num_decoder_layers=4, vocab_size=384)
    ),
    "umt5-small": Published(
        306_601_984,
        _gated_t5(
            model_type="umt5", vocab_size=256384, dense_act_fn="gelu_new", is_gated_act=True, scalable_attention=True
        ),
    ),
    # The published figures leave out final_logits_bias, which is a buffer for `transformers` and a head's bias for us.
    "bart-base": Published(
        139_420_416,
        _bart(**_BASE, encoder_attention_heads=12, decoder_attention_heads=12, num_hidden_layers=6),
        -50265,
    ),
    "blenderbot_small-90M": Published(
        87_508_992,
        _bart(
            model_type="blenderbot-small",
            architectures=["BlenderbotSmallForConditionalGeneration"],
            d_model=512,
            decoder_attention_heads=16,
            decoder_ffn_dim=2048,
            decoder_layers=8,
            decoder_start_token_id=1,
            do_blenderbot_90_layernorm=True,
            encoder_attention_heads=16,
            encoder_ffn_dim=2048,
            encoder_layers=8,
            extra_layer_norm=False,
            layernorm_variant="xlm",
            max_position_embeddings=512,
            num_hidden_layers=8,
            scale_embedding=True,
            variant="xlm",
            vocab_size=54944,
        ),
        -54944,
    ),
    "bart-large": Published(406_291_456, _bart(), -50265),
    "mbart-large-50": Published(
        610_879_488,
        _bart(
            model_type="mbart",
            activation_function="relu",
            add_final_layer_norm=True,
            normalize_before=True,
            output_past=True,
            scale_embedding=True,
            static_position_embeddings=False,
            tokenizer_class="MBart50Tokenizer",
            vocab_size=250054,
        ),
        -250054,
    ),
    "pegasus-large": Published(
        568_699_904,
        _bart(
            model_type="pegasus",
            activation_function="relu",
            add_final_layer_norm=True,
            decoder_layers=16,
            decoder_start_token_id=0,
            encoder_layers=16,
            eos_token_id=1,
            extra_pos_embeddings=1,
            forced_bos_token_id=None,
            forced_eos_token_id=1,
            length_penalty=0.8,
            normalize_before=True,
            normalize_embedding=False,
            num_hidden_layers=16,
            pad_token_id=0,
            scale_embedding=True,
            static_position_embeddings=True,
            vocab_size=96103,
        ),
        -96103,
    ),
    "opus-mt-en-de": Published(
        74_410_496,  # the figure counts a sinusoidal table for each stack, which we compute
        _bart(
            model_type="marian",
            activation_function="swish",
            bad_words_ids=[[58100]],
            d_model=512,
            decoder_attention_heads=8,
            decoder_ffn_dim=2048,
            decoder_layers=6,
            decoder_start_token_id=58100,
            decoder_vocab_size=58101,
            encoder_attention_heads=8,
            encoder_ffn_dim=2048,
            encoder_layers=6,
            eos_token_id=0,
            forced_bos_token_id=None,
            forced_eos_token_id=0,
            max_length=512,
            max_position_embeddings=512,
            normalize_embedding=False,
            num_hidden_layers=6,
            pad_token_id=58100,
            scale_embedding=True,
            share_encoder_decoder_embeddings=True,
            static_position_embeddings=True,
            vocab_size=58101,
        ),
        2 * 512 * 512 - 58101,
    ),
    "m2m100_418M": Published(483_905_536, _bart(**_M2M, vocab_size=128112)),
    "nllb-200-distilled-600M": Published(
        615_073_792, _bart(**_M2M, tokenizer_class="NllbTokenizer", vocab_size=256206)
    ),
}
