"""Phi-3.5-MoE (Abdin et al. 2024): Phi-3's network with Mixtral's experts, which SparseMixer chooses.

Its norms are LayerNorms. Its rotary settings have the temperatures of LongRoPE as numbers of their own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from triptych.model.config.attention import NormConfig, NormKind, RotaryConfig
from triptych.model.config.layer import ExpertsConfig
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError, shown
from triptych.model.families import llama, mixtral
from triptych.model.families.table.decoders import either_way, with_attention, with_experts
from triptych.model.families.table.helpers import refuse_unless
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family

_CONTEXT = "original_max_position_embeddings"
_TEMPERATURES = ("short_mscale", "long_mscale")


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(
        **dict(max_position_embeddings=131_072, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6),
        num_experts_per_tok=2,
    )
    refuse_unless(raw, num_experts_per_tok=2)  # SparseMixer chooses two
    raw.get("original_max_position_embeddings"), raw.get("input_jitter_noise")  # of stretched contexts; of training
    norm = NormConfig(NormKind.LAYER, raw["rms_norm_eps"])
    base = _rotary(raw, names, norm)
    base = replace(base, head=base.head and replace(base.head, bias=bool(raw.get("lm_head_bias", False))))
    base = with_attention(base, window=raw.get("sliding_window"))
    assert base.decoder is not None
    experts = ExpertsConfig(
        raw.get("num_local_experts", 16),
        per_token=2,
        mlp=base.decoder.layers[0].mlp,
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
    assert base.decoder is not None
    position = base.decoder.layers[0].attention.position
    assert isinstance(position, RotaryConfig)
    if not position.short_factors:
        raise ConfigError(
            f"{key} of a phimoe must be of type 'default' or 'longrope', found {position.scaling.value!r}"
        )
    short, long = (float(scaling[name]) for name in _TEMPERATURES)
    position = replace(position, attention_factor=short, long_factors=position.short_factors)
    return with_attention(base, position=replace(position, long_attention_factor=None if long == short else long))


FAMILIES = {
    "phimoe": either_way(
        Family(
            config,
            partial(llama.rules, experts=mixtral.NAMES),
            "model.",
            llama.DROPPED,
            fused=mixtral.NAMES.fused(),
            spelled={".mlp.router.": ".block_sparse_moe.gate.", ".mlp.": ".block_sparse_moe."},
        )
    )
}
