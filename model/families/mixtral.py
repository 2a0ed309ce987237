"""Mixtral (Jiang et al. 2024), Mistral with eight experts in each layer, two for each token; and relatives.

Phi-3.5-MoE (Abdin et al. 2024) is Phi-3's network with Mixtral's experts, which SparseMixer chooses. Its norms are
LayerNorms. Its rotary settings have the temperatures of LongRoPE as numbers of their own.

gpt-oss (OpenAI 2025) has experts with clamped gates and biases, attention sinks, a window in every second layer. Gate
and up of its experts take turns, output by output; published folders have both in MXFP4.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from triptych.model.config.attention import NormConfig, NormKind, RotaryConfig
from triptych.model.config.layer import ExpertsConfig, GateClamp
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError, shown
from triptych.model.families import llama
from triptych.model.families.table.decoders import ExpertNames, with_attention, with_experts, with_windows
from triptych.model.families.table.helpers import refuse_unless
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rope import with_default_rope
from triptych.model.families.table.rules import Family, FusedExperts

_MOE = "block_sparse_moe"
NAMES = ExpertNames(f"{_MOE}.gate", f"{_MOE}.experts", ("w1", "w3", "w2"))


def mixtral(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(max_position_embeddings=131_072, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6)
    base = with_attention(llama.config(raw, names), window=raw.get("sliding_window"))
    count, per_token = raw.get("num_local_experts", 8), raw.get("num_experts_per_tok", 2)
    return with_experts(base, ExpertsConfig(count, per_token, base.decoder_stack.layers[0].mlp, renormalised=True))


_CONTEXT = "original_max_position_embeddings"
_TEMPERATURES = ("short_mscale", "long_mscale")


def phimoe(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(
        **dict(max_position_embeddings=131_072, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6),
        num_experts_per_tok=2,
    )
    refuse_unless(raw, num_experts_per_tok=2)  # SparseMixer chooses two
    raw.get("original_max_position_embeddings"), raw.get("input_jitter_noise")  # of stretched contexts; of training
    norm = NormConfig(NormKind.LAYER, raw["rms_norm_eps"])
    base = _rotary(raw, names, norm)
    bias = bool(raw.get("lm_head_bias", False))
    base = replace(base, head=base.head and replace(base.head, bias=bias))
    base = with_attention(base, window=raw.get("sliding_window"))
    experts = ExpertsConfig(
        raw.get("num_local_experts", 16),
        per_token=2,
        mlp=base.decoder_stack.layers[0].mlp,
        renormalised=False,
        mixer_tolerance=float(raw.get("router_jitter_noise", 0.01)),
    )
    return with_experts(base, experts)


def _rotary(raw: Settings, names: Collection[str] | None, norm: NormConfig) -> ModelConfig:
    """Return Llama's model with the rotary settings of a Phi-3.5-MoE.

    Beyond the original context transformers 5.23 changes the temperature alone, and keeps the list for short ones.
    """
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    scaling = raw.get(key) or {}
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type", "default")) == "default":
        return llama.config(raw, names, norm=norm)
    for name in _TEMPERATURES:
        if isinstance(scaling.get(name), bool) or not isinstance(scaling.get(name), int | float):
            raise ConfigError(f"{key}.{name} of a phimoe must be a number, found {shown(scaling.get(name))}")
    rest = {name: value for name, value in scaling.items() if name not in _TEMPERATURES}
    if rest.get(_CONTEXT) is not None:  # its class takes this one, unlike others
        raw = raw.but(**{_CONTEXT: None})
    base = llama.config(raw.but(**{key: rest}), names, norm=norm)
    position = base.decoder_stack.layers[0].attention.position
    assert isinstance(position, RotaryConfig)
    if not position.short_factors:
        raise ConfigError(
            f"{key} of a phimoe must be of type 'default' or 'longrope', found {position.scaling.value!r}"
        )
    short, long = (float(scaling[name]) for name in _TEMPERATURES)
    position = replace(position, attention_factor=short, long_factors=position.short_factors)
    return with_attention(base, position=replace(position, long_attention_factor=None if long == short else long))


_ROPE = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
_ROPE |= dict(original_max_position_embeddings=4096)
_OSS_PERIOD = 2  # every second layer has full attention


def gpt_oss(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.but(hidden_act="silu")  # the gate of experts is silu, whatever the file says
    raw.get("experts_per_token"), raw.get("initial_context_length")  # said once more, as OpenAI's code calls them
    raw = with_default_rope(raw, _ROPE)
    raw = raw.otherwise(
        **dict(attention_bias=True, head_dim=64, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=150_000.0),
        max_position_embeddings=131_072,
    )
    base = with_attention(llama.config(raw, names), sinks=True)
    mlp = base.decoder_stack.layers[0].mlp
    clamp = GateClamp(raw.get("swiglu_limit", 7.0), raw.get("swiglu_alpha", 1.702))
    count, per_token = raw.get("num_local_experts", 128), raw.get("num_experts_per_tok", 4)
    experts = ExpertsConfig(count, per_token, replace(mlp, bias=True, clamp=clamp), renormalised=True, router_bias=True)
    base = with_experts(base, experts)
    return with_windows(base, raw, raw.get("sliding_window", 128), _OSS_PERIOD)


_OSS_NAMES = ExpertNames(router="mlp.router")


def _fused(
    name: str, kind: str, parts: Collection[str], *, transposed: bool = False, written: bool = False
) -> FusedExperts:
    """Return the tensor of a kind that all experts of a layer share."""
    each = tuple(f"{_OSS_NAMES.experts}.{{}}.{part}.{kind}" for part in parts)
    return FusedExperts(
        f"{_OSS_NAMES.experts}.{name}", each, interleaved=len(each) > 1, transposed=transposed, written=written
    )


_FUSED = tuple(
    fused
    for name, parts in (("gate_up_proj", _OSS_NAMES.parts[:2]), ("down_proj", _OSS_NAMES.parts[2:]))
    for fused in (
        _fused(name, "weight", parts, transposed=True, written=True),
        _fused(f"{name}_bias", "bias", parts, written=True),
        _fused(f"{name}_blocks", "weight_packed", parts),
        _fused(f"{name}_scales", "weight_scale", parts),
    )
)


_RULES = partial(llama.rules, experts=NAMES)
FAMILIES = {
    "mixtral": llama.family(mixtral, _RULES, fused=NAMES.fused(), spelled={".mlp.": f".{_MOE}."}),
    "phimoe": llama.family(
        phimoe, _RULES, fused=NAMES.fused(), spelled={".mlp.router.": f".{_MOE}.gate.", ".mlp.": f".{_MOE}."}
    ),
    "gpt_oss": Family(gpt_oss, partial(llama.rules, experts=_OSS_NAMES), "model.", llama.DROPPED, fused=_FUSED),
}
