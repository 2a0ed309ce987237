"""Runs of the load generator in tests."""

from __future__ import annotations

from typing import Any

from loadtest import run, slo
from loadtest.progress import Progress
from loadtest.run import Measured
from loadtest.server import Server
from loadtest.settings import Arrivals, Clients, Settings, Workload

CLOSED = Arrivals(kind="closed", concurrency=4)


def measured(url: str, limits: str = "", **changes: Any) -> Measured:
    """A run as the command makes it. `changes` are fields of `Settings`."""
    given = {
        "target": "generate",
        "workload": Workload(output_tokens="fixed:10"),
        "duration_s": 0.0,
        "max_lag_ms": 2000.0,
        **changes,
    }
    settings = Settings(url=url, **given)
    progress = Progress(quiet=True)
    with Server(url, "") as server:
        subject = run.meet(server, settings, None, progress)
        return run.measure(subject, subject.settings, slo.parse(limits), "", progress)


def constant(rate: float) -> Arrivals:
    return Arrivals(kind="constant", rate=rate)


__all__ = ["CLOSED", "Arrivals", "Clients", "Workload", "constant", "measured"]
