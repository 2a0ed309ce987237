"""A reader of /metrics in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/).

Metrics are found under triptych's or vLLM's names. If they have a model label, only those of the tested model are used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

NAMES: Final[Mapping[str, Sequence[str]]] = {
    "prompt_tokens": ("triptych_prompt_tokens_total", "vllm:prompt_tokens_total"),
    "output_tokens": ("triptych_generation_tokens_total", "vllm:generation_tokens_total"),
    "ended": ("triptych_requests_total", "vllm:request_success_total"),
    "rejected": ("triptych_rejections_total",),
    "running": ("triptych_requests_running", "vllm:num_requests_running"),
    "waiting": ("triptych_requests_waiting", "vllm:num_requests_waiting"),
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
