"""Published models by their config.json alone: every setting is understood, and parameter counts are as published.

The files are written down as they are published, but for names, paths, versions and label tables. A figure counts a
tied matrix once. It was compared with `transformers`' own class (5.x, meta device) as well; where that one or
the figure counts something that we do not, or the other way round, the row says how much and why.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from model.families import config_from_raw
from model.inspection.anatomy import dissect
from tests.model.published_decoders import PUBLISHED_DECODERS
from tests.model.published_experts import PUBLISHED_EXPERTS
from tests.model.published_speech import PUBLISHED_SPEECH


@dataclass(frozen=True)
class Published:
    """`not_ours`: parameters that the published figure counts and we do not."""

    parameters: int
    config: str
    not_ours: int = 0


def _bert(**changes: object) -> str:
    base = json.loads(
        """{"architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": false,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
        "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
        "type_vocab_size": 2, "use_cache": true, "vocab_size": 30522}"""
    )
    return json.dumps(base | changes)


def _deberta(**changes: object) -> str:
    base = json.loads(
        """{"attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
        "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-07, "max_position_embeddings": 512,
        "max_relative_positions": -1, "num_attention_heads": 12, "num_hidden_layers": 12, "pos_att_type": "p2c|c2p",
        "position_biased_input": false, "relative_attention": true, "type_vocab_size": 0}"""
    )
    return json.dumps(base | changes)


_DEBERTA_V2 = dict(
    model_type="deberta-v2", norm_rel_ebd="layer_norm", position_buckets=256, share_att_key=True, vocab_size=128100
)


def _gpt2(size: int, layers: int, heads: int) -> str:
    return f"""{{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": {size}, "n_head": {heads},
        "n_layer": {layers}, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
        "summary_use_proj": true, "vocab_size": 50257}}"""


def _llama(**changes: object) -> str:
    base = json.loads(
        """{"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "tie_word_embeddings": false,
        "torch_dtype": "float16", "use_cache": true, "vocab_size": 32000}"""
    )
    return json.dumps(base | changes)


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
    """In 5.x `transformers` ties their head, although the folders hold a matrix of its own."""
    sizes = dict(d_ff=1024, num_heads=6, num_layers=8, num_decoder_layers=8, relative_attention_max_distance=128)
    return _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False, **{**sizes, **changes})


_BASE = dict(d_model=768, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=3072, decoder_ffn_dim=3072)
_MINI = dict(hidden_size=384, intermediate_size=1536, num_hidden_layers=6, architectures=["BertModel"])
_LARGE = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
_ROBERTA = dict(bos_token_id=0, eos_token_id=2, layer_norm_eps=1e-5, max_position_embeddings=514, pad_token_id=1)
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
_QWEN = dict(sliding_window=None, use_sliding_window=False, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True)


def _modernbert(**changes: object) -> str:
    base = json.loads(
        """{"architectures": ["ModernBertForMaskedLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": false, "classifier_dropout": 0.0,
        "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": true,
        "deterministic_flash_attn": false, "embedding_dropout": 0.0, "eos_token_id": 50282,
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "gradient_checkpointing": false,
        "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0,
        "initializer_range": 0.02, "intermediate_size": 1152, "layer_norm_eps": 1e-05, "local_attention": 128,
        "local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": false, "mlp_dropout": 0.0,
        "model_type": "modernbert", "norm_bias": false, "norm_eps": 1e-05, "num_attention_heads": 12,
        "num_hidden_layers": 22, "pad_token_id": 50283, "position_embedding_type": "absolute",
        "sep_token_id": 50282, "tie_word_embeddings": true, "vocab_size": 50368}"""
    )
    return json.dumps(base | changes)


NOMIC = """{"activation_function": "swiglu", "architectures": ["NomicBertModel"], "attn_pdrop": 0.0,
    "auto_map": {"AutoModel": "modeling_hf_nomic_bert.NomicBertModel"}, "bos_token_id": null, "causal": false,
    "dense_seq_output": true, "embd_pdrop": 0.0, "eos_token_id": null, "fused_bias_fc": true,
    "fused_dropout_add_ln": true, "initializer_range": 0.02, "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048, "mlp_fc1_bias": false, "mlp_fc2_bias": false, "model_type": "nomic_bert",
    "n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12, "n_positions": 8192, "pad_vocab_size_multiple": 64,
    "parallel_block": false, "parallel_block_tied_norm": false, "prenorm": false, "qkv_proj_bias": false,
    "reorder_and_upcast_attn": false, "resid_pdrop": 0.0, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": false, "rotary_emb_scale_base": null, "rotary_scaling_factor": null,
    "scale_attn_by_inverse_layer_idx": false, "scale_attn_weights": true, "summary_activation": null,
    "summary_first_dropout": 0.0, "summary_proj_to_labels": true, "summary_type": "cls_index",
    "summary_use_proj": true, "type_vocab_size": 2, "use_cache": true, "use_flash_attn": true, "use_rms_norm": false,
    "use_xentropy": true, "vocab_size": 30528}"""

PUBLISHED = {
    "gpt2": Published(124_439_808, _gpt2(768, 12, 12)),
    "gpt2-medium": Published(354_823_168, _gpt2(1024, 24, 16)),
    "gpt2-large": Published(774_030_080, _gpt2(1280, 36, 20)),
    "gpt2-xl": Published(1_557_611_200, _gpt2(1600, 48, 25)),
    "Llama-2-7b-hf": Published(6_738_415_616, _llama()),
    "TinyLlama-1.1B": Published(
        1_100_048_384,
        _llama(
            attention_bias=False, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_key_value_heads=4
        ),
    ),
    "Llama-3.1-8B": Published(
        8_030_261_248,
        _llama(
            attention_bias=False,
            attention_dropout=0.0,
            intermediate_size=14336,
            max_position_embeddings=131072,
            mlp_bias=False,
            num_key_value_heads=8,
            rope_scaling=dict(
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
                rope_type="llama3",
            ),
            rope_theta=500000.0,
            vocab_size=128256,
        ),
    ),
    "Mistral-7B-v0.1": Published(
        7_241_732_096,
        _llama(
            model_type="mistral",
            intermediate_size=14336,
            max_position_embeddings=32768,
            num_key_value_heads=8,
            rope_theta=10000.0,
            sliding_window=4096,
        ),
    ),
    "Qwen2-0.5B": Published(
        494_032_768,
        _llama(
            model_type="qwen2",
            hidden_size=896,
            intermediate_size=4864,
            max_position_embeddings=131072,
            max_window_layers=24,
            num_attention_heads=14,
            num_hidden_layers=24,
            num_key_value_heads=2,
            vocab_size=151936,
            **(_QWEN | {"sliding_window": 131072}),
        ),
    ),
    "Qwen3-0.6B": Published(
        596_049_920,
        _llama(
            model_type="qwen3",
            attention_bias=False,
            head_dim=128,
            hidden_size=1024,
            intermediate_size=3072,
            max_position_embeddings=40960,
            max_window_layers=28,
            num_attention_heads=16,
            num_hidden_layers=28,
            num_key_value_heads=8,
            vocab_size=151936,
            **_QWEN,
        ),
    ),
    "pythia-160m": Published(
        162_322_944,
        """{"architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
        "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 12, "num_hidden_layers": 12,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": false, "torch_dtype": "float16",
        "use_cache": true, "use_parallel_residual": true, "vocab_size": 50304}""",
    ),
    "Phi-3-mini-4k-instruct": Published(
        3_821_079_552,
        _llama(
            model_type="phi3",
            attention_bias=False,
            auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
            embd_pdrop=0.0,
            hidden_size=3072,
            intermediate_size=8192,
            original_max_position_embeddings=4096,
            resid_pdrop=0.0,
            rope_theta=10000.0,
            sliding_window=2047,
            vocab_size=32064,
        ),
    ),
    "gemma-2-2b": Published(
        2_614_341_888,
        """{"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
        "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32",
        "use_cache": true, "vocab_size": 256000}""",
    ),
    "gemma-3-1b": Published(
        999_885_952,
        """{"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
        "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
        "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 262144}""",
    ),
    "gemma-2b": Published(
        2_506_172_416,
        """{"architectures": ["GemmaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 2,
        "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu", "hidden_activation": null, "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma",
        "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
        "use_cache": true, "vocab_size": 256000}""",
    ),
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
    # Of these the figures leave final_logits_bias out, a buffer to `transformers` and a head's bias to us.
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
        74_410_496,  # with a sinusoidal table for each stack, which we compute
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
    "bert-base-uncased": Published(109_482_240, _bert()),
    "bert-base-cased": Published(108_310_272, _bert(vocab_size=28996)),
    "bert-large-uncased": Published(335_141_888, _bert(**_LARGE)),
    "all-MiniLM-L6-v2": Published(22_713_216, _bert(**_MINI)),
    "roberta-base": Published(
        124_645_632, _bert(**_ROBERTA, model_type="roberta", type_vocab_size=1, vocab_size=50265)
    ),
    "xlm-roberta-base": Published(
        278_043_648,
        _bert(**_ROBERTA, model_type="xlm-roberta", type_vocab_size=1, vocab_size=250002, output_past=True),
    ),
    "xlm-roberta-xl": Published(
        3_482_485_760,
        _bert(
            **_ROBERTA,
            model_type="xlm-roberta-xl",
            architectures=["XLMRobertaXLForMaskedLM"],
            hidden_size=2560,
            intermediate_size=10240,
            num_attention_heads=32,
            num_hidden_layers=36,
            type_vocab_size=1,
            vocab_size=250880,
        ),
    ),
    "camembert-base": Published(
        110_621_952,
        _bert(
            **{**_ROBERTA, "bos_token_id": 5, "eos_token_id": 6},
            model_type="camembert",
            architectures=["CamembertForMaskedLM"],
            output_past=True,
            type_vocab_size=1,
            vocab_size=32005,
        ),
    ),
    "ModernBERT-base": Published(149_014_272, _modernbert()),
    "ModernBERT-large": Published(
        394_781_696,
        _modernbert(hidden_size=1024, intermediate_size=2624, num_hidden_layers=28, num_attention_heads=16),
    ),
    "EuroBERT-210m": Published(
        211_766_016,
        """{"architectures": ["EuroBertForMaskedLM"], "attention_bias": false, "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "modeling_eurobert.EuroBertModel"}, "bos_token": "<|begin_of_text|>",
        "bos_token_id": 128000, "clf_pooling": "late", "eos_token": "<|end_of_text|>", "eos_token_id": 128001,
        "head_dim": 64, "hidden_act": "silu", "hidden_dropout": 0.0, "hidden_size": 768, "initializer_range": 0.02,
        "intermediate_size": 3072, "mask_token": "<|mask|>", "mask_token_id": 128002,
        "max_position_embeddings": 8192, "mlp_bias": false, "model_type": "eurobert", "num_attention_heads": 12,
        "num_hidden_layers": 12, "num_key_value_heads": 12, "pad_token": "<|end_of_text|>", "pad_token_id": 128001,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 250000,
        "tie_word_embeddings": false, "use_cache": false, "vocab_size": 128256}""",
    ),
    "nomic-embed-text-v1.5": Published(136_731_648, NOMIC),
    "gte-base-en-v1.5": Published(
        136_776_192,
        """{"architectures": ["NewModel"], "attention_probs_dropout_prob": 0.0, "classifier_dropout": null,
        "auto_map": {"AutoModel": "modeling.NewModel"}, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12,
        "layer_norm_type": "layer_norm", "logn_attention_clip1": false, "logn_attention_scale": false,
        "max_position_embeddings": 8192, "model_type": "new", "num_attention_heads": 12, "num_hidden_layers": 12,
        "pack_qkv": true, "pad_token_id": 0, "position_embedding_type": "rope",
        "rope_scaling": {"factor": 2.0, "type": "ntk"}, "rope_theta": 500000, "type_vocab_size": 0,
        "unpad_inputs": false, "use_memory_efficient_attention": false, "vocab_size": 30528}""",
    ),
    "jina-embeddings-v3-hf": Published(
        559_364_096,
        _bert(
            **{**_ROBERTA, "max_position_embeddings": 8194},
            **_LARGE,
            model_type="jina_embeddings_v3",
            architectures=["JinaEmbeddingsV3Model"],
            position_embedding_type=None,
            rope_parameters={"rope_theta": 20000.0, "rope_type": "default"},
            type_vocab_size=1,
            vocab_size=250002,
        ),
    ),
    "all-mpnet-base-v2": Published(
        109_486_464,
        """{"architectures": ["MPNetForMaskedLM"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0,
        "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
        "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 514, "model_type": "mpnet", "num_attention_heads": 12, "num_hidden_layers": 12,
        "pad_token_id": 1, "relative_attention_num_buckets": 32, "vocab_size": 30527}""",
    ),
    "distilbert-base-uncased": Published(
        66_362_880,
        """{"activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1, "dim": 768,
        "dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02, "max_position_embeddings": 512,
        "model_type": "distilbert", "n_heads": 12, "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1,
        "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": false, "tie_weights_": true, "vocab_size": 30522}""",
    ),
    "albert-base-v2": Published(
        11_683_584,
        _bert(
            model_type="albert",
            architectures=["AlbertForMaskedLM"],
            classifier_dropout_prob=0.1,
            down_scale_factor=1,
            embedding_size=128,
            gap_size=0,
            hidden_act="gelu_new",
            inner_group_num=1,
            net_structure_type=0,
            num_hidden_groups=1,
            num_memory_blocks=0,
            vocab_size=30000,
        ),
    ),
    "ms-marco-MiniLM-L6-v2": Published(
        22_713_601,
        _bert(
            architectures=["BertForSequenceClassification"],
            hidden_size=384,
            id2label={"0": "LABEL_0"},
            intermediate_size=1536,
            num_hidden_layers=6,
            sbert_ce_default_activation_function="torch.nn.modules.linear.Identity",
            sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.0.1"},
        ),
    ),
    "bge-reranker-v2-m3": Published(
        567_755_777,
        _bert(
            **{**_ROBERTA, "max_position_embeddings": 8194},
            architectures=["XLMRobertaForSequenceClassification"],
            classifier_dropout=None,
            hidden_size=1024,
            id2label={"0": "LABEL_0"},
            intermediate_size=4096,
            model_type="xlm-roberta",
            num_attention_heads=16,
            num_hidden_layers=24,
            output_past=True,
            type_vocab_size=1,
            vocab_size=250002,
        ),
    ),
    "deberta-base": Published(
        138_601_728,
        _deberta(model_type="deberta", padding_idx=0, pos_att_type="c2p|p2c", vocab_size=50265),
        -12 * 768,  # biases of keys, which are zeros here and absent there
    ),
    "deberta-v3-base": Published(183_831_552, _deberta(**_DEBERTA_V2)),
    "deberta-v2-xlarge": Published(
        884_593_152,
        _deberta(
            **_DEBERTA_V2,
            attention_head_size=64,
            conv_act="gelu",
            conv_kernel_size=3,
            hidden_size=1536,
            intermediate_size=6144,
            num_attention_heads=24,
            num_hidden_layers=24,
        ),
    ),
    "xlnet-base-cased": Published(
        116_718_336,
        """{"architectures": ["XLNetLMHeadModel"], "attn_type": "bi", "bi_data": false, "bos_token_id": 1,
        "clamp_len": -1, "d_head": 64, "d_inner": 3072, "d_model": 768, "dropout": 0.1, "end_n_top": 5,
        "eos_token_id": 2, "ff_activation": "gelu", "initializer_range": 0.02, "layer_norm_eps": 1e-12, "mem_len": null,
        "model_type": "xlnet", "n_head": 12, "n_layer": 12, "pad_token_id": 5, "reuse_len": null, "same_length": false,
        "start_n_top": 5, "summary_activation": "tanh", "summary_last_dropout": 0.1, "summary_type": "last",
        "summary_use_proj": true, "untie_r": true, "vocab_size": 32000}""",
        768,  # the vector of masked tokens, for pre-training
    ),
    "electra-small-discriminator": Published(
        13_548_800,
        _bert(
            model_type="electra",
            architectures=["ElectraForPreTraining"],
            embedding_size=128,
            hidden_size=256,
            intermediate_size=1024,
            num_attention_heads=4,
            summary_activation="gelu",
            summary_last_dropout=0.1,
            summary_type="first",
            summary_use_proj=True,
        ),
        256 * 256 + 256,  # a pooler, which the folder has not (nor has `transformers`' base model)
    ),
    "vit-base-patch16-224": Published(
        86_567_656,
        json.dumps(
            json.loads(
                """{"architectures": ["ViTForImageClassification"], "attention_probs_dropout_prob": 0.0,
                "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 768, "image_size": 224,
                "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12, "model_type": "vit",
                "num_attention_heads": 12, "num_channels": 3, "num_hidden_layers": 12, "patch_size": 16,
                "qkv_bias": true}"""
            )
            | {"id2label": {str(i): f"class {i}" for i in range(1000)}}
        ),
    ),
    "vit-base-patch16-224-in21k": Published(
        86_389_248,
        """{"architectures": ["ViTModel"], "attention_probs_dropout_prob": 0.0, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0, "hidden_size": 768, "image_size": 224, "initializer_range": 0.02,
        "intermediate_size": 3072, "layer_norm_eps": 1e-12, "model_type": "vit", "num_attention_heads": 12,
        "num_channels": 3, "num_hidden_layers": 12, "patch_size": 16, "qkv_bias": true}""",
    ),
}


PUBLISHED |= {
    name: Published(*row) for name, row in {**PUBLISHED_DECODERS, **PUBLISHED_EXPERTS, **PUBLISHED_SPEECH}.items()
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    row = PUBLISHED[name]
    anatomy = dissect(config_from_raw(json.loads(row.config)))
    total = anatomy.total_parameters - anatomy.parameters.get("masked_head", 0)  # which no figure of an encoder counts
    assert total == row.parameters - row.not_ours


@pytest.mark.parametrize(("factor", "longest"), [(None, 8192), (2, 2048)])
def test_nomic_reads_no_text_whose_rotary_base_would_depend_on_its_length(factor: int | None, longest: int) -> None:
    config = config_from_raw({**json.loads(NOMIC), "rotary_scaling_factor": factor})
    assert config.max_positions == longest
