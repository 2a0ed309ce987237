"""Bounds of the sizes and numbers in a model's configuration."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from functools import cache
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
    if id(config) in seen:
        return
    seen.add(id(config))  # the layers of a stack are often one object
    for name, declared in _fields(config.__class__):
        value = getattr(config, name)
        if declared in ("int", "int | None") and value is not None and type(value) is not int:
            raise ConfigError(f"{name} must be a whole number, found {str(value)[:40]}")
        if declared in ("float", "float | None") and value is not None and not _is_finite(value):
            raise ConfigError(f"{name} must be a finite number, found {str(value)[:40]}")
        for part in value if isinstance(value, tuple) else (value,):
            if _fields(part.__class__):
                require_numbers(part, seen)


@cache
def _fields(kind: Any) -> tuple[tuple[str, object], ...]:
    """Return the names and declared types of a dataclass's fields; none for another class."""
    return tuple((one.name, one.type) for one in fields(kind)) if is_dataclass(kind) else ()


def _is_finite(value: object) -> bool:
    """Return whether the value is a real number: a root of a negative setting is complex."""
    return isinstance(value, int | float) and math.isfinite(value)
