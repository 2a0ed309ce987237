"""A worker process, `python -m loadtest.generator.worker`, which is driven by JSON lines on stdin and stdout.

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
from dataclasses import dataclass, field

import msgspec

from loadtest.generator.client import Client, clock
from loadtest.generator.connections import Connections
from loadtest.generator.driver import Driver
from loadtest.records import Record
from loadtest.settings import PATHS, Settings
from loadtest.workload import arrivals
from loadtest.workload.items import ItemSource, read_replay
from loadtest.workload.prompts import Vocabulary

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
        return
    cpu_before = time.process_time()
    now = clock(go.start)
    await asyncio.sleep(-now())
    run = asyncio.create_task(driver.run(Client(settings, connections, now)))
    beats: list[float] = []
    beside = [asyncio.create_task(_stop_when_told(reader, run)), asyncio.create_task(_heartbeat(beats))]
    while not run.done():
        await asyncio.wait([run], timeout=REPORT_S)
        _send(_report(driver, beats, cpu_before))
    for task in beside:
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
    return arrivals.offsets(settings.arrivals, settings.duration_s, settings.requests, settings.seed).tolist()


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
