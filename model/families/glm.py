"""GLM-4 and relatives, whose rotary positions turn neighbours: Llama in all else.

GLM-4 (GLM team 2024) turns half of each head and has biases of q, k and v; GLM-4-0414 (`glm4`) has norms after the
sublayers too. ERNIE 4.5 (Baidu 2025) and Helium (Kyutai 2025) turn whole heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial

from triptych.model.config.layer import Norms
from triptych.model.config.model import ModelConfig
from triptych.model.families import llama
from triptych.model.families.table.decoders import with_attention, with_interleaved_pairs, with_layers
from triptych.model.families.table.helpers import affine
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import LinearRule, Rule

_NORMS = {"input_layernorm": "attn_norms.pre", "post_attention_layernorm": "mlp_norms.pre"}
_SANDWICH = {**_NORMS, "post_self_attn_layernorm": "attn_norms.output", "post_mlp_layernorm": "mlp_norms.output"}


def glm(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(
        **dict(attention_bias=True, head_dim=128, num_key_value_heads=2, rms_norm_eps=1.5625e-7),
        **dict(max_position_embeddings=131_072, partial_rotary_factor=0.5),
    )
    return with_interleaved_pairs(with_attention(llama.config(raw, names, partial=True), out_bias=False))


def glm4(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    base = glm(raw, names)
    norm = base.decoder_stack.final_norm
    return with_layers(base, norms=(Norms(pre=norm, output=norm),) * 2)


def ernie4_5(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(
        **dict(head_dim=128, num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=500_000.0),
        max_position_embeddings=131_072,
    )
    base, bias = llama.config(raw, names), bool(raw.get("use_bias", False))
    base = with_layers(base, feed_forward=replace(base.decoder_stack.layers[0].mlp, bias=bias))
    return with_interleaved_pairs(with_attention(base, qkv_bias=bias, out_bias=bias))


def helium(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(
        **dict(head_dim=128, num_key_value_heads=20, rms_norm_eps=1e-8, rope_theta=100_000.0),
        max_position_embeddings=4096,
    )
    return with_interleaved_pairs(with_attention(llama.config(raw, names), out_bias=False))


def rules(config: ModelConfig, norms: Mapping[str, str] = _NORMS) -> Iterator[Rule]:
    """Yield the rules of GLM-4, whose gate and up are one matrix."""
    yield from llama.NAMES.outside(config)
    for i, layer in enumerate(config.decoder_stack.layers):
        here, there = f"layers.{i}", f"decoder.layers.{i}"
        yield from llama.attention_rules(layer.attention, here, there)
        yield LinearRule(f"{here}.mlp.gate_up_proj", f"{there}.mlp.up", bias=False)
        yield LinearRule(f"{here}.mlp.down_proj", f"{there}.mlp.down", bias=False)
        for stored, norm in norms.items():
            yield from affine(f"{here}.{stored}", f"{there}.{norm}", bias=False)


FAMILIES = {
    "glm": llama.family(glm, rules),
    "glm4": llama.family(glm4, partial(rules, norms=_SANDWICH)),
    "ernie4_5": llama.family(ernie4_5),
    "helium": llama.family(helium),
}
