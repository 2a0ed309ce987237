"""The published shapes of the GPU benchmark, as raw config.json, and tiny versions of them."""

from __future__ import annotations

from typing import Any

from loadtest.bench.models import CONFIGS

_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_GEMMA = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": False,  # published ones are tied; of random weights that gives the token that was read
    "bos_token_id": 2,
    "eos_token_id": 1,
}

GPU_MODELS: dict[str, dict[str, Any]] = {
    "llama-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        **_LLAMA,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    },
    "gemma2-2b": {**_GEMMA, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "num_key_value_heads": 4},
    "gemma3-1b": {
        **_GEMMA,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
    "bart-large": {
        **CONFIGS["E2"],
        "d_model": 1024,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
    },
    "t5-xl": {
        **CONFIGS["E1"],
        "d_model": 2048,
        "d_ff": 5120,
        "num_layers": 24,
        "num_decoder_layers": 24,
        "num_heads": 32,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "bert-base": CONFIGS["N2"],
    "whisper-small": CONFIGS["S1"],
}

_TOY = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("hidden_size", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 64),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_kv": 16,
    "vocab_size": 512,
    "sliding_window": 9,
    "max_source_positions": 24,
    "sliding_window_pattern": 2,
    "full_attention_interval": 2,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
}


def tiny_shape(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a tiny shape of the same family; special tokens behind its vocabulary become one that is in it."""
    most = _TOY["vocab_size"]
    special = {key: 2 for key, value in raw.items() if key.endswith("_token_id") and value >= most}
    return {key: _TOY.get(key, value) for key, value in raw.items()} | special
