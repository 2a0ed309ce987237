"""One run from settings to its result document."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest import crosscheck, machine, summary, texts
from loadtest.fleet import Fleet
from loadtest.progress import Progress
from loadtest.prometheus import Scrape
from loadtest.records import Record
from loadtest.server import Server
from loadtest.settings import Settings
from loadtest.slo import Limit
from loadtest.texts import Vocabulary

SCHEMA = 1
SCRAPE_S = 1.0
SETTLE_S = 2.0  # a server may count the end of a request a little after its client has seen it

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """A server that answers, and what is known of it."""

    server: Server
    settings: Settings  # with the model and its context filled in
    vocabulary: Vocabulary
    about: Json


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run found."""

    document: Json  # as it is written: schema 1
    records: list[Record]

    @property
    def interrupted(self) -> bool:
        return bool(self.document["interrupted"])


def meet(server: Server, settings: Settings, tokenizer: Path | None, progress: Progress) -> Subject:
    """Ask the server for all that a run has to know. Raises `UsageError`, `ServerError`."""
    about = server.about()
    model = server.probe(settings)
    length = settings.max_model_len or server.max_model_len(model, about)
    vocabulary = texts.from_file(tokenizer) if tokenizer else server.vocabulary(model) or texts.estimated()
    progress.say(f"{model or 'the model'} at {settings.url} answers; prompt lengths by {vocabulary.source}")
    return Subject(server, dataclasses.replace(settings, model=model, max_model_len=length), vocabulary, about)


def measure(
    subject: Subject, settings: Settings, limits: Sequence[Limit], api_key: str, progress: Progress
) -> Measured:
    """Make the load and sum it up. Ctrl-C ends it early; what was measured until then is the result."""
    return asyncio.run(_Run(subject, settings, limits, api_key, progress).result())


class _Run:
    def __init__(
        self, subject: Subject, settings: Settings, limits: Sequence[Limit], api_key: str, progress: Progress
    ) -> None:
        self._subject = subject
        self._settings = settings
        self._limits = limits
        self._progress = progress
        self._fleet = Fleet(settings, subject.vocabulary, api_key)
        self._scrapes: list[Scrape] = []
        self._start = 0.0
        self._stopped: float | None = None

    async def result(self) -> Measured:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        try:
            with self._progress.shown():
                await self._make_load()
        finally:
            await self._fleet.aclose()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return Measured(self._document(started), self._fleet.gathered.records)

    async def _make_load(self) -> None:
        self._start = time.monotonic()
        await self._fleet.start()
        await self._scrape()
        self._start = self._fleet.go()
        if self._stopped is not None:  # before there was anything to stop
            self._fleet.stop()
        scraping = asyncio.create_task(self._scrape_on())
        await self._fleet.gather(self._show)
        scraping.cancel()
        await self._settle()

    def _stop(self) -> None:
        if self._stopped is None:
            self._stopped = max(0.0, time.monotonic() - self._start)
            self._fleet.stop()

    def _show(self) -> None:
        self._progress.update(self._settings, self._fleet.gathered, time.monotonic() - self._start)

    async def _scrape(self) -> None:
        found = await asyncio.to_thread(self._subject.server.scrape, self._start, self._settings.model)
        if found is not None:
            self._scrapes.append(found)

    async def _scrape_on(self) -> None:
        while True:
            await asyncio.sleep(SCRAPE_S)
            await self._scrape()

    async def _settle(self) -> None:
        """Scrape until the server says that nothing runs."""
        end = time.monotonic() + SETTLE_S
        while self._scrapes:
            await asyncio.sleep(0.1)
            await self._scrape()
            idle = not self._scrapes[-1].value("running") and not self._scrapes[-1].value("waiting")
            if idle or time.monotonic() > end:
                return

    def _document(self, started: str) -> Json:
        gathered = self._fleet.gathered
        gathered.records.sort(key=lambda record: (record.scheduled, record.index, record.turn))
        found = summary.summarise(gathered.records, self._settings, self._limits, self._stopped)
        elapsed = max((record.ended for record in gathered.records), default=0.0)
        busy = [cpu_s / elapsed for cpu_s in gathered.cpu_s] if elapsed else []
        doubts = summary.doubts(found, self._settings, gathered.beats, busy)
        generator = {
            "workers": self._settings.workers,
            "cores_used": [round(share, 3) for share in busy],
            "send_lag_p99_ms": found["latency_ms"].get("lag", {}).get("p99"),
            "read_lag_p99_ms": summary.late(gathered.beats),
        }
        return {
            "schema": SCHEMA,
            "kind": "run",
            "started": started,
            "commit": machine.commit(),
            "machine": machine.describe(),
            "server": self._subject.about,
            "settings": dataclasses.asdict(self._settings),
            "prompt_lengths_by": self._subject.vocabulary.source,
            "interrupted": self._stopped is not None,
            "valid": not doubts,
            "doubts": doubts,
            "generator": generator,
            **found,
            "crosscheck": self._crosscheck(),
            "gauges": self._gauges(),
        }

    def _crosscheck(self) -> list[Json]:
        if len(self._scrapes) < 2:
            return []
        return crosscheck.compare(self._fleet.gathered.records, self._scrapes[0], self._scrapes[-1])

    def _gauges(self) -> Json:
        """The server's own state over time; empty lists where it does not tell."""
        names = ("running", "waiting", "kv_usage")
        during = self._scrapes[1:]
        found: Json = {"at": [round(scrape.at, 3) for scrape in during]}
        return found | {name: [scrape.value(name) for scrape in during] for name in names}
