"""Gemma 4 in GGUF: heads and feed-forwards that differ from layer to layer, vectors for every layer, experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from triptych.model.checkpoint.gguf.metadata import layer_types, read_floats, refuse_other, single
from triptych.model.checkpoint.gguf.table import (
    ATTENTION,
    GATED,
    OUTSIDE,
    SANDWICH_NORMS,
    Architecture,
    layers,
)
from triptych.model.errors import ConfigError
from triptych.model.gguf.container import GGUFModel

_FULL, _SLIDING = "full_attention", "sliding_attention"
_NAMES = {
    **OUTSIDE,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    **layers(
        "model.layers.{}",
        {
            **{**ATTENTION, **GATED, **SANDWICH_NORMS},
            "layer_output_scale.weight": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_exps": "experts.{{}}.gate_proj",
            "ffn_up_exps": "experts.{{}}.up_proj",
            "ffn_down_exps": "experts.{{}}.down_proj",
        },
    ),
}
_KNOWN = (
    *("attention.head_count_kv", "attention.key_length_swa", "attention.value_length_swa", "feed_forward_length"),
    *("attention.sliding_window_pattern", "rope.freq_base_swa", "rope.dimension_count_swa", "expert_count"),
)


def _more(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Any]:
    where, count = f"{model.architecture}.attention", raw["num_hidden_layers"]
    kinds = layer_types(model.array(f"{where}.sliding_window_pattern"))
    if len(kinds) != count:
        raise ConfigError(f"{model.name}: {where}.sliding_window_pattern names {len(kinds)} layers, expected {count}")
    dim = model.integer(f"{where}.key_length_swa")
    refuse_other(model, f"{where}.value_length_swa", dim)
    refuse_other(model, f"{where}.value_length", raw.get("global_head_dim"))
    refuse_other(model, f"{model.architecture}.rope.dimension_count_swa", dim)
    found = {"layer_types": kinds, "head_dim": dim, "rope_parameters": _ropes(model, raw["global_head_dim"])}
    found |= _key_heads(model, kinds) | _feed_forwards(model, raw, count)
    if experts := model.integer(f"{model.architecture}.expert_count"):
        found |= {"enable_moe_block": True, "num_experts": experts}
    if "per_layer_token_embd.weight" in model.tensors:
        found["vocab_size_per_layer_input"] = model.tensors["per_layer_token_embd.weight"].shape[0]
    return found


def _ropes(model: GGUFModel, dim: int) -> dict[str, Any]:
    """Return `rope_parameters`; of full attention the file has a factor for each pair, huge ones for those at rest."""
    where, name = f"{model.architecture}.rope", "rope_freqs.weight"
    factors = read_floats(model.tensors[name]) if name in model.tensors else (1.0,) * (dim // 2)
    turning = sum(factor == 1.0 for factor in factors)
    if len(factors) != dim // 2 or any(factor < 1e20 for factor in factors[turning:]):
        raise ConfigError(f"{model.name}: the tensor rope_freqs is not ones, then pairs at rest, of a head of {dim}")
    share = 2 * turning / dim
    while 2 * int(share * dim // 2) < 2 * turning:  # the table computes back
        share = math.nextafter(share, 2)
    full = {"rope_type": "proportional", "partial_rotary_factor": share}
    return {
        _FULL: {**full, "rope_theta": single(model, f"{where}.freq_base") or 1_000_000.0},
        _SLIDING: {"rope_type": "default", "rope_theta": single(model, f"{where}.freq_base_swa") or 10_000.0},
    }


def _key_heads(model: GGUFModel, kinds: Sequence[str]) -> dict[str, Any]:
    """Return the heads of keys of both kinds of layers, and whether full attention's values are its keys."""
    key = f"{model.architecture}.attention.head_count_kv"
    heads = _by_layer(model, key, len(kinds))
    by_kind = {kind: {one for one, its in zip(heads, kinds, strict=True) if its == kind} for kind in kinds}
    if any(len(found) > 1 for found in by_kind.values()):
        raise ConfigError(f"{model.name}: {key} differs among layers of one kind, which is not served")
    full, sliding = (next(iter(by_kind.get(kind, {0})), 0) for kind in (_FULL, _SLIDING))
    owners = [layer for layer, kind in enumerate(kinds) if kind == _FULL]
    shared = model.integer(f"{model.architecture}.attention.shared_kv_layers") or 0
    owners = [layer for layer in owners if layer < len(kinds) - shared]
    same = any(f"blk.{layer}.attn_v.weight" not in model.tensors for layer in owners)
    if not same and sliding and full != sliding:
        raise ConfigError(
            f"{model.name}: {key} of full attention, {full}, is served only where its values are its keys"
        )
    return {
        "num_key_value_heads": sliding or full,
        "attention_k_eq_v": same,
        "num_global_key_value_heads": full or None,
    }


def _feed_forwards(model: GGUFModel, raw: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the width of the feed-forwards, and whether layers that share keys have one that is twice as wide."""
    key = f"{model.architecture}.feed_forward_length"
    widths, own = _by_layer(model, key, count), count - (raw.get("num_kv_shared_layers") or 0)
    doubled = widths[-1] == 2 * widths[0]
    expected = [widths[0] * (2 if doubled and layer >= own else 1) for layer in range(count)]
    if widths != expected:
        raise ConfigError(f"{model.name}: {key} differs from layer to layer in a way that is not served: {widths}")
    return {"intermediate_size": widths[0], "use_double_wide_mlp": doubled}


def _by_layer(model: GGUFModel, key: str, count: int) -> list[int]:
    """Return a number for each layer."""
    value = model.get(key)
    found = value if isinstance(value, list) else [value] * count
    if len(found) != count or not found or any(type(one) is not int or one < 1 for one in found):
        raise ConfigError(f"{model.name}: {key} must be a positive number for each of {count} layers")
    return found


GEMMA4 = {
    "gemma4": Architecture(
        "gemma4_text",
        {
            "embedding_length": "hidden_size",
            "block_count": "num_hidden_layers",
            "attention.head_count": "num_attention_heads",
            "context_length": "max_position_embeddings",
            "attention.key_length": "global_head_dim",
            "attention.layer_norm_rms_epsilon": "rms_norm_eps",
            "attention.sliding_window": "sliding_window",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        _NAMES,
        known=_KNOWN,
        more=_more,
    )
}
