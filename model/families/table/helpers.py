"""What several tables share: reading keys of config.json, and the rules of fused projections and norms."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from model.config.layer import Activation, AttentionConfig, LayerConfig
from model.config.model import GenerationRules, HeadConfig
from model.errors import ConfigError
from model.families.table.rules import WeightRule

_MOST_LAYERS = 10_000  # a number beyond is a mistake, and would be counted up to
_ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "tanh": Activation.TANH,
}


def activation(raw: Mapping[str, Any], key: str, default: str) -> Activation:
    name = raw.get(key, default)
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{key} {name!r} is not served; served are {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def refuse_unless(raw: Mapping[str, Any], **allowed: object) -> None:
    """Raise for a setting that is present with another value than the one this table computes."""
    for key, value in allowed.items():
        if raw.get(key, value) not in (value, None):
            raise ConfigError(f"{key} = {raw[key]!r} is not served for {raw.get('model_type')!r}, only {value!r}")


def ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Zero, one or several token ids as config.json writes them."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def generation_rules(raw: Mapping[str, Any]) -> GenerationRules:
    """The rules of generation_config.json, which the folder's reader has laid over config.json."""
    ends = [[token] for token in ids(raw.get("eos_token_id"))]
    words = [tuple(word) for word in raw.get("bad_words_ids") or [] if word not in ends]  # as the reference library
    if not all(words):
        raise ConfigError("bad_words_ids holds an empty sequence")
    forced = {name: raw.get(name) for name in ("forced_bos_token_id", "forced_eos_token_id")}
    for name, value in forced.items():
        if isinstance(value, list):
            raise ConfigError(f"{name} with several ids is not served, found {value}")
    return GenerationRules(
        forced_first=forced["forced_bos_token_id"],
        forced_last=forced["forced_eos_token_id"],
        suppressed=(*ids(raw.get("suppress_tokens")), *(word[0] for word in words if len(word) == 1)),
        suppressed_first=ids(raw.get("begin_suppress_tokens")),
        banned_sequences=tuple(word for word in words if len(word) > 1),
    )


def tied(raw: Mapping[str, Any], names: Collection[str] | None, head: str = "lm_head.weight") -> bool:
    """Whether the token table is the output matrix: the tensors decide where they are known."""
    return bool(raw.get("tie_word_embeddings", True)) if names is None else head not in names


def decoder_head(
    raw: Mapping[str, Any], names: Collection[str] | None, weight: str = "lm_head.weight"
) -> HeadConfig | None:
    """Of a decoder-only model; None for a folder of the bare model, where nothing says which token comes next.

    What is not the token table and not stored is missed, unless `architectures` names the bare model.
    """
    if names is None or weight in names or raw.get("tie_word_embeddings") is not False:
        return HeadConfig(tied=tied(raw, names, weight))
    architecture = (raw.get("architectures") or [""])[0] or ""
    bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    return None if bare else HeadConfig(tied=False)


def split_width(hidden_size: int, num_heads: int) -> int:
    """The width of a head where the heads share the model's."""
    if hidden_size % num_heads:
        raise ConfigError(f"hidden size {hidden_size} is not a multiple of {num_heads} heads")
    return hidden_size // num_heads


def repeat(layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """A stack of `count` equal layers, which are one object; raises `ConfigError` for a count that is none."""
    if not 0 < count <= _MOST_LAYERS:
        raise ConfigError(f"the number of layers must be from 1 to {_MOST_LAYERS}, found {count}")
    return (layer,) * count


def layers_by_type(
    raw: Mapping[str, Any], layers: Mapping[str, LayerConfig], count: int, period: int
) -> tuple[LayerConfig, ...]:
    """`count` layers of the types that `layer_types` names, or else every `period`-th one with full attention.

    `layers` has a layer for each type; raises `ConfigError` for other types and for a list of another length.
    """
    types = raw.get("layer_types")
    if types is None:
        kinds = ("full_attention" if (index + 1) % period == 0 else "sliding_attention" for index in range(count))
        return tuple(layers[kind] for kind in kinds)
    if len(types) != count:
        raise ConfigError(f"layer_types names {len(types)} layers, expected {count}")
    unknown = sorted(set(types) - layers.keys())
    if unknown:
        raise ConfigError(f"layer_types {', '.join(unknown)} are not served; served are {', '.join(layers)}")
    return tuple(layers[kind] for kind in types)


def affine(source: str, target: str, *, bias: bool = True) -> Iterator[WeightRule]:
    """Weight and bias of one matrix or norm."""
    yield WeightRule(f"{source}.weight", f"{target}.weight")
    if bias:
        yield WeightRule(f"{source}.bias", f"{target}.bias")


def fused(sources: Mapping[str, int], target: str, *, bias: bool) -> Iterator[WeightRule]:
    """Matrices stored one by one, stacked by rows into one: `sources` maps each name to its rows, in order."""
    start = 0
    for source, size in sources.items():
        yield WeightRule(f"{source}.weight", f"{target}.weight", rows=(start, start + size))
        if bias:
            yield WeightRule(f"{source}.bias", f"{target}.bias", rows=(start, start + size))
        start += size


def self_attention(
    config: AttentionConfig, target: str, query: str, key: str, value: str, out: str
) -> Iterator[WeightRule]:
    sources = {query: config.query_size, key: config.kv_size, value: config.kv_size}
    yield from fused(sources, f"{target}.qkv", bias=config.qkv_bias)
    yield from affine(out, f"{target}.out", bias=config.out_bias)


def cross_attention(
    config: AttentionConfig, target: str, query: str, key: str, value: str, out: str
) -> Iterator[WeightRule]:
    yield from affine(query, f"{target}.q", bias=config.qkv_bias)
    yield from fused({key: config.kv_size, value: config.kv_size}, f"{target}.kv", bias=config.qkv_bias)
    yield from affine(out, f"{target}.out", bias=config.out_bias)
