"""How worker processes of the load generator end."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
import uvloop

from triptych.loadtest.generator import fleet
from triptych.loadtest.generator.fleet import Fleet
from triptych.loadtest.generator.worker import wait_until
from triptych.loadtest.settings import Arrivals, Settings
from triptych.loadtest.workload.prompts import estimated


async def codes(hung: bool) -> list[int | None]:
    """Exit codes of two workers; the second may hang."""
    made = Fleet(Settings("http://127.0.0.1:1", "generate", workers=2), estimated(), "")
    await made.start()
    if hung:
        os.kill(made._processes[1].pid, signal.SIGSTOP)
    await made.aclose()
    return [process.returncode for process in made._processes]


def test_workers_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is killed as it ends is not reaped by asyncio, which then warns of an unknown child."""
    monkeypatch.setattr(fleet, "_LEAVE_S", 60.0)
    assert asyncio.run(codes(hung=False)) == [0, 0]


def test_a_worker_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_LEAVE_S", 0.1)
    assert asyncio.run(codes(hung=True))[1] == -signal.SIGKILL


async def ended(settings: Settings, *, stopped: bool = False) -> list[int | None]:
    """Exit codes of the workers of a run; it may be told to stop before it begins."""
    made = Fleet(settings, estimated(), "")
    async with asyncio.timeout(120):
        await made.start()
        if stopped:
            made.stop()
        made.go()
        await made.collect(lambda: None)
        await made.aclose()
    return [process.returncode for process in made._processes]


def test_a_worker_that_is_told_to_stop_before_the_start_says_that_it_ends() -> None:
    assert asyncio.run(ended(Settings("http://127.0.0.1:1", "generate", workers=2), stopped=True)) == [0, 0]


def test_a_worker_without_a_client_waits_for_nothing() -> None:
    arrivals = Arrivals(kind="closed", concurrency=1)
    few = Settings("http://127.0.0.1:1", "generate", arrivals=arrivals, requests=1, duration_s=5.0, workers=2)
    assert asyncio.run(ended(few)) == [0, 0]


def test_no_wait_ends_early() -> None:
    """A client that begins before the run's start is not counted; uvloop's timers fire up to 0.5 ms early."""

    async def least() -> float:
        late = []
        for number in range(100):
            at = time.monotonic() + 0.0011 + number * 1e-5
            await wait_until(at, time.monotonic)
            late.append(time.monotonic() - at)
        return min(late)

    assert uvloop.run(least()) >= 0.0
