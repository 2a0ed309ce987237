"""Published encoders: of texts, and of images."""

from __future__ import annotations

import json

from tests.model.published import Published, published_config

_MINI = dict(hidden_size=384, intermediate_size=1536, num_hidden_layers=6, architectures=["BertModel"])
_LARGE = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
_ROBERTA = dict(bos_token_id=0, eos_token_id=2, layer_norm_eps=1e-5, max_position_embeddings=514, pad_token_id=1)
_DEBERTA_V2 = dict(
    model_type="deberta-v2", norm_rel_ebd="layer_norm", position_buckets=256, share_att_key=True, vocab_size=128100
)


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


_DEIT = json.loads(
    """{"attention_probs_dropout_prob": 0.0, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 768,
    "image_size": 224, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12,
    "num_attention_heads": 12, "num_channels": 3, "num_hidden_layers": 12, "patch_size": 16}"""
)


def _dinov2(**changes: object) -> str:
    base = json.loads(
        """{"apply_layernorm": true, "architectures": ["Dinov2Model"], "attention_probs_dropout_prob": 0.0,
        "drop_path_rate": 0.0, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 768,
        "image_size": 518, "initializer_range": 0.02, "layer_norm_eps": 1e-06, "layerscale_value": 1.0,
        "mlp_ratio": 4, "model_type": "dinov2", "num_attention_heads": 12, "num_channels": 3,
        "num_hidden_layers": 12, "out_features": ["stage12"], "out_indices": [12], "patch_size": 14,
        "qkv_bias": true, "reshape_hidden_states": true, "torch_dtype": "float32", "use_swiglu_ffn": false}"""
    )
    return json.dumps(base | changes)


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

PUBLISHED_ENCODERS = {
    "bert-base-uncased": Published(109_482_240, _bert()),
    "bert-base-cased": Published(108_310_272, _bert(vocab_size=28996)),
    "bert-large-uncased": Published(335_141_888, _bert(**_LARGE)),
    "all-MiniLM-L6-v2": Published(22_713_216, _bert(**_MINI)),
    "esm2_t6_8M_UR50D": Published(
        7_511_680,
        json.dumps(
            {
                **dict(architectures=["EsmForMaskedLM"], attention_probs_dropout_prob=0.0, classifier_dropout=None),
                **dict(emb_layer_norm_before=False, esmfold_config=None, hidden_act="gelu", hidden_dropout_prob=0.0),
                **dict(hidden_size=320, initializer_range=0.02, intermediate_size=1280, is_folding_model=False),
                **dict(layer_norm_eps=1e-5, mask_token_id=32, max_position_embeddings=1026, model_type="esm"),
                **dict(num_attention_heads=20, num_hidden_layers=6, pad_token_id=1, position_embedding_type="rotary"),
                **dict(token_dropout=True, torch_dtype="float32", use_cache=True, vocab_list=None, vocab_size=33),
            }
        ),
    ),
    "roberta-base": Published(
        124_645_632, _bert(**_ROBERTA, model_type="roberta", type_vocab_size=1, vocab_size=50265)
    ),
    "data2vec-text-base": Published(
        124_645_632,
        _bert(
            **_ROBERTA,
            model_type="data2vec-text",
            architectures=["Data2VecTextModel"],
            classifier_dropout=None,
            type_vocab_size=1,
            vocab_size=50265,
        ),
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
        -12 * 768,  # biases of keys: zeros in our network, absent in the published one
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
        768,  # the embedding of masked tokens, for pre-training
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
        256 * 256 + 256,  # a pooler that neither the folder nor `transformers`' base model has
    ),
    "deit-base-distilled-patch16-224": Published(
        87_338_192,
        json.dumps(
            {
                **_DEIT,
                **dict(model_type="deit", architectures=["DeiTForImageClassificationWithTeacher"]),
                "id2label": {str(label): f"class {label}" for label in range(1000)},
            }
        ),
    ),
    # Without the embedding of masked patches.
    "dinov2-base": Published(86_580_480, _dinov2(), not_ours=768),
    "dinov2-giant": Published(
        1_136_480_768,
        _dinov2(hidden_size=1536, num_attention_heads=24, num_hidden_layers=40, use_swiglu_ffn=True),
        not_ours=1536,
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
    "static-retrieval-mrl-en-v1": Published(  # its table's shape gives its sizes
        31_254_528,
        published_config("StaticEmbedding", "static_embedding", vocab_size=30522, hidden_size=1024),
    ),
}
