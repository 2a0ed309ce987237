"""Qwen3-Next and Qwen3.5 in GGUF: layers with a state, whose tensors have names of state-space models.

Qwen3-Next's two fused projections are read as Qwen3.5 has them, one for each input, so that both have the same rules.
Of Qwen3.5 the conversion puts the value heads in turns: the first of each key head, then the second of each, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from triptych.model.checkpoint.gguf.table import (
    CHOSEN_EXPERTS,
    LLAMA_KEYS,
    LLAMA_NAMES,
    Architecture,
    Change,
    Order,
    Rope,
    experts,
    layers,
)
from triptych.model.errors import ConfigError
from triptych.model.gguf.container import GGUFModel

_KEYS = {
    **LLAMA_KEYS,
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}
_EXPERT_KEYS = {
    **_KEYS,
    **CHOSEN_EXPERTS,
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_LAYER = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
_NAMES = {**LLAMA_NAMES, **layers("model.layers.{}", _LAYER)}
_EXPERT_NAMES = {**_NAMES, **layers("model.layers.{}", experts("mlp", "gate"))}
# Positions of a text are the same in every section.
_KNOWN = ("ssm.inner_size", "attention.recurrent_layers", "rope.dimension_sections")


def _more(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Any]:
    where, heads = model.architecture, raw.get("linear_num_value_heads")
    inner = model.integer(f"{where}.ssm.inner_size")
    if not inner or type(heads) is not int or heads < 1 or inner % heads:
        raise ConfigError(f"{model.name}: {where}.ssm.inner_size {inner} is not a multiple of {heads} value heads")
    found: dict[str, Any] = {"linear_value_head_dim": inner // heads}
    if recurrent := model.array(f"{where}.attention.recurrent_layers"):
        kinds = ("linear_attention" if one else "full_attention" for one in recurrent)
        found["layer_types"] = list(kinds)[: raw["num_hidden_layers"]]  # without those that predict further tokens
    return found


def _sizes(raw: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return the heads of keys, the value heads of each, and the widths of both."""
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    keys, values, key_dim, value_dim = (_positive(raw, name) for name in names)
    if values % keys:
        raise ConfigError(f"{values} value heads are not a multiple of {keys} key heads")
    return keys, values // keys, key_dim, value_dim


def _positive(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive number, found {value!r}")
    return value


def _changes(raw: Mapping[str, Any], *, in_turns: bool) -> dict[str, Change]:
    keys, shared, key_dim, value_dim = _sizes(raw)
    before = 2 * keys * key_dim  # rows of queries and keys
    convolution = (before + keys * shared * value_dim, 1, raw["linear_conv_kernel_dim"])
    if not in_turns:  # for each key head its rates, then its decays
        rates = {
            name: Change(rows=Order((keys, shared), (2 * shared, 1), offset))
            for name, offset in (("ssm_beta", 0), ("ssm_alpha", shared))
        }
        return {**rates, "ssm_a": Change(logarithm=True), "ssm_conv1d": Change(shape=convolution)}

    def values(size: int, begin: int = 0) -> Order | None:
        return Order((keys, shared, size), (size, keys * size, 1), begin=begin) if shared > 1 else None

    return {
        "attn_qkv": Change(values(value_dim, before)),
        "attn_gate": Change(values(value_dim)),
        "ssm_beta": Change(values(1)),
        "ssm_alpha": Change(values(1)),
        "ssm_dt": Change(values(1)),
        "ssm_a": Change(values(1), logarithm=True),
        "ssm_conv1d": Change(values(value_dim, before), shape=convolution),
        "ssm_out": Change(columns=values(value_dim)),
    }


_DENSE = Architecture(
    "qwen3_5_text",
    _KEYS,
    _NAMES,
    known=_KNOWN,
    rope=Rope.PLAIN,
    norms_plus_one=True,
    norms_as_they_are=("ssm_norm",),
    more=_more,
    changes=partial(_changes, in_turns=True),
)


def _sparse(*, in_turns: bool, parts: Mapping[str, tuple[str, ...]]) -> Architecture:
    return Architecture(
        "qwen3_5_moe_text",
        _EXPERT_KEYS,
        _EXPERT_NAMES,
        {"norm_topk_prob": True},
        known=_KNOWN,
        rope=Rope.PLAIN,
        norms_plus_one=True,
        norms_as_they_are=("ssm_norm",),
        parts=parts,
        more=_more,
        changes=partial(_changes, in_turns=in_turns),
    )


RECURRENT = {
    "qwen3next": _sparse(in_turns=False, parts={"ssm_ba": ("ssm_beta", "ssm_alpha")}),
    "qwen35": _DENSE,
    "qwen35moe": _sparse(in_turns=True, parts={}),
}
