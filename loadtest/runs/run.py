"""The execution of a run, from settings to the result document, with one workload or several at the same time.

Each workload has its own worker processes, which start together; the server's metrics are read once for all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.loadtest.generator.fleet import START_S, Collected, Fleet
from triptych.loadtest.records import Record
from triptych.loadtest.results import page, summary
from triptych.loadtest.results.slo import Limit
from triptych.loadtest.runs.progress import Progress
from triptych.loadtest.server import prometheus
from triptych.loadtest.server.prometheus import Scrape
from triptych.loadtest.server.target_server import Server
from triptych.loadtest.settings import Settings
from triptych.loadtest.workload import prompts
from triptych.loadtest.workload.prompts import Vocabulary

SCHEMA = 1
SCRAPE_S = 1.0
SETTLE_S = 2.0  # a server may count the end of a request slightly after its client sees it

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """Holds a server that has replied to a probe, and its properties."""

    server: Server
    settings: Settings  # with the model and its context length filled in
    vocabulary: Vocabulary
    about: Json


@dataclass(frozen=True, slots=True)
class Load:
    """Holds one workload of a run; `name` distinguishes it from others in the run."""

    subject: Subject
    settings: Settings
    limits: Sequence[Limit]
    name: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """Holds the result of one workload."""

    document: Json  # as it is written: schema 1
    records: list[Record]

    @property
    def interrupted(self) -> bool:
        return bool(self.document["interrupted"])


def probe(server: Server, settings: Settings, tokenizer: Path | None, progress: Progress) -> Subject:
    """Probe the server and read the properties that a run needs. Raises `UsageError`, `ServerError`."""
    about = server.about()
    model = server.probe(settings)
    length = settings.max_model_len or server.max_model_len(model, about)
    vocabulary = prompts.from_file(tokenizer) if tokenizer else server.vocabulary(model) or prompts.estimated()
    progress.say(f"{model or 'the model'} at {settings.url} answers; prompt lengths by {vocabulary.source}")
    return Subject(server, dataclasses.replace(settings, model=model, max_model_len=length), vocabulary, about)


def measure(
    subject: Subject, settings: Settings, limits: Sequence[Limit], api_key: str, progress: Progress
) -> Measured:
    """Run the load and summarise it. Ctrl-C ends it early; the result is what was measured until then."""
    [measured] = measure_together([Load(subject, settings, limits)], api_key, progress)
    return measured


def measure_together(loads: Sequence[Load], api_key: str, progress: Progress) -> list[Measured]:
    """Run several loads on one server at the same time, and return their results in order.

    The server's metrics are compared with a load's own figures if no other load uses its model.
    """
    return asyncio.run(_Run(loads, api_key, progress).result())


class _Run:
    def __init__(self, loads: Sequence[Load], api_key: str, progress: Progress) -> None:
        self._loads = loads
        self._server = loads[0].subject.server
        self._progress = progress
        self._fleets = [Fleet(load.settings, load.subject.vocabulary, api_key) for load in loads]
        self._scrapes: list[Mapping[str, Scrape]] = []  # by model
        self._start = 0.0
        self._stopped: float | None = None

    async def result(self) -> list[Measured]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        try:
            with self._progress.shown():
                await self._make_load()
        finally:
            await asyncio.gather(*(fleet.aclose() for fleet in self._fleets))
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return [
            Measured(self._document(started, load, fleet.collected), fleet.collected.records)
            for load, fleet in zip(self._loads, self._fleets, strict=True)
        ]

    async def _make_load(self) -> None:
        self._start = time.monotonic()
        await asyncio.gather(*(fleet.start() for fleet in self._fleets))
        await self._scrape()
        self._start = time.monotonic() + START_S
        for fleet in self._fleets:
            fleet.go(self._start)
        if self._stopped is not None:  # before the load began
            self._stop_fleets()
        scraping = asyncio.create_task(self._scrape_on())
        await asyncio.gather(*(fleet.collect(self._show) for fleet in self._fleets))
        scraping.cancel()
        await self._settle()

    def _stop(self) -> None:
        if self._stopped is None:
            self._stopped = max(0.0, time.monotonic() - self._start)
            self._stop_fleets()

    def _stop_fleets(self) -> None:
        for fleet in self._fleets:
            fleet.stop()

    def _show(self) -> None:
        loads = zip(self._loads, self._fleets, strict=True)
        shown = [(load.name, load.settings, fleet.collected) for load, fleet in loads]
        self._progress.update(shown, time.monotonic() - self._start)

    async def _scrape(self) -> None:
        models = {load.settings.model for load in self._loads}
        if found := await asyncio.to_thread(self._server.scrape, self._start, models):
            self._scrapes.append(found)

    async def _scrape_on(self) -> None:
        while True:
            await asyncio.sleep(SCRAPE_S)
            await self._scrape()

    async def _settle(self) -> None:
        """Scrape until the server reports no running requests."""
        end = time.monotonic() + SETTLE_S
        while self._scrapes:
            await asyncio.sleep(0.1)
            await self._scrape()
            last = self._scrapes[-1].values()
            idle = not any(scrape.value("running") or scrape.value("waiting") for scrape in last)
            if idle or time.monotonic() > end:
                return

    def _document(self, started: str, load: Load, collected: Collected) -> Json:
        settings = load.settings
        collected.records.sort(key=lambda record: (record.scheduled, record.index, record.turn))
        found = summary.summarise(collected.records, settings, load.limits, self._stopped)
        elapsed = max((record.ended for record in collected.records), default=0.0)
        busy = [cpu_s / elapsed for cpu_s in collected.cpu_s] if elapsed else []
        doubts = summary.doubts(found, settings, collected.beats, busy)
        generator = {
            "workers": settings.workers,
            "cores_used": [round(share, 3) for share in busy],
            "send_lag_p99_ms": found["latency_ms"].get("lag", {}).get("p99"),
            "read_lag_p99_ms": summary.late(collected.beats),
        }
        return {
            "schema": SCHEMA,
            "kind": "run",
            "started": started,
            "commit": page.commit(),
            "machine": page.describe(),
            "server": load.subject.about,
            "settings": dataclasses.asdict(settings),
            "prompt_lengths_by": load.subject.vocabulary.source,
            "interrupted": self._stopped is not None,
            "valid": not doubts,
            "doubts": doubts,
            "generator": generator,
            **found,
            "crosscheck": self._crosscheck(settings.model, collected.records),
            "gauges": self._gauges(settings.model),
        }

    def _crosscheck(self, model: str, records: Sequence[Record]) -> list[Json]:
        """Compare with the server's metrics; empty if those of `model` belong to several loads."""
        if len(self._scrapes) < 2 or sum(load.settings.model == model for load in self._loads) > 1:
            return []
        return prometheus.compare(records, self._scrapes[0][model], self._scrapes[-1][model])

    def _gauges(self, model: str) -> Json:
        """Return the server's gauges over time; empty lists if it has none."""
        names = ("running", "waiting", "wait_s", "kv_usage")
        during = [scrapes[model] for scrapes in self._scrapes[1:]]
        found: Json = {"at": [round(scrape.at, 3) for scrape in during]}
        return found | {name: [scrape.value(name) for scrape in during] for name in names}
