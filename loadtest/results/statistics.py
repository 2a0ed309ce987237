"""Quantiles and bootstrap intervals over records, which a JSON document keeps as columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triptych.loadtest.records import Outcome, Record

# -- Quantiles and bootstrap intervals. Quantile q is the smallest measured value that at least a share q of the values
# does not exceed. Intervals are percentile bootstraps (Efron 1979) over groups: inter-token latencies of one request
# are not independent, so requests are resampled. Resampling assigns weights to the sorted values, so that a resample of
# n values takes one pass and no sort.

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


# -- Records as columns of a JSON document, from which reports are drawn and comparisons are resampled.

Json = dict[str, Any]

_COLUMNS: dict[str, Callable[[Record], object]] = {
    "scheduled_s": lambda record: round(record.scheduled, 4),
    "ended_s": lambda record: round(record.ended, 4),
    "first_s": lambda record: _rounded(record.first, 1, 4),
    "outcome": lambda record: record.outcome.value,
    "slow": lambda record: record.habit == "slow",
    "prompt_tokens": lambda record: record.prompt_tokens or record.planned_prompt_tokens,
    "output_tokens": lambda record: record.output_tokens,
    "ttft_ms": lambda record: _rounded(record.ttft, 1e3, 2),
    "tpot_ms": lambda record: _rounded(record.tpot, 1e3, 3),
    "e2e_ms": lambda record: round(1e3 * record.e2e, 2),
    "gaps_ms": lambda record: [round(1e3 * gap, 2) for gap in record.gaps],
}


def of(records: Sequence[Record]) -> Json:
    """Return a list for each column, in the order of `records`."""
    return {name: [value(record) for record in records] for name, value in _COLUMNS.items()}


def answered(columns: Json, name: str, warmup_s: float) -> list[list[float]]:
    """Return one figure of each request that counts for latencies: with a reply, not slow by plan, not warm-up."""
    kept = (
        value
        for value, outcome, slow, at in zip(
            columns[name], columns["outcome"], columns["slow"], columns["scheduled_s"], strict=True
        )
        if outcome == Outcome.OK and not slow and at >= warmup_s and value is not None
    )
    return [value if isinstance(value, list) else [value] for value in kept]


def _rounded(value: float | None, scale: float, digits: int) -> float | None:
    return None if value is None else round(scale * value, digits)
