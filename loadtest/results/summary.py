"""The summary of records. Latencies are in milliseconds, all other times in seconds.

Requests scheduled before the end of the warm-up are not counted. Latencies are measured from the scheduled send, for
requests with a reply, without those of slow clients. A request without a reply at the end of the drain has failed: else
a server that hangs would have few and good latencies. Throughput is measured from the end of the warm-up to the end of
the duration, if one was set (the drain is not load), else to the last reply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from triptych.loadtest.records import Outcome, Record
from triptych.loadtest.results import slo, statistics
from triptych.loadtest.results.slo import Limit
from triptych.loadtest.results.statistics import Sample
from triptych.loadtest.settings import Settings

BUSY_LIMIT = 0.9  # of a core: a worker above it is itself the bottleneck

Json = dict[str, Any]


def summarise(records: Sequence[Record], settings: Settings, limits: Sequence[Limit], stopped_s: float | None) -> Json:
    """Return the client's figures; `stopped_s` is when the run was interrupted."""
    window = _window(records, settings, stopped_s)
    counted = [record for record in records if record.scheduled >= settings.warmup_s]
    seconds = Seconds(records, limits, window)
    latencies = _latencies(counted)
    answered = Counter(record.outcome for record in counted)
    failed = [record for record in counted if _has_failed(record, interrupted=stopped_s is not None)]
    judged = answered[Outcome.OK] + len(failed)
    good = sum(slo.is_good(limits, record) for record in counted)
    summary: Json = {
        "window_s": [round(edge, 3) for edge in window],
        "counts": {"all": len(records), "counted": len(counted)} | {one.value: answered[one] for one in Outcome},
        "shares": {
            "error_rate": _share(len(failed), judged),
            "rejection_rate": _share(answered[Outcome.REJECTED], judged),
            "good_rate": _share(good, judged),
        },
        "latency_ms": {name: _described(sample, settings.seed) for name, sample in latencies.items()},
        "throughput": seconds.throughput(settings.seed),
        "offered_per_s": _offered(counted, window),
        "rejections": _rejections(counted),
        "errors": _errors(failed),
        "finish_reasons": dict(Counter(r.finish_reason for r in counted if r.finish_reason)),
        "tokens": _tokens(counted),
        "series": seconds.series(),
    }
    return summary | {"slo": slo.judge(limits, summary)}


def _window(records: Sequence[Record], settings: Settings, stopped_s: float | None) -> tuple[float, float]:
    last = max((record.ended for record in records), default=0.0)
    end = min(settings.duration_s or last, last if settings.requests else np.inf)
    if settings.arrivals.kind == "replay":
        end = last
    if stopped_s is not None:
        end = min(end, stopped_s)
    return settings.warmup_s, max(end, settings.warmup_s)


def _latencies(counted: Sequence[Record]) -> dict[str, Sample]:
    ok = [record for record in counted if record.outcome is Outcome.OK and record.habit != "slow"]
    figures: dict[str, Callable[[Record], Sequence[float]]] = {
        "ttft": lambda record: _one(record.ttft),
        "itl": lambda record: record.gaps,
        "tpot": lambda record: _one(record.tpot),
        "e2e": lambda record: [record.e2e],
        "queue": lambda record: _one(record.queue_ms, 1e-3),
        "prefill": lambda record: _one(record.prefill_ms, 1e-3),
        "decode": lambda record: _one(record.decode_ms, 1e-3),
        "outside": _outside,
    }
    samples = {name: Sample.of([figure(record) for record in ok]) for name, figure in figures.items()}
    samples["reject"] = Sample.of([[seconds for _, seconds in record.rejects] for record in counted])
    samples["lag"] = Sample.of([[record.lag] for record in counted])
    return {name: Sample(1e3 * one.values, one.groups) for name, one in samples.items() if len(one.values)}


def _outside(record: Record) -> list[float]:
    """Return the seconds outside the server's own timings: network, socket queues, and work of both ends."""
    return [] if record.server_total_ms is None else [record.ended - record.sent - record.server_total_ms / 1e3]


def _one(value: float | None, scale: float = 1.0) -> list[float]:
    return [] if value is None else [value * scale]


def _described(sample: Sample, seed: int) -> Json:
    return {"n": len(sample.values), **statistics.describe(sample), "ci95": statistics.intervals(sample, seed)}


def _share(count: int, total: int) -> float | None:
    return count / total if total else None


def _offered(counted: Sequence[Record], window: tuple[float, float]) -> float | None:
    """Return the rate of items scheduled within the window, in items a second."""
    length = window[1] - window[0]
    due = sum(record.turn == 0 and record.scheduled < window[1] for record in counted)
    return due / length if length > 0 else None


def _rejections(counted: Sequence[Record]) -> list[Json]:
    """Return, by status, the number of refused attempts and the time until the refusal."""
    found: dict[int, list[float]] = {}
    for record in counted:
        for status, seconds in record.rejects:
            found.setdefault(status, []).append(1e3 * seconds)
    return [
        {"status": status, "count": len(times), "after_ms": statistics.describe(Sample.of([[one] for one in times]))}
        for status, times in sorted(found.items())
    ]


def _has_failed(record: Record, *, interrupted: bool) -> bool:
    """Return whether a request was refused, broke, or had not ended after the drain, unless its client is slow."""
    if record.outcome is Outcome.UNFINISHED:
        return not interrupted and not (record.habit == "slow" and record.token_times)
    return record.outcome in (Outcome.ERROR, Outcome.REJECTED)


def _errors(failed: Sequence[Record]) -> list[Json]:
    """Return the number of failed requests by status and code, including refused ones."""
    found = Counter((record.status, record.error or record.outcome.value) for record in failed)
    return [{"status": status, "code": code, "count": count} for (status, code), count in found.most_common()]


def _tokens(counted: Sequence[Record]) -> Json:
    """Return token totals, and how well plan, events and usage agree."""
    ok = [record for record in counted if record.outcome is Outcome.OK]
    streamed = [record for record in ok if record.token_times]
    events = sum(len(record.token_times) for record in streamed)
    told = [record for record in ok if record.has_usage]
    return {
        "prompt": sum(record.prompt_tokens for record in ok),
        "planned_prompt": sum(record.planned_prompt_tokens for record in ok),
        "output": sum(record.output_tokens for record in ok),
        "planned_output": sum(record.planned_output_tokens for record in ok),
        "cached": sum(record.cached_tokens for record in ok),
        "with_usage": len(told),
        "per_event": sum(record.output_tokens for record in streamed) / events if events else None,
        "counted_unlike_usage": sum(
            sum(record.token_counts) != record.completion_tokens for record in told if record.token_counts
        ),
        "wasted": sum(record.output_tokens for record in counted if record.outcome is Outcome.CANCELLED),
    }


class Seconds:
    """Holds the amounts in each second of the run, and computes the rates within the window."""

    def __init__(self, records: Sequence[Record], limits: Sequence[Limit], window: tuple[float, float]) -> None:
        self._window = window
        ok = [record for record in records if record.outcome is Outcome.OK]
        kept = [r for r in records if r.outcome in (Outcome.OK, Outcome.UNFINISHED)]
        self._events = {
            "requests": ([record.ended for record in ok], None),
            "good": ([record.ended for record in ok if slo.is_good(limits, record)], None),
            "output_tokens": _output_times(kept),
            "prompt_tokens": ([record.first or record.ended for record in ok], [float(r.prompt_tokens) for r in ok]),
            "rejected": ([r.ended for r in records if r.outcome is Outcome.REJECTED], None),
            "errors": ([r.ended for r in records if r.outcome is Outcome.ERROR], None),
            "scheduled": ([record.scheduled for record in records], None),
        }
        self._last = max((record.ended for record in records), default=0.0)

    def series(self) -> Json:
        """Return the amounts in each second since the start, including the drain."""
        edges = np.arange(0, int(self._last) + 2)
        return {name: self._histogram(name, edges).round(3).tolist() for name in self._events}

    def throughput(self, seed: int) -> Json:
        names = {
            "request_throughput": ("requests",),
            "output_throughput": ("output_tokens",),
            "total_throughput": ("output_tokens", "prompt_tokens"),
            "goodput": ("good",),
        }
        return {name: self._rate(parts, seed) for name, parts in names.items()}

    def _rate(self, names: Sequence[str], seed: int) -> Json:
        start, end = self._window
        if end <= start:
            return {"value": None, "ci95": None}
        edges = np.linspace(start, end, max(1, round(end - start)) + 1)
        width = edges[1] - edges[0]
        each = np.sum([self._histogram(name, edges) for name in names], axis=0) / width
        return {"value": float(each.mean()), "ci95": statistics.rate_interval(each.tolist(), seed)}

    def _histogram(self, name: str, edges: Any) -> Any:
        times, weights = self._events[name]
        return np.histogram(times, bins=edges, weights=weights)[0].astype(np.float64)


def _output_times(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Return when tokens arrived, and how many: a request's usage is divided among its events."""
    times: list[float] = []
    weights: list[float] = []
    for record in records:
        at = record.token_times or [record.ended]
        times += at
        weights += [record.output_tokens / len(at)] * len(at)
    return times, weights


def doubts(summary: Json, settings: Settings, beats: Sequence[float], busy: Sequence[float]) -> list[str]:
    """Return the reasons why a run is invalid; empty: it is valid."""
    found = []
    for name, lag in (
        ("sends were", summary["latency_ms"].get("lag", {}).get("p99", 0.0)),
        ("reads may be", late(beats)),
    ):
        if lag > settings.max_lag_ms:
            found.append(f"{name} late: the generator's lag has p99 {lag:.1f} ms, more than {settings.max_lag_ms:g} ms")
    if busy and max(busy) > BUSY_LIMIT:
        found.append(f"a worker used {max(busy):.0%} of a core: give it more with --workers")
    if not summary["counts"]["ok"]:
        found.append("no request was answered")
    return found


def late(beats: Sequence[float]) -> float:
    """Return the p99 delay of the workers' event loops in ms."""
    return 1e3 * float(np.quantile(beats, 0.99, method="inverted_cdf")) if beats else 0.0
