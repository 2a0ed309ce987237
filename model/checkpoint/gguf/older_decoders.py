"""GGUF's decoders of 2019 to 2023: GPT-2, StarCoder, GPT-NeoX, BLOOM, MPT and Falcon.

Published folders have their matrices transposed (GPT-2) or the rows of q, k and v head by head (GPT-NeoX, BLOOM,
Falcon); GGUF has them as they are multiplied with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych.model.checkpoint.gguf.metadata import has, refuse_other, single
from triptych.model.checkpoint.gguf.table import Architecture, Rope, layers
from triptych.model.errors import ConfigError
from triptych.model.gguf.container import GGUFModel

_NORM_EPS = {"attention.layer_norm_epsilon": "layer_norm_epsilon"}
_GPT2_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    **layers(
        "transformer.h.{}",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
    ),
}
_BLOOM_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_BLOOM_NAMES = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    **layers("transformer.h.{}", _BLOOM_LAYER),
}
_NEOX_NAMES = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    **layers(
        "gpt_neox.layers.{}",
        {
            **_BLOOM_LAYER,
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
        },
    ),
}
_MPT_NAMES = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.norm_f",
    "output": "lm_head",
    **layers(
        "transformer.blocks.{}",
        {
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
    ),
}
_TWO_NORMS = {"blk.{}.attn_norm": "transformer.h.{}.ln_mlp", "blk.{}.attn_norm_2": "transformer.h.{}.ln_attn"}


def _gpt_bigcode(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Keys and values are those of one head, or of every head; their matrix tells, as the key is always 1."""
    rows, hidden = model.tensors["blk.0.attn_qkv.weight"].shape[0], raw["n_embd"]
    return {"multi_query": rows != 3 * hidden}


def _gpt_neox(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": has(model, ".attn_qkv.bias")}


def _mpt(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Its slopes stand in settings of their own."""
    where = f"{model.architecture}.attention"
    refuse_other(model, f"{where}.head_count_kv", raw["n_heads"])
    if not (slope := single(model, f"{where}.max_alibi_bias")):
        raise ConfigError(f"{model.name}: {where}.max_alibi_bias {slope} is not served: learned positions are not")
    clip = single(model, f"{where}.clamp_kqv")
    return {"attn_config": {"alibi": True, "alibi_bias_max": slope, "clip_qkv": clip}}


def _falcon(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Any]:
    heads, norms = raw["num_attention_heads"], 2 if has(model, ".attn_norm_2.weight") else 1
    kv_heads = model.integer(f"{model.architecture}.attention.head_count_kv", heads)
    grouped = norms == 2 or kv_heads not in (1, heads)
    return {
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": grouped,
        "num_ln_in_parallel_attn": norms,
        "bias": has(model, ".attn_qkv.bias"),
    }


def _falcon_table(names: Mapping[str, str]) -> Architecture:
    return Architecture(
        "falcon",
        {
            "embedding_length": "hidden_size",
            "block_count": "num_hidden_layers",
            "feed_forward_length": "ffn_hidden_size",
            "attention.head_count": "num_attention_heads",
            "context_length": "max_position_embeddings",
            **_NORM_EPS,
        },
        names,
        known=("attention.head_count_kv",),
        rope=Rope.PLAIN,
        in_order=("attn_qkv",),
        more=_falcon,
    )


# The 40B and the 180B, with a norm for each of the two sublayers.
FALCON_GROUPS = _falcon_table({**_BLOOM_NAMES, **_TWO_NORMS})
_GPT2_KEYS = {
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "context_length": "n_positions",
    **_NORM_EPS,
}
OLDER_DECODERS = {
    "starcoder": Architecture(
        "gpt_bigcode", _GPT2_KEYS, _GPT2_NAMES, known=("attention.head_count_kv",), more=_gpt_bigcode
    ),
    "gpt2": Architecture(
        "gpt2",
        _GPT2_KEYS,
        _GPT2_NAMES,
        known=("attention.head_count_kv",),
        in_order=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "gptneox": Architecture(
        "gpt_neox",
        {
            "embedding_length": "hidden_size",
            "block_count": "num_hidden_layers",
            "feed_forward_length": "intermediate_size",
            "attention.head_count": "num_attention_heads",
            "context_length": "max_position_embeddings",
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
        _NEOX_NAMES,
        known=("attention.head_count_kv",),
        rope=Rope.PLAIN,
        in_order=("attn_qkv",),
        more=_gpt_neox,
    ),
    "bloom": Architecture(
        "bloom",
        {"embedding_length": "hidden_size", "block_count": "n_layer", "attention.head_count": "n_head", **_NORM_EPS},
        _BLOOM_NAMES,
        known=("context_length", "feed_forward_length", "attention.head_count_kv"),
        in_order=("attn_qkv",),
    ),
    "mpt": Architecture(
        "mpt",
        {
            "embedding_length": "d_model",
            "block_count": "n_layers",
            "attention.head_count": "n_heads",
            "context_length": "max_seq_len",
            **_NORM_EPS,
        },
        _MPT_NAMES,
        known=("feed_forward_length", "attention.head_count_kv", "attention.max_alibi_bias", "attention.clamp_kqv"),
        more=_mpt,
    ),
    "falcon": _falcon_table(_BLOOM_NAMES),
}
