"""Single values of a GGUF file's metadata, and what the presence of tensors tells."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from model.errors import ConfigError
from model.gguf.container import GGUFModel


def single(model: GGUFModel, key: str) -> Any:
    """Return a value; one for each layer must be the same for all of them."""
    value = model.get(key)
    if isinstance(value, list):
        if len(set(value)) > 1:
            raise ConfigError(f"{model.name}: {key} differs from layer to layer, which is not served")
        value = value[0] if value else None
    return decimal(value) if isinstance(value, float) else value


def decimal(value: float) -> float:
    """Return the shortest decimal number that is this one in float32: metadata has 1e-6 as 9.99999997e-07."""
    stored = struct.pack("<f", value)
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((short for short in shorter if struct.pack("<f", short) == stored), value)


def rows(model: GGUFModel, tensor: str) -> int:
    if tensor not in model.tensors:
        raise ConfigError(f"{model.name}: the tensor {tensor} is missing")
    return model.tensors[tensor].shape[0]


def has(model: GGUFModel, ending: str) -> bool:
    """Whether any tensor's name ends so."""
    return any(name.endswith(ending) for name in model.tensors)


def head_dim(model: GGUFModel, raw: Mapping[str, Any]) -> int:
    """Return the width of a head; of keys and values alike."""
    name = model.architecture
    try:
        dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    except (KeyError, TypeError, ZeroDivisionError):
        raise ConfigError(f"{model.name}: {name}.embedding_length or {name}.attention.head_count is missing") from None
    values = model.get(f"{name}.attention.value_length", dim)
    if values != dim:
        raise ConfigError(f"{model.name}: {name}.attention.value_length {values} must be that of keys, {dim}")
    return int(dim)


def layer_types(slides: Sequence[Any]) -> list[str]:
    """Return config.json's types of layers, each with a window or without."""
    return ["sliding_attention" if one else "full_attention" for one in slides]


def refuse_other(model: GGUFModel, key: str, allowed: object) -> None:
    """Raise `ConfigError` for a value, where there is one, that is another than the only one that is served."""
    found = model.get(key, allowed)
    if found != allowed:
        raise ConfigError(f"{model.name}: {key} {found!r} is not served, only {allowed!r}")
