"""Metrics of batches: what the replica that runs them has done, and what is left."""

from __future__ import annotations

from prometheus_client import Gauge

from triptych.service.batches.records import Batch
from triptych.service.observability.metrics import Metrics


class BatchMetrics:
    """The counters and gauges of files and batches."""

    def __init__(self, metrics: Metrics) -> None:
        self._lines = metrics.counter(
            "batch_lines_total", "Lines of batches with a result: completed or failed.", "endpoint", "outcome"
        )
        self._retries = metrics.counter(
            "batch_retries_total",
            "Lines sent again: after a refusal by load, or because the engine failed.",
            *("endpoint", "reason"),
        )
        self._ended = metrics.counter("batches_total", "Batches that ended, by status.", "status")
        self._active = _gauge(metrics, "batches_active", "Batches that have not ended.")
        self._waiting = _gauge(metrics, "batch_lines_waiting", "Lines of running batches without a result.")
        self._bytes = _gauge(metrics, "batch_state_bytes", "Bytes of files and batches on disk.")

    def line(self, endpoint: str, *, ok: bool) -> None:
        self._lines.labels(endpoint, "completed" if ok else "failed").inc()

    def retried(self, endpoint: str, reason: str) -> None:
        self._retries.labels(endpoint, reason).inc()

    def ended(self, status: str) -> None:
        self._ended.labels(status).inc()

    def state(self, active: list[Batch]) -> None:
        """Set the gauges of the batches that this process runs."""
        self._active.set(len(active))
        self._waiting.set(sum(max(0, one.total - one.completed - one.failed) for one in active))

    def stored(self, num_bytes: int) -> None:
        """Set the size of the state folder, which each replica with this folder knows."""
        self._bytes.set(num_bytes)


def _gauge(metrics: Metrics, name: str, text: str) -> Gauge:
    # Of replicas with one folder, one runs the batches; the others count none.
    return Gauge(f"triptych_{name}", text, registry=metrics.registry, multiprocess_mode="livemax")
