"""Load on a service: measures its capacity, then applies a share of it while a fault is injected."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from triptych.loadtest.errors import ServerError
from triptych.loadtest.generator.fleet import Fleet
from triptych.loadtest.records import Outcome, Record
from triptych.loadtest.runs import run
from triptych.loadtest.runs.progress import Progress
from triptych.loadtest.runs.run import Subject
from triptych.loadtest.server.target_server import Server
from triptych.loadtest.settings import Arrivals, Clients, Settings, Workload

CAPACITY_S = 8.0
_WARM_S = 2.0  # at its start, not counted
_CLIENTS = 16
_DRAIN_S = 60.0

Stages = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Holds the records of a load; `fault` is the time of the fault, in seconds of the records' clock."""

    records: list[Record]
    start: float  # a time of time.monotonic()
    fault: float
    remark: str


def probe(url: str, model: str, workload: Workload, target: str = "generate") -> Subject:
    """Probe the service. Raises `UsageError`, `ServerError`."""
    settings = Settings(url=url, target=target, model=model, workload=workload, drain_s=_DRAIN_S)
    with Server(url, "") as server:
        return run.probe(server, settings, None, Progress(quiet=True))


def capacity(subject: Subject) -> float:
    """Return the requests a second that a closed loop of clients completes. Raises `ServerError` if there are none."""
    settings = replace(subject.settings, arrivals=Arrivals(kind="closed", concurrency=_CLIENTS), duration_s=CAPACITY_S)
    records = asyncio.run(_Run(subject, settings).records())
    answered = [r for r in records if r.outcome is Outcome.OK and _WARM_S <= r.ended <= CAPACITY_S]
    if not answered:
        raise ServerError(f"{settings.url}: nothing was answered within {CAPACITY_S:g} s; is the machine busy?")
    return len(answered) / (CAPACITY_S - _WARM_S)


def during(subject: Subject, stages: Stages, after_s: float, fault: Callable[[], str]) -> Loaded:
    """Apply the load of these stages (requests a second, seconds), and call `fault` after some seconds of it."""
    settings = replace(
        subject.settings,
        arrivals=Arrivals(kind="stages", stages=stages),
        duration_s=sum(seconds for _, seconds in stages),
        clients=Clients(timeout_s=30.0),
    )
    return asyncio.run(_Run(subject, settings).with_fault(after_s, fault))


class _Run:
    def __init__(self, subject: Subject, settings: Settings) -> None:
        self._fleet = Fleet(settings, subject.vocabulary, "")

    async def records(self) -> list[Record]:
        try:
            await self._fleet.start()
            self._fleet.go()
            await self._fleet.collect(lambda: None)
        finally:
            await self._fleet.aclose()
        return self._fleet.collected.records

    async def with_fault(self, after_s: float, fault: Callable[[], str]) -> Loaded:
        try:
            await self._fleet.start()
            start = self._fleet.go()
            gathering = asyncio.create_task(self._fleet.collect(lambda: None))
            await asyncio.sleep(start + after_s - time.monotonic())
            injected = time.monotonic()
            remark = await asyncio.to_thread(fault)
            await gathering
        finally:
            await self._fleet.aclose()
        return Loaded(self._fleet.collected.records, start, injected - start, remark)
