"""A worker process, `python -m triptych.loadtest.generator.worker`, which is driven by JSON lines on stdin and stdout.

Input: a `Job`, a `Message` with the run's start, and possibly one to stop. Output: a `Report` when it is ready, one
each half second, and one with `end`. A worker sends every W-th item of the seeded workload, so that the load does not
depend on the number of workers. Display, scraping and statistics are left to the parent. A worker ends when its input
ends.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from triptych.loadtest.generator.client import Client, clock
from triptych.loadtest.generator.connections import Connections
from triptych.loadtest.records import Outcome, Record
from triptych.loadtest.settings import PATHS, Settings
from triptych.loadtest.workload import distributions
from triptych.loadtest.workload.items import Item, ItemSource, read_replay
from triptych.loadtest.workload.prompts import Vocabulary

# -- The driver of a worker, which sends items at their scheduled times, independently of the server. Open arrivals
# follow their schedule: a late reply delays no later request, and latency is measured from the schedule, so that a
# stall of the server is visible (no coordinated omission). In a closed loop each client sends after its last reply, so
# the load depends on the server, and a closed loop cannot show an overload.

PREPARE_S = 3.0


class Driver:
    """Sends the items of worker `number` of W: number, number + W, number + 2 W, ..."""

    def __init__(self, settings: Settings, source: ItemSource, times: Sequence[float], number: int) -> None:
        self._settings = settings
        self._source = source
        self._due = list(enumerate(times))[number :: settings.workers]
        self._number = number
        self._prepared: dict[int, Item] = {}
        self._ended: list[Record] = []
        self._tasks: set[asyncio.Task[None]] = set()
        bound = settings.clients.max_concurrency
        self._places = asyncio.Semaphore(_share(bound, number, settings.workers)) if bound else None
        self.sent = 0
        self.in_flight = 0

    def prepare(self, most: int) -> None:
        """Make the first items, for at most `PREPARE_S`."""
        count = len(self._due)
        if not count:
            count = _share(self._settings.requests, self._number, self._settings.workers) or most
        end = time.monotonic() + PREPARE_S
        for k in range(min(most, count)):
            if time.monotonic() > end:
                return
            index = self._number + k * self._settings.workers
            self._prepared[index] = self._source.item(index)

    def take(self) -> list[Record]:
        """Return the records of requests that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    async def run(self, client: Client) -> None:
        """Send all items and wait for the replies; if cancelled, end requests in progress and keep their records."""
        try:
            if self._settings.arrivals.kind == "closed":
                await self._closed(client)
            else:
                await self._open(client)
            await self._drain()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _open(self, client: Client) -> None:
        for index, at in self._due:
            await wait_until(at, client.now)
            self._start(self._item(client, index, at))

    async def _closed(self, client: Client) -> None:
        settings = self._settings
        indexes = iter(range(self._number, settings.requests or 10**12, settings.workers))
        for _ in range(_share(settings.arrivals.concurrency, self._number, settings.workers)):
            self._start(self._user(client, indexes))
        if self._tasks:  # else there are more workers than clients
            await asyncio.wait(self._tasks, timeout=settings.duration_s or None)

    async def _user(self, client: Client, indexes: Iterator[int]) -> None:
        """Run one client of a closed loop."""
        end = self._settings.duration_s or float("inf")
        for index in indexes:
            if client.now() >= end:
                return
            await self._item(client, index, client.now())

    async def _item(self, client: Client, index: int, at: float) -> None:
        """Send the turns of one item one after the other."""
        begun = client.now()
        item = self._prepared.pop(index, None) or self._source.item(index)
        history: list[str] = []
        for number, turn in enumerate(item.turns):
            record = Record(index, number, item.habit, at, turn.prompt_tokens, turn.output_tokens, begun=begun)
            said = await self._request(client, record, item, history)
            if record.outcome is not Outcome.OK or number + 1 == len(item.turns):
                return
            history += [turn.text, said]
            at = record.ended + item.turns[number + 1].think_s
            if 0 < self._settings.duration_s <= at:
                return  # the drain is no load: its few requests would be quick ones
            await wait_until(at, client.now)
            begun = client.now()

    async def _request(self, client: Client, record: Record, item: Item, history: list[str]) -> str:
        self.sent += 1
        self.in_flight += 1
        try:
            if self._places is None:
                return await client.request(record, item, item.turns[record.turn], history)
            async with self._places:
                return await client.request(record, item, item.turns[record.turn], history)
        finally:
            self.in_flight -= 1
            record.ended = record.ended or client.now()
            self._ended.append(record)

    async def _drain(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._settings.drain_s)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def wait_until(at: float, now: Callable[[], float]) -> None:
    """Wait until it is `at` by `now`. uvloop's timers have whole milliseconds and can fire half of one too early."""
    while (wait_s := at - now()) > 0:
        await asyncio.sleep(wait_s)


def _share(total: int, number: int, workers: int) -> int:
    """Return how many of `total` clients worker `number` has."""
    return total // workers + (number < total % workers)


REPORT_S = 0.5
HEARTBEAT_S = 0.02
PREPARED = 4096  # items made before the start; later ones are made when they are due


@dataclass(frozen=True, slots=True)
class Job:
    settings: Settings
    vocabulary: Vocabulary
    api_key: str
    number: int  # of this worker among `settings.workers`


@dataclass(slots=True)
class Message:
    """Is a message of the parent: `start`, a time of `time.monotonic`, or stop."""

    start: float = 0.0
    stop: bool = False


@dataclass(slots=True)
class Report:
    """Is a message of a worker: the records since the last one, and the worker's state."""

    records: list[Record] = field(default_factory=list)
    beats: list[float] = field(default_factory=list)  # delays of the event loop, in seconds
    in_flight: int = 0
    sent: int = 0
    cpu_s: float = 0.0
    ready: bool = False
    end: bool = False


async def work() -> None:
    """Run one job."""
    reader = await _stdin()
    job = msgspec.json.decode(await reader.readline(), type=Job)
    settings = job.settings
    connections = Connections(settings.url + PATHS[settings.target], job.api_key, settings.clients.timeout_s)
    times = due(settings)
    driver = Driver(settings, ItemSource(settings, job.vocabulary), times, job.number)
    driver.prepare(PREPARED)
    gc.collect()
    gc.freeze()  # exempts present objects from garbage collection during the run
    _send(Report(ready=True))
    go = msgspec.json.decode(await reader.readline() or b'{"stop":true}', type=Message)
    if go.stop:
        _send(Report(end=True))
        return
    cpu_before = time.process_time()
    now = clock(go.start)
    await wait_until(0.0, now)
    run = asyncio.create_task(driver.run(Client(settings, connections, now)))
    beats: list[float] = []
    helpers = [asyncio.create_task(_stop_when_told(reader, run)), asyncio.create_task(_heartbeat(beats))]
    while not run.done():
        await asyncio.wait([run], timeout=REPORT_S)
        _send(_report(driver, beats, cpu_before))
    for task in helpers:
        task.cancel()
    await connections.aclose()
    last = _report(driver, beats, cpu_before)
    last.end = True
    _send(last)
    if not run.cancelled():
        run.result()


def due(settings: Settings) -> list[float]:
    """Return the scheduled times of all items of the run; empty for a closed loop."""
    if settings.arrivals.kind == "closed":
        return []
    if settings.arrivals.kind == "replay":
        times = [line.at for line in read_replay(settings.workload)]
        return [at for at in times[: settings.requests or None] if not settings.duration_s or at < settings.duration_s]
    return distributions.offsets(settings.arrivals, settings.duration_s, settings.requests, settings.seed).tolist()


def _report(driver: Driver, beats: list[float], cpu_before: float) -> Report:
    report = Report(driver.take(), beats.copy(), driver.in_flight, driver.sent, time.process_time() - cpu_before)
    beats.clear()
    return report


async def _heartbeat(beats: list[float]) -> None:
    """Measure by how much the event loop is late for a timer, which bounds how late it reads replies."""
    while True:
        wanted = time.monotonic() + HEARTBEAT_S
        await asyncio.sleep(HEARTBEAT_S)
        beats.append(max(0.0, time.monotonic() - wanted))


async def _stop_when_told(reader: asyncio.StreamReader, run: asyncio.Task[None]) -> None:
    await reader.readline()  # a message to stop, or the end of the input: the parent has ended
    run.cancel()


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _send(report: Report) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    import uvloop

    uvloop.run(work())
