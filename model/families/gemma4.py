"""Gemma 4's language model (Google DeepMind 2026).

Layers of windows and of full attention have other heads; values are normalised, layers share keys, every layer gets a
vector of each token, and one size has experts parallel to the MLP.

Pictures are in `gemma4_pictures.py`; of sounds and films nothing is served.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import ExpertsConfig, LayerConfig, LayerEmbeddingConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.errors import ConfigError
from triptych.model.families import gemma, llama
from triptych.model.families.table.decoders import ExpertNames, decoder_model
from triptych.model.families.table.helpers import activation, affine, check_layers, ignore_unless
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rope import rotary, settings_by_type
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule

_PERIOD = 6  # every sixth layer has full attention, and the last one
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES: dict[str, dict[str, Any]] = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
_EXPERTS = ExpertNames("router.proj", "experts", shared="mlp")
# The norms of experts and a parallel MLP; one is the layer's own norm before its feed-forward.
_TWO_SIDES = {
    "pre_feedforward_layernorm": "mlp.shared_norms.pre",
    "post_feedforward_layernorm_1": "mlp.shared_norms.output",
    "pre_feedforward_layernorm_2": "mlp.norms.pre",
    "post_feedforward_layernorm_2": "mlp.norms.output",
}


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    # "vision": the tokens of a picture see each other; the table of pictures reads it too.
    if raw.get("use_bidirectional_attention") not in (None, "vision"):
        raise ConfigError("use_bidirectional_attention of all tokens is not served for Gemma 4")
    raw = raw.otherwise(vocab_size=262_144, max_position_embeddings=131_072)
    raw = raw.but(rope_parameters=raw.get("rope_parameters") or _ROPES)
    norm, size = NormConfig(NormKind.RMS, raw.get("rms_norm_eps", 1e-6)), raw["hidden_size"]
    decoder = StackConfig(_layers(raw, _layer(raw, norm, size)), size, causal=True, final_norm=norm)
    model = decoder_model(raw, names, decoder, raw["max_position_embeddings"])
    softcap = raw.get("final_logit_softcapping")
    head = model.head and replace(model.head, softcap=softcap)
    return replace(model, embedding=replace(model.embedding, scale=size**0.5), head=head)


# Parts that the 12B lacks, whatever a file says: its class knows neither key.
_WITHOUT: dict[str, object] = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}


def unified(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build the 12B, which has no vectors for every layer and no experts."""
    ignore_unless(raw, **_WITHOUT)
    return config(raw.otherwise(max_position_embeddings=262_144, sliding_window=1024).but(**_WITHOUT), names)


def _layer(raw: Settings, norm: NormConfig, size: int) -> LayerConfig:
    """Return what all layers have in common, with the heads of those with windows."""
    act, bias = activation(raw, "hidden_activation", "gelu_pytorch_tanh"), bool(raw.get("attention_bias", False))
    heads = raw["num_attention_heads"], raw.get("num_key_value_heads", 4), raw.get("head_dim", 256)
    mlp = MLPConfig(raw["intermediate_size"], act, gated=True, bias=False)
    width, rows = raw.get("hidden_size_per_layer_input", 256), raw.get("vocab_size_per_layer_input", 262_144)
    if width and rows != raw["vocab_size"]:
        raise ConfigError(f"vocab_size_per_layer_input = {rows} is not served, only vocab_size ({raw['vocab_size']})")
    experts, both = _experts(raw, mlp, norm, size), Norms(pre=norm, output=norm)
    return LayerConfig(
        AttentionConfig(*heads, scale=1.0, qkv_bias=bias, out_bias=bias, qk_norm=norm, value_norm=norm),
        feed_forward=mlp if experts is None else experts,
        norms=(both, both if experts is None else Norms(output=norm)),
        embedding=LayerEmbeddingConfig(width, act, norm) if width else None,
        scaled=True,
    )


def _experts(raw: Settings, mlp: MLPConfig, norm: NormConfig, size: int) -> ExpertsConfig | None:
    count, chosen, inner = (raw.get(name) for name in ("num_experts", "top_k_experts", "moe_intermediate_size"))
    if not raw.get("enable_moe_block", False):
        return None
    if count is None or chosen is None or inner is None:
        raise ConfigError("enable_moe_block needs num_experts, top_k_experts and moe_intermediate_size")
    return ExpertsConfig(
        count,
        chosen,
        replace(mlp, intermediate_size=inner),
        renormalised=True,
        shared=mlp,
        own_norms=norm,
        router_scale=size**-0.5,
        expert_scales=True,
    )


def _layers(raw: Settings, base: LayerConfig) -> tuple[LayerConfig, ...]:
    """Return all layers; the last `num_kv_shared_layers` read the keys of the last one of their type before them."""
    kinds, shared = _kinds(raw), raw.get("num_kv_shared_layers", 0)
    own, doubled = len(kinds) - shared, bool(raw.get("use_double_wide_mlp", False))
    if not 0 < own <= len(kinds):
        raise ConfigError(f"num_kv_shared_layers must be from 0 to {len(kinds) - 1}, found {shared}")
    made: dict[LayerConfig, LayerConfig] = {}  # equal layers are one object
    layers = []
    for index, (kind, attention) in enumerate(zip(kinds, _attentions(raw, base.attention, kinds), strict=True)):
        layer = replace(base, mixer=attention)
        if index >= own:
            owners = [place for place in range(own) if kinds[place] == kind]
            if not owners:
                raise ConfigError(f"layer {index} shares keys, but no layer of {kind} before layer {own} has any")
            mixer = replace(attention, keys_of=owners[-1], keys_as_values=False, value_norm=None)
            layer = replace(layer, mixer=mixer, feed_forward=_doubled(base) if doubled else base.feed_forward)
        layers.append(made.setdefault(layer, layer))
    return tuple(layers)


def _kinds(raw: Settings) -> list[str]:
    """Return the type of each layer."""
    count, kinds = raw["num_hidden_layers"], raw.get("layer_types")
    check_layers(count)
    if kinds is None:
        kinds = [_SLIDING if (index + 1) % _PERIOD else _FULL for index in range(count)]
    if len(kinds) != count:
        raise ConfigError(f"layer_types names {len(kinds)} layers, and num_hidden_layers is {count}")
    return [*kinds[:-1], _FULL]  # whatever the file says of the last one, as in `transformers`


def _attentions(raw: Settings, base: AttentionConfig, kinds: list[str]) -> Iterator[AttentionConfig]:
    """Yield each layer's attention, with the heads that files have by layer, or by type."""
    ropes = settings_by_type(raw, dict.fromkeys(_ROPES, raw.but(rope_scaling=None)))
    same, window = bool(raw.get("attention_k_eq_v", False)), raw.get("sliding_window", 512)
    heads = raw.get("num_global_key_value_heads")
    wide = {"head_dim": raw.get("global_head_dim", 512), **({"num_key_value_heads": heads} if same and heads else {})}
    by_layer = _by_layer(raw, len(kinds))
    for index, kind in enumerate(kinds):
        if kind not in ropes:
            raise ConfigError(f"layer_types {kind} are not served; served are {', '.join(ropes)}")
        full = kind == _FULL
        changes = (wide if full else {}) if by_layer is None else by_layer.get(index, {})
        if unknown := changes.keys() - {"head_dim", "num_key_value_heads"}:
            raise ConfigError(f"per_layer_config of {', '.join(sorted(unknown))} is not served for Gemma 4")
        dim = changes.get("head_dim", base.head_dim)
        yield replace(
            base,
            head_dim=dim,
            num_kv_heads=changes.get("num_key_value_heads", base.num_kv_heads),
            position=rotary(ropes[kind], dim),
            window=None if full else window,
            keys_as_values=same and full,
        )


def _by_layer(raw: Settings, count: int) -> dict[int, dict[str, Any]] | None:
    """Return what layers have of their own, by index; files name layers with as many digits as the last one (`05`)."""
    found: dict[str, dict[str, Any]] | None = raw.get("per_layer_config")
    if found is None:
        return None
    if unknown := [name for name in found if not (name.isdecimal() and int(name) < count)]:
        raise ConfigError(f"per_layer_config names {', '.join(unknown)}, expected layers from 0 to {count - 1}")
    return {int(name): changes for name, changes in found.items()}


def _doubled(layer: LayerConfig) -> MLPConfig | ExpertsConfig:
    """Return a layer's feed-forward with an MLP that is twice as wide."""
    found = layer.feed_forward
    if isinstance(found, ExpertsConfig):
        assert found.shared is not None
        return replace(found, shared=replace(found.shared, intermediate_size=2 * found.shared.intermediate_size))
    return replace(found, intermediate_size=2 * found.intermediate_size)


def rules(config: ModelConfig) -> Iterator[Rule]:
    norms = gemma.SANDWICH_NORMS
    if config.has_experts:
        norms = {stored: norm for stored, norm in norms.items() if stored not in _TWO_SIDES} | _TWO_SIDES
    yield from llama.rules(config, norms=norms, experts=_EXPERTS)
    if config.decoder_stack.layer_embedding is not None:
        there = "decoder.layer_embeddings"
        yield TensorRule("embed_tokens_per_layer.weight", f"{there}.tokens.weight")
        yield LinearRule("per_layer_model_projection", f"{there}.project", bias=False)
        yield TensorRule("per_layer_projection_norm.weight", f"{there}.norm.weight")
    for index, layer in enumerate(config.decoder_stack.layers):
        yield from _extra_rules(layer, f"layers.{index}", f"decoder.layers.{index}")


def _extra_rules(layer: LayerConfig, here: str, there: str) -> Iterator[Rule]:
    """Yield the rules of what a layer has in addition to Gemma 3's."""
    yield TensorRule(f"{here}.layer_scalar", f"{there}.scale")
    if layer.embedding is not None:
        yield LinearRule(f"{here}.per_layer_input_gate", f"{there}.embedding.gate", bias=False)
        yield LinearRule(f"{here}.per_layer_projection", f"{there}.embedding.project", bias=False)
        yield from affine(f"{here}.post_per_layer_input_norm", f"{there}.embedding.norm", bias=False)
    if isinstance(layer.feed_forward, ExpertsConfig):
        yield TensorRule(f"{here}.router.scale", f"{there}.mlp.router_norm.weight")
        yield TensorRule(f"{here}.router.per_expert_scale", f"{there}.mlp.scales")


def unused(config: ModelConfig) -> Iterator[str]:
    """Yield the names of keys and values of layers that read others'."""
    for index, attention in enumerate(config.decoder_stack.attentions):
        if attention.keys_of is not None:
            yield from (f"layers.{index}.self_attn.{part}.*" for part in ("k_proj", "v_proj", "k_norm"))


_FUSED = _EXPERTS.fused("experts.gate_up_proj", "experts.down_proj", written=True)
_FAMILY = Family(config, rules, "model.", llama.DROPPED, fused=_FUSED, unused=unused)
_UNIFIED = replace(_FAMILY, config=unified)
FAMILIES = {
    "gemma4_text": _FAMILY,
    "gemma4_unified_text": _UNIFIED,
}
