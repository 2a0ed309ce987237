"""Which layers the C stacks compute: a list of the settings that they read.

A setting that is not listed must have its default, so torch computes a layer with a new one until C reads it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from triptych.model.config.attention import (
    AlibiConfig,
    AttentionConfig,
    BucketBiasConfig,
    DisentangledConfig,
    GatedDeltaConfig,
    NormConfig,
    RotaryConfig,
    XLNetRelativeConfig,
)
from triptych.model.config.layer import (
    Activation,
    ExpertsConfig,
    GateClamp,
    LayerConfig,
    LayerEmbeddingConfig,
    MLPConfig,
    Norms,
)
from triptych.model.config.stack import ConvolutionConfig, PositionConfig, StackConfig
from triptych.model.native.library import ACTIVATIONS

_READ: dict[type, str] = {  # by class, the fields that C reads, or that torch takes care of around it
    StackConfig: "layers hidden_size causal position embed_norm final_norm token_types tasks embed_norm_last "
    "project_bias project_equal positions_last output_size relative_norm convolution",
    PositionConfig: "kind max_positions offset interleaved inclusive",
    LayerConfig: "mixer feed_forward norms cross parallel one_norm residual_scale embedding scaled shares_weights_with",
    AttentionConfig: "num_heads num_kv_heads head_dim scale qkv_bias out_bias position window softcap qk_norm "
    "qk_norm_span sinks output_gate value_norm keys_as_values windowed keys_of bounded",
    RotaryConfig: "dim theta scaling factor original_max_positions length low_freq_factor high_freq_factor beta_fast "
    "beta_slow truncate attention_factor long_attention_factor growth interleaved short_factors long_factors rotated "
    "sections in_turn frequencies_again frequencies_in_turn",
    AlibiConfig: "slopes",
    BucketBiasConfig: "num_buckets max_distance shared",
    DisentangledConfig: "span max_distance content_to_position position_to_content shared key_bias",
    GatedDeltaConfig: "num_key_heads num_value_heads key_dim value_dim kernel eps",
    NormConfig: "kind eps unit_offset bias gain",
    Norms: "pre output post",
    MLPConfig: "intermediate_size activation gated bias down_bias clamp block bounded",
    GateClamp: "limit gain",
    ExpertsConfig: "count per_token mlp renormalised router_bias shared shared_gate own_norms router_scale "
    "expert_scales",
    LayerEmbeddingConfig: "size activation norm",
    ConvolutionConfig: "width activation eps",
}
_WORDS = {  # of settings that are not listed
    "PositionConfig.every_layer": "positions that are added before every layer",
    "LayerConfig.normed_residual": "sums with what its sublayers read",
    "LayerConfig.channel_scales": "learned scales of channels",
    "AttentionConfig.rotates_first": "norms of queries and keys after their rotation",
    "AttentionConfig.clip": "bounds of queries, keys and values",
    "MLPConfig.xielu": "xIELU",
    "ExpertsConfig.choice": "a router with biases of its choice",
    "ExpertsConfig.mixer_tolerance": "SparseMixer's scores of experts",
    "AttentionConfig.query_offset": "XLNet's relative positions",
    XLNetRelativeConfig.__name__: "XLNet's relative positions",
}


def unsupported_stack(config: StackConfig) -> str | None:
    """Return why C does not compute the layers of a stack; None: it does."""
    if not config.layers:
        return "it has no layers"
    around = (*fields_not_read(config, into_layers=False), *_unsupported_together(config))
    if around:
        return f"it has {around[0]}"
    reasons = ((index, unsupported_layer(layer)) for index, layer in enumerate(config.layers))
    return next((f"layer {index} has {reason}" for index, reason in reasons if reason is not None), None)


def unsupported_layer(config: LayerConfig) -> str | None:
    """Return what of a layer C does not compute; None: nothing."""
    mixer = config.mixer
    if isinstance(mixer, AttentionConfig) and isinstance(mixer.position, DisentangledConfig) and mixer.window:
        return "a window with disentangled positions"
    if isinstance(mixer, AttentionConfig) and mixer.bounded and (mixer.qkv_bias or mixer.out_bias):
        return "bounds of projections with biases"
    bounded = (getattr(mixer, "bounded", False), getattr(config.feed_forward, "bounded", False))
    if any(one and norms.pre is None for one, norms in zip(bounded, config.norms, strict=False)):
        return "bounds of inputs that have no norm"
    return next(fields_not_read(config), None) or unsupported_feed_forward(config.feed_forward)


def unsupported_feed_forward(config: MLPConfig | ExpertsConfig) -> str | None:
    """Return what of a feed-forward C does not compute; None: nothing."""
    if reason := next(fields_not_read(config), None):
        return reason
    if isinstance(config, MLPConfig) and config.bounded and (config.bias or config.down_bias or not config.gated):
        return "bounds of an MLP with biases or without a gate"
    if isinstance(config, ExpertsConfig) and config.shared is not None and _unit(config.shared) != _unit(config.mlp):
        return "a shared expert with another activation"
    return None


def fields_not_read(config: Any, *, into_layers: bool = True) -> Iterator[str]:
    """Yield what differs from its default and is not in the list, at any depth.

    The layers of a stack are left out without `into_layers`. The convolution of a stack is torch's own.
    """
    if isinstance(config, Activation):
        if config not in ACTIVATIONS:
            yield f"the activation {config.value}, which C does not compute"
        return
    if isinstance(config, tuple):
        for part in config:
            yield from fields_not_read(part)
        return
    if not is_dataclass(config) or isinstance(config, ConvolutionConfig):
        return
    kind = type(config)
    if kind not in _READ:
        yield _WORDS.get(kind.__name__, f"{kind.__name__}, which C does not read")
        return
    read = _READ[kind].split()
    for field in fields(config):
        if field.name not in read and getattr(config, field.name) != _default(field):
            name = f"{kind.__name__}.{field.name}"
            yield _WORDS.get(name, f"{name}, which C does not read")
    for name in read:
        if into_layers or name != "layers":
            yield from fields_not_read(getattr(config, name))


def _unsupported_together(config: StackConfig) -> Iterator[str]:
    if not config.causal and any(layer.attention.sinks or layer.attention.output_gate for layer in config.layers):
        yield "attention sinks or output gates, in an encoder"


def _unit(config: MLPConfig) -> tuple[object, ...]:
    """Return the settings of the step between the two projections."""
    return config.gated, config.activation, config.clamp


def _default(field: Field[Any]) -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default
