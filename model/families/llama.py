"""Llama and its variants: rotary positions, RMS pre-norm, a gated MLP, grouped-query attention.

Llama (Touvron et al. 2023), Mistral (a sliding window), Ministral (in some layers), Qwen2 (biases of q, k, v), Qwen3
(norms of q and k), Phi-3 and Phi-4-mini (fused projections, partial rotation, LongRoPE). Gemma builds on this table.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import ExpertsConfig, LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.errors import ConfigError
from triptych.model.families.table.decoders import ExpertNames, decoder_model, either_way, with_attention
from triptych.model.families.table.helpers import (
    activation,
    affine,
    fused,
    heads_norm,
    ignore_unless,
    layers_by_type,
    refuse_unless,
    repeat,
    self_attention,
    split_width,
    switched_on,
)
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rope import rotary, with_default_rope
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule
from triptych.model.families.table.stored_names import StoredNames

NAMES = StoredNames(
    tokens="embed_tokens",
    layer="layers.{}",
    attention=tuple(f"self_attn.{part}_proj" for part in "qkvo"),
    norms=("input_layernorm", "post_attention_layernorm"),
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    final_norm="norm",
)
_PHI3 = replace(NAMES, attention=("self_attn.qkv_proj", "self_attn.o_proj"), mlp=("mlp.gate_up_proj", "mlp.down_proj"))
_PRE_NORMS = {"input_layernorm": "attn_norms.pre", "post_attention_layernorm": "mlp_norms.pre"}


def config(
    raw: Settings,
    names: Collection[str] | None,
    *,
    norm: NormConfig | None = None,
    head_scale: float = 1.0,
    partial: bool = False,
    growing: bool = False,
) -> ModelConfig:
    """Build the configuration; without a `norm` all are RMS norms. `partial` and `growing` are for `rotary`."""
    raw.get("pretraining_tp")  # how products were divided in training
    size, heads = raw["hidden_size"], raw["num_attention_heads"]
    dim = raw.get("head_dim") or split_width(size, heads)
    bias = switched_on(raw, "attention_bias")
    norm = norm or NormConfig(NormKind.RMS, raw.get("rms_norm_eps", 1e-6))
    layer = LayerConfig(
        mixer=AttentionConfig(
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=dim,
            scale=dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
            position=rotary(raw, dim, partial=partial, growing=growing),
        ),
        feed_forward=MLPConfig(
            raw["intermediate_size"],
            activation(raw, "hidden_act", "silu"),
            gated=True,
            bias=switched_on(raw, "mlp_bias"),
        ),
        norms=(Norms(pre=norm),) * 2,
    )
    decoder = StackConfig(repeat(layer, raw["num_hidden_layers"]), size, causal=True, final_norm=norm)
    return decoder_model(raw, names, decoder, raw.get("max_position_embeddings", 2048), head_scale=head_scale)


def mistral(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(sliding_window=4096, max_position_embeddings=131_072, num_key_value_heads=8)
    return with_attention(config(raw, names), window=raw.get("sliding_window"))


_MINISTRAL3_ROPE = dict(type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16_384)
_MINISTRAL3_ROPE |= dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)


def ministral3(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build Ministral 3, whose queries grow with their position beyond the original context."""
    raw = raw.otherwise(head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=262_144, num_key_value_heads=8)
    raw = with_default_rope(raw, _MINISTRAL3_ROPE)
    return with_attention(config(raw, names, growing=True), window=raw.get("sliding_window"))


def ministral(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build Ministral, whose layers are listed: with a window, or without."""
    raw = raw.otherwise(max_position_embeddings=131_072, num_key_value_heads=8)
    base, window = config(raw, names), raw.get("sliding_window", 4096)
    layer, count = base.decoder_stack.layers[0], base.decoder_stack.num_layers
    sliding = replace(layer, mixer=replace(layer.attention, window=window))
    layers = {"sliding_attention": sliding, "full_attention": layer}
    if window is None and raw.get("layer_types") is None:
        return base
    return replace(base, decoder=replace(base.decoder_stack, layers=layers_by_type(raw, layers, count, count + 1)))


def qwen2(
    raw: Settings, names: Collection[str] | None, slides: Callable[[int, int], bool] = operator.ge
) -> ModelConfig:
    """Build Qwen2; `slides` says of a layer's index and `max_window_layers` whether the layer has a window."""
    base = config(raw.otherwise(max_position_embeddings=32_768).but(attention_bias=False), names)
    return _windowed(raw, with_attention(base, qkv_bias=True, out_bias=False), slides)


def qwen3(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    base = config(raw.otherwise(head_dim=128, max_position_embeddings=32_768), names)
    return _windowed(raw, with_attention(base, qk_norm=base.decoder_stack.final_norm), operator.ge)


def _windowed(raw: Settings, base: ModelConfig, slides: Callable[[int, int], bool]) -> ModelConfig:
    """Return a Qwen with windows in the layers that `layer_types` or `slides` tells; they are off by default."""
    limit, window, kinds = raw.get("max_window_layers", 28), raw.get("sliding_window", 4096), raw.get("layer_types")
    layer, count = base.decoder_stack.layers[0], base.decoder_stack.num_layers
    layers = {"full_attention": layer}
    if raw.get("use_sliding_window", False) and window is not None:
        layers["sliding_attention"] = replace(layer, mixer=replace(layer.attention, window=window))
        chosen = ["sliding_attention" if slides(index, limit) else "full_attention" for index in range(count)]
        raw = raw.but(layer_types=kinds or chosen)
    elif "sliding_attention" in (kinds or ()):
        raise ConfigError("sliding_attention in layer_types needs use_sliding_window = true and a sliding_window")
    return replace(base, decoder=replace(base.decoder_stack, layers=layers_by_type(raw, layers, count, period=1)))


def qwen2_vl(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build the language model of Qwen2-VL and Qwen2.5-VL."""
    raw = raw.otherwise(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6, max_window_layers=80)
    return qwen2(raw, names)


def qwen3_vl(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(num_key_value_heads=32, max_position_embeddings=128_000, rope_theta=500_000.0)
    return qwen3(without_windows(raw), names)


def without_windows(raw: Settings) -> Settings:
    """Return the settings of a Qwen whose class knows no windows."""
    ignore_unless(raw, use_sliding_window=False)
    return raw.but(use_sliding_window=False, layer_types=None)


def phi3(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, full_attn_mod=1, interpolate_factor=1, lm_head_bias=False)
    raw = raw.otherwise(max_position_embeddings=4096, rms_norm_eps=1e-5)
    if raw.follows_class:  # whose default counts over what stands in `rope_scaling`
        raw = raw.otherwise(original_max_position_embeddings=4096)
    raw.get("original_max_position_embeddings")  # of stretched contexts
    return with_attention(config(raw, names, partial=True), window=raw.get("sliding_window"))


def rules(
    config: ModelConfig, norms: Mapping[str, str] = _PRE_NORMS, experts: ExpertNames | None = None
) -> Iterator[Rule]:
    """Yield the weight rules; `norms` maps the stored names of a layer's norms to parameters."""
    yield from NAMES.outside(config)
    for i, layer in enumerate(config.decoder_stack.layers):
        yield from attention_rules(layer.attention, f"layers.{i}", f"decoder.layers.{i}")
        yield from rest(config, i, norms, experts)


def attention_rules(attention: AttentionConfig, here: str, there: str) -> Iterator[Rule]:
    """Yield the rules of a layer's attention; `here` is the layer's stored name, `there` the parameters'."""
    names = (f"{here}.self_attn.{part}_proj" for part in "qkvo")
    yield from self_attention(attention, f"{there}.attn", *names)
    yield from heads_norm(attention, f"{there}.attn", f"{here}.self_attn.q_norm", f"{here}.self_attn.k_norm")
    if attention.sinks:
        yield TensorRule(f"{here}.self_attn.sinks", f"{there}.attn.sinks")


def rest(
    config: ModelConfig, index: int, norms: Mapping[str, str] = _PRE_NORMS, experts: ExpertNames | None = None
) -> Iterator[Rule]:
    """Yield the rules of a layer's feed-forward and its norms."""
    mlp, here, there = config.decoder_stack.layers[index].feed_forward, f"layers.{index}", f"decoder.layers.{index}"
    if isinstance(mlp, ExpertsConfig):
        assert experts is not None
        yield from experts.rules(mlp, config.decoder_stack.hidden_size, here, f"{there}.mlp")
    else:
        parts = ("gate_proj", "up_proj") if mlp.gated else ("up_proj",)
        sources = {f"{here}.mlp.{part}": mlp.intermediate_size for part in parts}
        yield from fused(sources, f"{there}.mlp.up", bias=mlp.bias)
        yield LinearRule(f"{here}.mlp.down_proj", f"{there}.mlp.down", bias=mlp.bias)
    yield from _norms(config, here, there, norms)


def _norms(config: ModelConfig, here: str, there: str, norms: Mapping[str, str]) -> Iterator[Rule]:
    kind = config.decoder_stack.final_norm  # of all norms
    assert kind is not None
    for stored, norm in norms.items() if kind.gain else ():
        yield from affine(f"{here}.{stored}", f"{there}.{norm}", bias=kind.kind is NormKind.LAYER and kind.bias)


# A head is of no use to an embedder or a classifier.
DROPPED = ("layers.*.self_attn.rotary_emb.inv_freq", "lm_head.*")


def family(
    config: Callable[[Settings, Collection[str] | None], ModelConfig],
    rules: Callable[[ModelConfig], Iterator[Rule]] = rules,
    **fields: Any,
) -> Family:
    """Return the table of a relative of Llama, which may see both directions."""
    return either_way(Family(config, rules, "model.", DROPPED, **fields))


FAMILIES = {
    "llama": family(config),
    "mistral": family(mistral),
    "ministral": family(ministral),
    "ministral3": family(ministral3),
    "qwen2": family(qwen2),
    "qwen3": family(qwen3),
    "qwen2_vl_text": family(qwen2_vl),
    "qwen2_5_vl_text": family(qwen2_vl),
    "qwen3_vl_text": family(qwen3_vl),
    "phi3": family(phi3, _PHI3.rules),
}
