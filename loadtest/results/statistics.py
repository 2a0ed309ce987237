"""Quantiles and bootstrap intervals.

Quantile q is the smallest measured value that at least a share q of the values does not exceed. Intervals are
percentile bootstraps (Efron 1979) over groups: inter-token latencies of one request are not independent, so requests
are resampled. Resampling assigns weights to the sorted values, so that a resample of n values takes one pass and no
sort.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

QUANTILES: Final[Mapping[str, float]] = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}
STATISTICS: Final = ("mean", *QUANTILES, "max")
RESAMPLES: Final = 300
LEVEL: Final = 0.95


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds values `[N]`, and the number of the group of each value `[N]`, from 0."""

    values: Floats
    groups: NDArray[np.int64]

    @classmethod
    def of(cls, groups: Sequence[Sequence[float]]) -> Sample:
        """Make a sample from the values of each group."""
        sizes = [len(group) for group in groups]
        flat = np.fromiter((value for group in groups for value in group), np.float64, sum(sizes))
        return cls(flat, np.repeat(np.arange(len(groups)), sizes))


def describe(sample: Sample) -> dict[str, float]:
    """Return all `STATISTICS`; empty without values."""
    if not len(sample.values):
        return {}
    ordered = np.sort(sample.values)
    found = _weighted(ordered, np.ones(len(ordered)))
    return dict(zip(STATISTICS, found.tolist(), strict=True))


def replicates(sample: Sample, seed: int = 0, resamples: int = RESAMPLES) -> Floats:
    """Return `STATISTICS` of each resample `[resamples, 7]`, nan for one without values."""
    order = np.argsort(sample.values)
    ordered, groups = sample.values[order], sample.groups[order]
    count = int(sample.groups.max()) + 1 if len(groups) else 0
    rng = np.random.default_rng([seed, 0xB0])
    found = np.full((resamples, len(STATISTICS)), np.nan)
    for row in found:
        if count:
            row[:] = _weighted(ordered, np.bincount(rng.integers(0, count, count), minlength=count)[groups])
    return found


def intervals(sample: Sample, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Return the interval of each of `STATISTICS` except the maximum, which a bootstrap cannot estimate."""
    if len(sample.values) < 2:
        return {}
    low, high = bounds(replicates(sample, seed))
    return {name: (float(low[at]), float(high[at])) for at, name in enumerate(STATISTICS) if name != "max"}


def bounds(drawn: Floats) -> tuple[Floats, Floats]:
    """Return the lower and upper end over the first axis."""
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.nanpercentile(drawn, [tail, 100 - tail], axis=0)
    return low, high


def rate_interval(per_second: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """Return the interval of the mean amount in a second; None for less than three seconds."""
    if len(per_second) < 3:
        return None
    low, high = bounds(rate_replicates(per_second, seed))
    return float(low), float(high)


def rate_replicates(per_second: Sequence[float], seed: int = 0) -> Floats:
    """Return the means `[RESAMPLES]` of resampled seconds."""
    values = np.asarray(per_second, dtype=np.float64)
    rng = np.random.default_rng([seed, 0xB1])
    return values[rng.integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1)


def _weighted(ordered: Floats, weights: Floats | NDArray[np.int64]) -> Floats:
    """Return `STATISTICS` of sorted values with weights."""
    cumulated = np.cumsum(weights, dtype=np.float64)
    total = cumulated[-1]
    if total == 0:
        return np.full(len(STATISTICS), np.nan)
    at = [np.searchsorted(cumulated, q * total - 1e-9) for q in QUANTILES.values()]
    last = np.searchsorted(cumulated, total)
    return np.array([float(ordered @ weights) / total, *ordered[at], ordered[last]])
