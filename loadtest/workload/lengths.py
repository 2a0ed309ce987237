"""Distributions of lengths, in the notation of the command line.

`128` or `fixed:128`; `uniform:16-512` (inclusive); `lognormal:120,0.9` (median and sigma of the logarithm) or
`lognormal:120,0.9,1024` (with a maximum); `file:PATH` (one whole number a line, sampled uniformly).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

from loadtest.errors import UsageError

Lengths = Callable[[random.Random], int]

_FORMS = "a number, fixed:N, uniform:A-B, lognormal:MEDIAN,SIGMA[,MAX] or file:PATH"


def parse(text: str, what: str) -> Lengths:
    """Parse a distribution and return a sampler of values of at least 1. Raises `UsageError` naming `what`."""
    kind, colon, rest = text.partition(":")
    if not colon:
        kind, rest = "fixed", text
    try:
        if kind == "file":
            return _from_file(Path(rest), what)
        return _MAKERS[kind](rest)
    except (KeyError, ValueError):
        raise UsageError(f"{what}: found {text!r}, expected {_FORMS}") from None


def _fixed(text: str) -> Lengths:
    value = _positive(text)
    return lambda rng: value


def _uniform(text: str) -> Lengths:
    low, high = (_positive(part) for part in text.split("-"))
    if low > high:
        raise ValueError
    return lambda rng: rng.randint(low, high)


def _lognormal(text: str) -> Lengths:
    median, sigma, *rest = (float(part) for part in text.split(","))
    if median < 1 or sigma < 0 or len(rest) > 1 or not all(map(math.isfinite, (median, sigma, *rest))):
        raise ValueError
    most = rest[0] if rest else 1e6
    return lambda rng: max(1, round(min(most, rng.lognormvariate(math.log(median), sigma))))


def _from_file(path: Path, what: str) -> Lengths:
    try:
        values = [_positive(line) for line in path.read_text().split()]
    except OSError as error:
        raise UsageError(f"{what}: {path}: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{what}: {path}: expected one whole number above 0 on each line") from None
    if not values:
        raise UsageError(f"{what}: {path} is empty; expected one whole number on each line")
    return lambda rng: rng.choice(values)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


_MAKERS: dict[str, Callable[[str], Lengths]] = {"fixed": _fixed, "uniform": _uniform, "lognormal": _lognormal}
