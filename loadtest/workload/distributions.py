"""Draws lengths and arrival times in the notation of the command line.

All are fixed before the first request is sent.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triptych.loadtest.errors import UsageError
from triptych.loadtest.settings import Arrivals

# -- Distributions of lengths, in the notation of the command line. `128` or `fixed:128`; `uniform:16-512` (inclusive);
# `lognormal:120,0.9` (median and sigma of the logarithm) or `lognormal:120,0.9,1024` (with a maximum); `file:PATH` (one
# whole number a line, sampled uniformly).

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


# -- Arrival times of requests, in seconds from the start, fixed before the first request is sent. A Poisson process of
# varying rate is one of rate 1 on a transformed time axis: unit exponential steps are mapped through the inverse of the
# cumulative rate (Cinlar 1975). Constant arrivals are the same with steps of exactly 1.

Times = NDArray[np.float64]
MAX_ARRIVALS = 5_000_000  # in one run


def offsets(arrivals: Arrivals, duration_s: float, requests: int, seed: int) -> Times:
    """Return sorted times `[N]` below `duration_s`, at most `requests`; 0 is no limit, and one of both must be set."""
    total, unstretch = _clock(arrivals, duration_s)
    expected = min(total, float(requests) if requests else np.inf)
    if not expected <= MAX_ARRIVALS:
        raise UsageError(f"arrivals: found about {expected:.3g} requests, expected at most {MAX_ARRIVALS:,}")
    steps = _steps(arrivals, int(expected + 6 * np.sqrt(expected * _variance(arrivals)) + 16), seed)
    steps = steps[: requests or None]
    return unstretch(steps[steps < total])


def _variance(arrivals: Arrivals) -> float:
    return max(1.0, 1 / arrivals.burstiness) if arrivals.kind == "gamma" else 1.0


def _steps(arrivals: Arrivals, count: int, seed: int) -> Times:
    """Return cumulated steps of mean 1."""
    rng = np.random.default_rng([seed, 0xA1])
    if arrivals.kind == "constant":
        return np.arange(count, dtype=np.float64)
    if arrivals.kind == "gamma":
        return np.cumsum(rng.gamma(arrivals.burstiness, 1 / arrivals.burstiness, count))
    return np.cumsum(rng.exponential(1.0, count))


def _clock(arrivals: Arrivals, duration_s: float) -> tuple[float, Callable[[Times], Times]]:
    """Return the expected number of arrivals, and the inverse of the cumulative rate."""
    if arrivals.kind == "stages":
        rates, seconds = np.array(arrivals.stages, dtype=np.float64).T
        ends = np.concatenate([[0.0], np.cumsum(seconds)])
        expected = np.concatenate([[0.0], np.cumsum(rates * seconds)])
        return float(expected[-1]), lambda steps: np.interp(steps, expected, ends)
    rate = arrivals.rate
    if arrivals.kind == "ramp":
        slope = (arrivals.ramp_to - rate) / duration_s
        total = duration_s * (rate + arrivals.ramp_to) / 2
        if slope:
            return total, lambda steps: (np.sqrt(np.maximum(0, rate**2 + 2 * slope * steps)) - rate) / slope
    return (duration_s * rate if duration_s else np.inf), lambda steps: steps / rate
