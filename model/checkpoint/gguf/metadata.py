"""Single values of a GGUF file's metadata, what the presence of tensors tells, and rotary factors."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triptych.model.errors import ConfigError
from triptych.model.gguf.container import GGUFModel, GGUFTensor

# -- Single values of a GGUF file's metadata, and what the presence of tensors tells.


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
    if (stored := _single(value)) is None:
        return value
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((short for short in shorter if _single(short) == stored), value)


def _single(value: float) -> bytes | None:
    """Return a number in float32; None for one that is larger than any."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return None


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


# -- Llama 3's stretching of rotary positions, found again from the factors that GGUF stores for each frequency.
# `transformers` computes the factors from four settings (`rope_type` "llama3"): of a frequency f the factor is 1 where
# a wave is shorter than original / high, `factor` where it is longer than original / low, and in between 1 / (s + (1 -
# s) / factor) with s = (original f / 2 pi - low) / (high - low).

_TOLERANCE = 1e-4  # of a factor: what is stored was computed in float32
_PUBLISHED = (8192.0, 1.0, 4.0)  # original, low and high of the Llamas from 3.1 on


def read_floats(tensor: GGUFTensor) -> tuple[float, ...]:
    """Return the numbers of a short tensor of one dimension in float32; raises `ConfigError`."""
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 1 << 12:
        raise ConfigError(f"{tensor.path.name}: {tensor.name} must be a short row of F32")
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.nbytes)
    return struct.unpack(f"<{tensor.shape[0]}f", data)


def factor_settings(factors: Sequence[float], theta: float, dim: int, context: object, name: str) -> dict[str, Any]:
    """Return the settings whose factors these are: Llama 3's, else LongRoPE with them for every length.

    Raises `ConfigError` for factors that do not fit heads of `dim`.
    """
    if len(factors) > dim // 2 or not all(0 < factor < math.inf for factor in factors):
        raise ConfigError(f"{name}: the tensor rope_freqs does not fit heads of {dim}")
    if all(abs(factor - 1) <= _TOLERANCE for factor in factors):
        return {}
    frequencies = [theta ** (-2 * place / dim) for place in range(len(factors))]
    factor = max(factors)
    for original, low, high in _candidates(frequencies, factors, factor):
        computed = [_factor(f, factor, original, low, high) for f in frequencies]
        if all(abs(a - b) <= _TOLERANCE * b for a, b in zip(factors, computed, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "original_max_position_embeddings": original,
                "low_freq_factor": low,
                "high_freq_factor": high,
            }
    same = list(map(decimal, factors))
    lists = {"short_factor": same, "long_factor": same}
    return {"rope_type": "longrope", **lists, "attention_factor": 1.0, "original_max_position_embeddings": context}


def _candidates(
    frequencies: Sequence[float], factors: Sequence[float], factor: float
) -> Iterator[tuple[float, float, float]]:
    """Yield what original, low and high may be: the published ones, and what follows from factors in between.

    Only the ratios of the three count, so low is 1. Two factors give both others, one gives original if high is 4.
    """
    yield _PUBLISHED
    between = [
        (f, (1 / found - 1 / factor) / (1 - 1 / factor))
        for f, found in zip(frequencies, factors, strict=True)
        if 1 + _TOLERANCE < found < factor * (1 - _TOLERANCE)
    ]
    if len(between) > 1:
        (f, s), (g, t) = between[0], between[-1]
        slope = (s - t) / (f - g)
        below = s - slope * f  # -low / (high - low)
        if below < 0 < slope:
            yield round(-2 * math.pi * slope / below), 1.0, round(1 - 1 / below, 3)
    for f, s in between[:1]:
        yield 2 * math.pi * (1 + 3 * s) / f, 1.0, 4.0


def _factor(frequency: float, factor: float, original: float, low: float, high: float) -> float:
    turns = original * frequency / (2 * math.pi)
    if turns > high:
        return 1.0
    if turns < low:
        return factor
    smooth = (turns - low) / (high - low)
    return 1 / (smooth + (1 - smooth) / factor)
