"""Bounds of the sizes and numbers in a model's configuration."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

from triptych.model.errors import ConfigError

MOST = 2**31 - 1  # of any size or position: kernels in C compute with sums and products of them in 64 bits


MOST_HEADS = 65_536


def require_positive(*, most: float = MOST, **sizes: float) -> None:
    """Raise `ConfigError` for a size that is not above 0, or a whole number above `most`."""
    for name, value in sizes.items():
        if value <= 0:
            raise ConfigError(f"{name} must be positive, found {value}")
        if isinstance(value, int) and value > most:
            raise ConfigError(f"{name} must be at most {most}, found {value}")


def require_numbers(config: Any, seen: set[int] | None = None) -> None:
    """Raise `ConfigError` for a field, at any depth, that is declared as a number and holds something else."""
    seen = set() if seen is None else seen
    if id(config) in seen or not is_dataclass(config):
        return
    seen.add(id(config))  # the layers of a stack are often one object
    for one in fields(config):
        value = getattr(config, one.name)
        if one.type in ("int", "int | None") and value is not None and type(value) is not int:
            raise ConfigError(f"{one.name} must be a whole number, found {str(value)[:40]}")
        if one.type in ("float", "float | None") and value is not None and not _is_finite(value):
            raise ConfigError(f"{one.name} must be a finite number, found {str(value)[:40]}")
        for part in value if isinstance(value, tuple) else (value,):
            require_numbers(part, seen)


def _is_finite(value: object) -> bool:
    """Return whether the value is a real number: a root of a negative setting is complex."""
    return isinstance(value, int | float) and math.isfinite(value)
