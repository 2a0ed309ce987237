"""Service level objectives: `ttft_p99<500ms,itl_p99<60ms,error_rate<0.1%`.

Every limit is checked for a run, and the latency limits also decide which requests count as goodput: those with a reply
whose own TTFT, TPOT, end-to-end and queueing time, and the named statistic of its own inter-token latencies, are within
the limits.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from triptych.loadtest.errors import UsageError
from triptych.loadtest.records import Outcome, Record
from triptych.loadtest.results.statistics import QUANTILES, STATISTICS

LATENCIES: Final = ("ttft", "itl", "tpot", "e2e", "queue", "reject", "lag")
SHARES: Final = ("error_rate", "rejection_rate", "good_rate")
RATES: Final = ("request_throughput", "output_throughput", "total_throughput", "goodput")

_COMPARISONS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_LIMIT = re.compile(r"\s*([a-z_0-9]+?)\s*(<=|>=|<|>)\s*([0-9.]+(?:e-?[0-9]+)?)\s*([a-z%]*)\s*", re.ASCII)
_TIME_UNITS: Final = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_FORM = (
    "METRIC<VALUE with METRIC one of "
    + ", ".join(f"{name}_p99" for name in LATENCIES)
    + f" (or _{', _'.join(STATISTICS)}; in ms or s), "
    + ", ".join((*SHARES, *RATES))
)


@dataclass(frozen=True, slots=True)
class Limit:
    """Holds one limit. `value` is in milliseconds for latencies, a fraction for shares, units a second for rates."""

    text: str
    metric: str
    statistic: str  # of a latency
    comparison: str
    value: float

    def met(self, found: float | None) -> bool:
        """Return whether a figure is within the limit. None is not, except for the latency of refusals."""
        if found is None:
            return self.metric == "reject" and self.comparison.startswith("<")
        return _COMPARISONS[self.comparison](found, self.value)


def parse(text: str) -> list[Limit]:
    """Parse a comma-separated list of limits; raises `UsageError`."""
    return [_limit(part) for part in text.split(",") if part.strip()]


def _limit(text: str) -> Limit:
    match = _LIMIT.fullmatch(text)
    error = UsageError(f"--slo: found {text.strip()!r}, expected {_FORM}")
    if match is None:
        raise error
    name, comparison, number, unit = match.groups()
    metric, _, statistic = name.rpartition("_")
    try:
        value = float(number)
    except ValueError:
        raise error from None
    if metric in LATENCIES and statistic in STATISTICS and unit in _TIME_UNITS:
        return Limit(text.strip(), metric, statistic, comparison, value * _TIME_UNITS[unit])
    if name in SHARES and unit in ("", "%"):
        return Limit(text.strip(), name, "", comparison, value / 100 if unit else value)
    if name in RATES and not unit:
        return Limit(text.strip(), name, "", comparison, value)
    raise error


def judge(limits: Sequence[Limit], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the measured value for each limit, in its unit, and whether the limit was met."""
    found = [(limit, measured(limit, summary)) for limit in limits]
    return [
        {"limit": limit.text, "metric": limit.metric, "value": limit.value, "found": value, "met": limit.met(value)}
        for limit, value in found
    ]


def measured(limit: Limit, summary: Mapping[str, Any]) -> float | None:
    """Return the figure of a run's summary that `limit` applies to."""
    if limit.metric in LATENCIES:
        value = summary["latency_ms"].get(limit.metric, {}).get(limit.statistic)
    elif limit.metric in SHARES:
        value = summary["shares"][limit.metric]
    else:
        value = summary["throughput"][limit.metric]["value"]
    return None if value is None else float(value)


def is_good(limits: Sequence[Limit], record: Record) -> bool:
    """Return whether a request succeeded and its own figures are within all latency limits."""
    return record.outcome is Outcome.OK and all(
        limit.met(_own(limit, record)) for limit in _of_requests(limits, record)
    )


def _of_requests(limits: Sequence[Limit], record: Record) -> list[Limit]:
    """Return the limits that apply to a single request."""
    return [limit for limit in limits if limit.metric in LATENCIES and _own(limit, record) is not None]


def _own(limit: Limit, record: Record) -> float | None:
    """Return a request's own figure in milliseconds; None: it has none, such as gaps of a single token."""
    if limit.metric == "itl":
        gaps = record.gaps
        return 1e3 * _statistic(gaps, limit.statistic) if gaps else None
    seconds = {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.e2e}.get(limit.metric)
    return record.queue_ms if limit.metric == "queue" else None if seconds is None else 1e3 * seconds


def _statistic(values: Sequence[float], name: str) -> float:
    if name in QUANTILES:
        return float(np.quantile(values, QUANTILES[name], method="inverted_cdf"))
    return float(np.mean(values) if name == "mean" else np.max(values))
