"""Checks of the settings in `quantization_config`: what is not served is refused by its name. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from triptych.model.errors import ConfigError

WHERE = "quantization_config"
# What describes how the numbers were found, or which projections are left out: their tensors say that too.
_HARMLESS = (
    "version",
    "global_compression_ratio",
    "ignore",
    "config_groups",
    "targets",
    "weights",
    "input_activations",
    "ignored_layers",
    "modules_to_not_convert",
)
_HOW_FOUND = ("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")
_ABSENT = {"quant_method": None, "strategy": None, "dynamic": False, "type": "int"}  # the meaning of what is not there


def expect(where: str, found: Any, expected: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Raise `ConfigError` unless settings have the values expected (a tuple: one of them), and no other means anything.

    `known` are settings that the caller looks at.
    """
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where} must be an object, found {found!r}")
    for key, value in expected.items():
        served = value if isinstance(value, tuple) else (value,)
        actual = found.get(key, _ABSENT.get(key, served[0]))
        if not any(actual == one and type(actual) is type(one) for one in served):  # 4.0 is no number of bits
            raise ConfigError(f"{where}.{key}: {actual!r} is not served, only {either(served)}")
    known = {*expected, *known, *_HARMLESS, *_HOW_FOUND}
    unknown = sorted(key for key, value in found.items() if key not in known and value not in (None, False, {}, []))
    if unknown:
        raise ConfigError(f"{where} has unknown settings: {', '.join(unknown)}")


def either(values: tuple[Any, ...]) -> str:
    """Return values for an error message."""
    return " or ".join(map(repr, values))


def group_size(where: str, found: Any) -> int:
    """Return how many inputs share a scale, 0 for all of them (stored as -1); raises `ConfigError`."""
    if type(found) is not int or not (found == -1 or found > 0):
        raise ConfigError(f"{where}.group_size must be a number of inputs or -1, found {found!r}")
    return max(found, 0)
