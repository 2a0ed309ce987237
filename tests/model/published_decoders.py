"""Published dense decoders with RMS norms, without the Gemma family."""

from __future__ import annotations

import json
from typing import Any

from tests.model.published import Published, published_config

_QWEN = dict(sliding_window=None, use_sliding_window=False, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True)


def _llama(**changes: object) -> str:
    base = json.loads(
        """{"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "tie_word_embeddings": false,
        "torch_dtype": "float16", "use_cache": true, "vocab_size": 32000}"""
    )
    return json.dumps(base | changes)


def _factors(count: int) -> dict[str, list[float]]:
    """Return arbitrary factors of the right number, in place of the published ones."""
    return dict(short_factor=[1.0] * count, long_factor=[1.0 + 0.5 * pair for pair in range(count)])


def _phi3(**settings: Any) -> str:
    base = dict(
        attention_bias=False,
        bos_token_id=199999,
        embd_pdrop=0.0,
        eos_token_id=199999,
        hidden_act="silu",
        hidden_size=3072,
        intermediate_size=8192,
        num_attention_heads=32,
        num_hidden_layers=32,
        original_max_position_embeddings=4096,
        pad_token_id=199999,
        resid_pdrop=0.0,
        rms_norm_eps=1e-05,
        rope_theta=10000.0,
    )
    return published_config("Phi3ForCausalLM", "phi3", **{**base, **settings})


PUBLISHED_DECODERS = {
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
    "Phi-3-mini-128k-instruct": Published(
        3_821_079_552,
        _phi3(
            rope_scaling=dict(type="longrope", **_factors(48)),
            bos_token_id=1,
            eos_token_id=32000,
            max_position_embeddings=131072,
            num_key_value_heads=32,
            pad_token_id=32000,
            sliding_window=262144,
            tie_word_embeddings=False,
            vocab_size=32064,
        ),
    ),
    "Phi-4-mini-instruct": Published(
        3_836_021_760,
        _phi3(
            full_attn_mod=1,
            interpolate_factor=1,
            lm_head_bias=False,
            mlp_bias=False,
            partial_rotary_factor=0.75,
            rope_scaling=dict(type="longrope", **_factors(48)),
            max_position_embeddings=131072,
            num_attention_heads=24,
            num_key_value_heads=8,
            sliding_window=262144,
            tie_word_embeddings=True,
            vocab_size=200064,
        ),
    ),
    "granite-3.3-2b-instruct": Published(
        2_533_539_840,
        published_config(
            "GraniteForCausalLM",
            "granite",
            attention_bias=False,
            attention_dropout=0.0,
            attention_multiplier=0.015625,
            bos_token_id=0,
            embedding_multiplier=12.0,
            eos_token_id=0,
            hidden_act="silu",
            hidden_size=2048,
            intermediate_size=8192,
            logits_scaling=8.0,
            max_position_embeddings=131072,
            mlp_bias=False,
            num_attention_heads=32,
            num_hidden_layers=40,
            num_key_value_heads=8,
            pad_token_id=0,
            residual_multiplier=0.22,
            rms_norm_eps=1e-05,
            rope_scaling=None,
            rope_theta=10000000.0,
            tie_word_embeddings=True,
            vocab_size=49159,
        ),
    ),
    "SmolLM3-3B": Published(
        3_075_098_624,
        published_config(
            "SmolLM3ForCausalLM",
            "smollm3",
            attention_bias=False,
            bos_token_id=None,
            eos_token_id=128012,
            hidden_act="silu",
            hidden_size=2048,
            intermediate_size=11008,
            layer_types=["full_attention"] * 36,
            max_position_embeddings=65536,
            max_window_layers=28,
            mlp_bias=False,
            no_rope_layer_interval=4,
            no_rope_layers=[1, 1, 1, 0] * 9,
            num_attention_heads=16,
            num_hidden_layers=36,
            num_key_value_heads=4,
            pad_token_id=128004,
            pretraining_tp=2,
            rms_norm_eps=1e-06,
            rope_scaling=None,
            rope_theta=5000000.0,
            sliding_window=None,
            use_sliding_window=False,
            vocab_size=128256,
        ),
    ),
    "OLMo-2-1124-7B": Published(
        7_298_617_344,
        published_config(
            "Olmo2ForCausalLM",
            "olmo2",
            attention_bias=False,
            eos_token_id=100257,
            hidden_act="silu",
            hidden_size=4096,
            intermediate_size=11008,
            max_position_embeddings=4096,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=32,
            pad_token_id=100277,
            rms_norm_eps=1e-06,
            rope_scaling=None,
            rope_theta=500000,
            tie_word_embeddings=False,
            vocab_size=100352,
        ),
    ),
    "Olmo-3-1025-7B": Published(
        7_298_011_136,
        published_config(
            "Olmo3ForCausalLM",
            "olmo3",
            attention_bias=False,
            eos_token_id=100257,
            hidden_act="silu",
            hidden_size=4096,
            intermediate_size=11008,
            layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
            max_position_embeddings=65536,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=32,
            pad_token_id=100277,
            rms_norm_eps=1e-06,
            rope_scaling=dict(
                attention_factor=1.2079441541679836,
                beta_fast=32.0,
                beta_slow=1.0,
                factor=8.0,
                original_max_position_embeddings=8192,
                rope_type="yarn",
            ),
            rope_theta=500000,
            sliding_window=4096,
            tie_word_embeddings=False,
            vocab_size=100278,
        ),
    ),
    "EXAONE-4.0-1.2B": Published(
        1_279_391_488,
        published_config(
            "Exaone4ForCausalLM",
            "exaone4",
            bos_token_id=1,
            eos_token_id=361,
            head_dim=64,
            hidden_act="silu",
            hidden_size=2048,
            intermediate_size=4096,
            layer_types=["full_attention"] * 30,
            max_position_embeddings=65536,
            num_attention_heads=32,
            num_hidden_layers=30,
            num_key_value_heads=8,
            pad_token_id=0,
            rms_norm_eps=1e-05,
            rope_scaling=dict(
                factor=16.0,
                high_freq_factor=4.0,
                low_freq_factor=1.0,
                original_max_position_embeddings=8192,
                rope_type="llama3",
            ),
            rope_theta=1000000,
            sliding_window=None,
            sliding_window_pattern=None,
            tie_word_embeddings=True,
            vocab_size=102400,
        ),
    ),
}
