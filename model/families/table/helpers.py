"""Functions that several tables share: config.json's fields, and rules of fused projections and norms."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from triptych.model.config.attention import AttentionConfig, NormSpan, RotaryConfig
from triptych.model.config.layer import Activation, LayerConfig
from triptych.model.config.model import HeadConfig
from triptych.model.errors import ConfigError, shown
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import LinearRule, TensorRule

_MAX_LAYERS = 10_000  # a larger number is an error in the file
_ACTIVATIONS = {
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_accurate": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_python_tanh": Activation.GELU_TANH,
    "gelu_10": Activation.CLIPPED_GELU,
    "quick_gelu": Activation.QUICK_GELU,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "hardswish": Activation.HARD_SWISH,
    "mish": Activation.MISH,
    "relu6": Activation.RELU6,
    "leaky_relu": Activation.LEAKY_RELU,
    "sigmoid": Activation.SIGMOID,
    "tanh": Activation.TANH,
    "laplace": Activation.LAPLACE,
    "sqrtsoftplus": Activation.SQRT_SOFTPLUS,
    "linear": Activation.IDENTITY,
}


def activation(raw: Mapping[str, Any], key: str, default: str) -> Activation:
    """Return the activation function that `key` names; raises `ConfigError` for an unknown name."""
    name = raw.get(key, default)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(f"{key} = {shown(name)} is not served; served are {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def switched_on(raw: Settings, key: str) -> bool:
    """Return whether a setting is on; one that the reference's class does not know is ignored."""
    if not raw.get(key, False):
        return False
    if raw.follows_class and not raw.knows(key):
        raw.ignore(key, raw[key])
        return False
    return True


def refuse_unless(raw: Mapping[str, Any], **allowed: object) -> None:
    """Raise `ConfigError` for a setting whose value is present and differs from the one this table computes.

    What the reference's class does not know is ignored instead.
    """
    for key, value in allowed.items():
        if raw.get(key, value) in (value, None):
            continue
        if isinstance(raw, Settings) and raw.without_effect(key):
            raw.ignore(key, raw[key])
        else:
            raise ConfigError(f"{key} = {shown(raw[key])} is not served for {raw.get('model_type')!r}, only {value!r}")


def ignore_unless(raw: Settings, **served: object) -> None:
    """Ignore settings that the reference's class has and its model does not read.

    A folder's own code may read them: there they must be as `served`.
    """
    for key, value in served.items():
        if raw.get(key, value) not in (value, None):
            raw.ignore(key, raw[key])


def ids(value: object, key: str = "eos_token_id") -> tuple[int, ...]:
    """Return a field of no, one or several token ids as a tuple; raises `ConfigError` for anything else."""
    if value is None:
        return ()
    values = value if isinstance(value, list | tuple) else [value]
    for one in values:
        if isinstance(one, bool) or not (isinstance(one, int) or (isinstance(one, float) and one.is_integer())):
            raise ConfigError(f"{key} must be a token id or a list of them, found {one!r}"[:200])
    return tuple(map(int, values))


def tied(raw: Mapping[str, Any], names: Collection[str] | None, head: str = "lm_head.weight") -> bool:
    """Return whether the head's matrix is the token embedding: by the tensor names if known, else by the setting."""
    return bool(raw.get("tie_word_embeddings", True)) if names is None else head not in names


def decoder_head(
    raw: Mapping[str, Any], names: Collection[str] | None, weight: str = "lm_head.weight"
) -> HeadConfig | None:
    """Return the head of a decoder-only model; None for a checkpoint without one (`architectures`: a bare model).

    An untied head whose tensor is missing, of a model that should have one, fails when the weights are loaded.
    """
    if names is None or weight in names or raw.get("tie_word_embeddings") is not False:
        return HeadConfig(tied=tied(raw, names, weight))
    architecture = (raw.get("architectures") or [""])[0] or ""
    is_bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    return None if is_bare else HeadConfig(tied=False)


def split_width(hidden_size: int, num_heads: int) -> int:
    """Return hidden size / heads, the width of a head; raises `ConfigError` if it is not whole."""
    if hidden_size % num_heads:
        raise ConfigError(f"hidden size {hidden_size} is not a multiple of {num_heads} heads")
    return hidden_size // num_heads


def repeat(layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Return `count` equal layers, all the same object; raises `ConfigError` for an invalid count."""
    check_layers(count)
    return (layer,) * count


def check_layers(count: int) -> None:
    """Raise `ConfigError` for a number of layers that no file has."""
    if not 0 < count <= _MAX_LAYERS:
        raise ConfigError(f"the number of layers must be from 1 to {_MAX_LAYERS}, found {count}")


def layers_by_type(
    raw: Mapping[str, Any], layers: Mapping[str, LayerConfig], count: int, period: int, first: int | None = None
) -> tuple[LayerConfig, ...]:
    """Return `count` layers of the types in `layer_types`; without it every `period`-th has full attention.

    The first of these is layer `first`, by default the last of a period. `layers` has a layer for each type. Raises
    `ConfigError` for other types and for a list of another length.
    """
    types = raw.get("layer_types")
    if types is None:
        place = period - 1 if first is None else first
        kinds = ("full_attention" if index % period == place else "sliding_attention" for index in range(count))
        return tuple(layers[kind] for kind in kinds)
    if len(types) != count:
        raise ConfigError(f"layer_types names {len(types)} layers, and num_hidden_layers is {count}")
    unknown = sorted(set(types) - layers.keys())
    if unknown:
        raise ConfigError(f"layer_types {', '.join(unknown)} are not served; served are {', '.join(layers)}")
    return tuple(layers[kind] for kind in types)


def affine(source: str, target: str, *, bias: bool = True) -> Iterator[TensorRule]:
    """Yield the rules of the weight and the bias of a norm."""
    yield TensorRule(f"{source}.weight", f"{target}.weight")
    if bias:
        yield TensorRule(f"{source}.bias", f"{target}.bias")


def fused(sources: Mapping[str, int], target: str, *, bias: bool) -> Iterator[LinearRule]:
    """Yield the rules that fuse stored projections by rows: `sources` maps each name to its rows, in order."""
    start = 0
    for source, size in sources.items():
        yield LinearRule(source, target, bias, rows=(start, start + size))
        start += size


def self_attention(
    config: AttentionConfig, target: str, query: str, key: str, value: str, out: str
) -> Iterator[LinearRule]:
    """Yield the rules of separately stored q, k, v and output projections; those of q, k and v that exist are fused."""
    queries, _, keys, values = config.projected_sizes
    sources = {query: queries, key: keys, value: values}
    yield from fused({name: size for name, size in sources.items() if size}, f"{target}.qkv", bias=config.qkv_bias)
    yield LinearRule(out, f"{target}.out", config.out_bias)


def heads_norm(config: AttentionConfig, target: str, query: str, key: str) -> Iterator[TensorRule]:
    """Yield the rules of the norms of queries and keys, if there are any, without biases."""
    if config.qk_norm is None:
        return
    whole = config.qk_norm_span is NormSpan.ALL_HEADS
    sides = ((query, "q", config.query_size), (key, "k", config.kv_size))
    for source, side, size in sides[: 1 if config.keys_of is not None else 2]:
        yield TensorRule(f"{source}.weight", f"{target}.{side}_norm.weight", shape=(size,) if whole else None)


def cross_attention(
    config: AttentionConfig, target: str, query: str, key: str, value: str, out: str
) -> Iterator[LinearRule]:
    """Yield the rules of cross attention: q alone, k and v fused, and the output projection."""
    yield LinearRule(query, f"{target}.q", config.qkv_bias)
    yield from fused({key: config.kv_size, value: config.kv_size}, f"{target}.kv", bias=config.qkv_bias)
    yield LinearRule(out, f"{target}.out", config.out_bias)


def query_scale(raw: Settings) -> float:
    """Return what Gemma's scores are multiplied by. Raises `ConfigError`."""
    scalar = raw.get("query_pre_attn_scalar", 256)
    if not scalar > 0:
        raise ConfigError(f"query_pre_attn_scalar must be positive, found {scalar}")
    return float(scalar**-0.5)


def axial_rotary(
    vision: Settings, dim: int, theta: float, *, kinds: Collection[str] = ("axial", "default"), in_turn: bool = False
) -> RotaryConfig:
    """Return the rotation of a tower's heads of `dim` dimensions, half by the row of a patch and half by its column.

    `theta` is the default, and `kinds` are the values of `rope_type` that mean this rotation. Rows and columns take
    the frequencies in turn (Pixtral), or the same ones. Raises `ConfigError` for another kind, and for a `dim` that is
    no multiple of 4.
    """
    rope = vision.get("rope_parameters") or {}
    if (kind := rope.get("rope_type", "axial")) not in kinds:
        raise ConfigError(f"vision_config.rope_parameters.rope_type must be 'axial', found {shown(kind)}")
    if dim % 4:
        raise ConfigError(f"vision_config: heads of {dim} dimensions do not turn by rows and columns")
    sections, theta = (dim // 4,) * 2, rope.get("rope_theta", theta)
    return RotaryConfig(dim, theta, sections=sections, frequencies_in_turn=in_turn, frequencies_again=not in_turn)
