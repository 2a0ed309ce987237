"""Runs of the load generator in tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from triptych.loadtest.results import slo
from triptych.loadtest.runs import run
from triptych.loadtest.runs.progress import Progress
from triptych.loadtest.runs.run import Measured
from triptych.loadtest.server.target_server import Server
from triptych.loadtest.settings import Arrivals, Clients, Settings, Workload

CLOSED = Arrivals(kind="closed", concurrency=4)


def measured(url: str, limits: str = "", **changes: Any) -> Measured:
    """Return a run like the command's. `changes` are fields of `Settings`."""
    given = {
        "target": "generate",
        "workload": Workload(output_tokens="fixed:10"),
        "duration_s": 0.0,
        "max_lag_ms": 20_000.0,
        **changes,
    }
    settings = Settings(url=url, **given)
    progress = Progress(quiet=True)
    with Server(url, "") as server:
        subject = run.probe(server, settings, None, progress)
        return run.measure(subject, subject.settings, slo.parse(limits), "", progress)


def retried(test: Callable[..., None]) -> Callable[..., None]:
    """Repeat a test that compares figures of two processes, which differ if one of them got no CPU for a while."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        for _ in range(9):
            with suppress(AssertionError):
                return test(*arguments, **named)
        test(*arguments, **named)

    return run


def in_several_tries(test: Callable[..., None]) -> Callable[..., None]:
    """Repeat a test likewise, with at most one other of its kind at the same time, for figures that must be close."""
    return pytest.mark.quiet(retried(test))


def constant(rate: float) -> Arrivals:
    return Arrivals(kind="constant", rate=rate)


__all__ = ["CLOSED", "Arrivals", "Clients", "Workload", "constant", "in_several_tries", "measured", "retried"]
