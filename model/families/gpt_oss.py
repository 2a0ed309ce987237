"""gpt-oss (OpenAI 2025): experts with clamped gates and biases, attention sinks, a window in every second layer.

Gate and up of its experts take turns, output by output; published folders have both in MXFP4.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from triptych.model.config.layer import ExpertsConfig, GateClamp
from triptych.model.config.model import ModelConfig
from triptych.model.families import llama
from triptych.model.families.table.decoders import ExpertNames, with_attention, with_experts
from triptych.model.families.table.helpers import layers_by_type
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, FusedExperts

_ROPE = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
_ROPE |= dict(original_max_position_embeddings=4096)
_PERIOD = 2  # every second layer has full attention


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.but(hidden_act="silu")  # the gate of experts is silu, whatever the file says
    raw.get("experts_per_token"), raw.get("initial_context_length")  # said once more, as OpenAI's code calls them
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raw = raw.but(rope_parameters=_ROPE)
    raw = raw.otherwise(
        **dict(attention_bias=True, head_dim=64, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=150_000.0),
        max_position_embeddings=131_072,
    )
    base = with_attention(llama.config(raw, names), sinks=True)
    assert base.decoder is not None
    mlp = base.decoder.layers[0].mlp
    clamp = GateClamp(raw.get("swiglu_limit", 7.0), raw.get("swiglu_alpha", 1.702))
    count, per_token = raw.get("num_local_experts", 128), raw.get("num_experts_per_tok", 4)
    experts = ExpertsConfig(count, per_token, replace(mlp, bias=True, clamp=clamp), renormalised=True, router_bias=True)
    base = with_experts(base, experts)
    assert base.decoder is not None
    layer = base.decoder.layers[0]
    sliding = replace(layer, mixer=replace(layer.attention, window=raw.get("sliding_window", 128)))
    layers = {"sliding_attention": sliding, "full_attention": layer}
    stack = layers_by_type(raw, layers, base.decoder.num_layers, _PERIOD)
    return replace(base, decoder=replace(base.decoder, layers=stack))


_NAMES = ExpertNames(router="mlp.router")


def _fused(
    name: str, kind: str, parts: Collection[str], *, transposed: bool = False, written: bool = False
) -> FusedExperts:
    """Return the tensor of a kind that all experts of a layer share."""
    each = tuple(f"{_NAMES.experts}.{{}}.{part}.{kind}" for part in parts)
    return FusedExperts(
        f"{_NAMES.experts}.{name}", each, interleaved=len(each) > 1, transposed=transposed, written=written
    )


_FUSED = tuple(
    fused
    for name, parts in (("gate_up_proj", _NAMES.parts[:2]), ("down_proj", _NAMES.parts[2:]))
    for fused in (
        _fused(name, "weight", parts, transposed=True, written=True),
        _fused(f"{name}_bias", "bias", parts, written=True),
        _fused(f"{name}_blocks", "weight_packed", parts),
        _fused(f"{name}_scales", "weight_scale", parts),
    )
)
FAMILIES = {
    "gpt_oss": Family(config, partial(llama.rules, experts=_NAMES), "model.", llama.DROPPED, fused=_FUSED),
}
