"""Reads /metrics in Prometheus' text format, and compares the client's figures with the server's own."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from triptych.loadtest.records import Outcome, Record
from triptych.loadtest.results.statistics import Floats

# -- A reader of /metrics in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/).
# Metrics are found under triptych's or vLLM's names. If they have a model label, only those of the tested model are
# used.

NAMES: Final[Mapping[str, Sequence[str]]] = {
    "prompt_tokens": ("triptych_prompt_tokens_total", "vllm:prompt_tokens_total"),
    "output_tokens": ("triptych_generation_tokens_total", "vllm:generation_tokens_total"),
    "ended": ("triptych_requests_total", "vllm:request_success_total"),
    "rejected": ("triptych_rejections_total",),
    "running": ("triptych_requests_running", "vllm:num_requests_running"),
    "waiting": ("triptych_requests_waiting", "vllm:num_requests_waiting"),
    "wait_s": ("triptych_queue_wait_seconds",),
    "kv_usage": ("triptych_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "preemptions": ("triptych_preemptions_total", "vllm:num_preemptions_total"),
    "ttft": ("triptych_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    "itl": (
        "triptych_inter_token_latency_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
    ),
    "e2e": ("triptych_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
    "queue": ("triptych_request_queue_time_seconds", "vllm:request_queue_time_seconds"),
}
_TYPE = re.compile(r"^# TYPE (\S+) counter", re.MULTILINE)
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Holds the observations since another scrape. `buckets` are (upper bound, cumulative count)."""

    count: float
    sum: float
    buckets: tuple[tuple[float, float], ...]

    @property
    def mean(self) -> float:
        return self.sum / self.count

    def quantile_bounds(self, q: float) -> tuple[float, float]:
        """Return the bounds of the bucket that contains quantile `q`."""
        low = 0.0
        for bound, below in self.buckets:
            if below >= q * self.count:
                return low, bound
            low = bound
        return low, math.inf


class Scrape:
    """Holds one reading of /metrics, `at` seconds since the run's start."""

    def __init__(self, text: str, at: float, model: str) -> None:
        self.at = at
        self._samples: dict[str, list[tuple[Labels, float]]] = {}
        for name, labels, value in _parse(text):
            found = self._samples.setdefault(name, [])
            if labels.get("model", labels.get("model_name", model)) in (model, "") or not model:
                found.append((labels, value))
        for name in _TYPE.findall(text):  # a counter without samples is 0
            self._samples.setdefault(name, [])

    def value(self, figure: str, **labels: str) -> float | None:
        """Return the sum of a counter's or gauge's samples with `labels`; None: the server has no such metric."""
        for name in NAMES[figure]:
            if (samples := self._samples.get(name)) is not None:
                return sum(value for own, value in samples if labels.items() <= own.items())
        return None

    def histogram(self, figure: str, since: Scrape) -> Histogram | None:
        """Return the observations after `since`; None: there are none, or the server has no such metric."""
        for name in NAMES[figure]:
            count = self._sum(f"{name}_count") - since._sum(f"{name}_count")
            if count > 0:
                after, before = self._buckets(name), since._buckets(name)
                buckets = tuple((bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after))
                return Histogram(count, self._sum(f"{name}_sum") - since._sum(f"{name}_sum"), buckets)
        return None

    def _sum(self, name: str) -> float:
        return sum(value for _, value in self._samples.get(name, ()))

    def _buckets(self, name: str) -> dict[float, float]:
        found: dict[float, float] = {}
        for labels, value in self._samples.get(f"{name}_bucket", ()):
            bound = float(labels["le"])
            found[bound] = found.get(bound, 0.0) + value
        return found


def _parse(text: str) -> Iterator[tuple[str, Labels, float]]:
    for line in text.splitlines():
        if not line.startswith("#") and (match := _SAMPLE.match(line)) is not None:
            yield match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])


# -- Comparison of the client's figures with the server's own metrics for the same run. Counts must be equal (a client
# that disconnects sees fewer tokens than the server generates). Times are compared from the send, since a server knows
# no schedule, within `SHARE` or `SLACK_MS`; a histogram has an exact mean and quantiles by bucket. The whole run is
# compared, with its warm-up, which the server's counters include.

SHARE = 0.1
SLACK_MS = 5.0
_REACHED = (Outcome.OK, Outcome.CANCELLED, Outcome.UNFINISHED)

Json = dict[str, Any]


def compare(records: Sequence[Record], before: Scrape, after: Scrape) -> list[Json]:
    """Return rows of figure, unit, both values, and whether they agree, for the metrics that the server has."""
    return [*_counts(records, before, after), *_times(records, before, after)]


def _counts(records: Sequence[Record], before: Scrape, after: Scrape) -> list[Json]:
    ok = [record for record in records if record.outcome is Outcome.OK]
    early = sum(record.outcome in (Outcome.CANCELLED, Outcome.UNFINISHED, Outcome.ERROR) for record in records)
    refused = sum(status in (429, 503) for record in records for status, _ in record.rejects)
    seen = {
        "ended": ("requests ended", len(ok), early),
        "rejected": ("refusals", refused, 0),
        "prompt_tokens": ("prompt tokens", sum(record.prompt_tokens for record in ok), early),
        "output_tokens": ("output tokens", sum(record.output_tokens for record in ok), early),
    }
    rows = []
    for figure, (name, client, slack) in seen.items():
        now = after.value(figure)
        if now is None or (figure.endswith("tokens") and not any(record.has_usage for record in ok)):
            continue
        server = now - (before.value(figure) or 0.0)
        agrees = server >= client if slack else server == client
        rows.append({"name": name, "unit": "", "client": client, "server": server, "agrees": agrees})
    return rows


def _times(records: Sequence[Record], before: Scrape, after: Scrape) -> list[Json]:
    reached = [record for record in records if record.outcome in _REACHED and record.habit != "slow"]
    from_sent = {
        "ttft": [record.first - record.sent for record in reached if record.first is not None],
        "itl": [gap for record in reached for gap in record.gaps],
        "e2e": [record.ended - record.sent for record in reached],
        "queue": [record.queue_ms / 1e3 for record in reached if record.queue_ms is not None],
    }
    names = {"ttft": "first token", "itl": "between tokens", "e2e": "end to end", "queue": "queueing"}
    rows = []
    for figure, values in from_sent.items():
        server = after.histogram(figure, before)
        if server is None or not values:
            continue
        if figure == "queue" and len(values) != server.count:  # only replies have a queueing time
            continue
        rows.append(_row(f"{names[figure]}, mean", 1e3 * float(np.mean(values)), 1e3 * server.mean, 1e3 * server.mean))
        for q, name in ((0.5, "p50"), (0.99, "p99")):
            low, high = (1e3 * bound for bound in server.quantile_bounds(q))
            rows.append(_quantile_row(f"{names[figure]}, {name}", np.sort(values), q, low, high))
    return rows


def _quantile_row(name: str, ordered: Floats, q: float, low: float, high: float) -> Json:
    """Compare a quantile; the neighbours in rank may agree instead, since one more value moves it by a rank."""
    at = max(0, math.ceil(q * len(ordered)) - 1)
    near = [1e3 * float(value) for value in ordered[max(0, at - 1) : at + 2]]
    rows = [_row(name, value, low, high) for value in near]
    return {**_row(name, 1e3 * float(ordered[at]), low, high), "agrees": any(row["agrees"] for row in rows)}


def _row(name: str, client: float, low: float, high: float) -> Json:
    slack = max(SLACK_MS, SHARE * client)
    agrees = low - slack <= client <= high + slack
    server: float | list[float | None] = low if low == high else [low, high if np.isfinite(high) else None]
    return {"name": name, "unit": "ms", "client": client, "server": server, "agrees": agrees}
