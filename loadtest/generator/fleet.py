"""The worker processes of a run, as seen by the parent: start them, begin the load, collect reports, stop them.

The workers have sessions of their own, so that Ctrl-C reaches only the parent, which then stops them. When the parent
ends, their input ends, and so do they.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from triptych.loadtest.generator.worker import Job, Message, Report
from triptych.loadtest.records import Record
from triptych.loadtest.settings import Settings
from triptych.loadtest.workload.prompts import Vocabulary

_ROOT = Path(__file__).parents[3]
START_S = 0.3  # between the message and the run's start, so that every worker has received it
_LONGEST_LINE = 1 << 28
_LEAVE_S = 5.0  # for a worker to exit after its input has ended


@dataclass(slots=True)
class Collected:
    """Holds all records of the workers, and the last reported state of each."""

    records: list[Record] = field(default_factory=list)
    beats: list[float] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def add(self, number: int, report: Report) -> None:
        self.records += report.records
        self.beats += report.beats
        self.in_flight[number], self.sent[number] = report.in_flight, report.sent
        self.cpu_s[number] = report.cpu_s


async def start_worker() -> asyncio.subprocess.Process:
    """Start a worker process, which imports nothing from the working directory."""
    paths = [str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]  # empty: where it runs
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "triptych.loadtest.generator.worker"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
        limit=_LONGEST_LINE,
    )


class Fleet:
    """Runs `settings.workers` processes and collects their reports (`collected`)."""

    def __init__(self, settings: Settings, vocabulary: Vocabulary, api_key: str) -> None:
        self._jobs = [Job(settings, vocabulary, api_key, number) for number in range(settings.workers)]
        self._processes: list[asyncio.subprocess.Process] = []
        count = settings.workers
        self.collected = Collected(in_flight=[0] * count, sent=[0] * count, cpu_s=[0.0] * count)

    async def start(self) -> None:
        """Start the processes and wait until each has prepared its items."""
        for job in self._jobs:
            process = await start_worker()
            self._processes.append(process)
            self._tell(process, msgspec.json.encode(job))
        for process in self._processes:
            if not (await self._report(process)).ready:
                raise RuntimeError("a worker did not begin with ready")

    def go(self, start: float = 0.0) -> float:
        """Begin the load at `start`, a time of `time.monotonic` (0: in `START_S`), and return that time."""
        start = start or time.monotonic() + START_S
        for process in self._processes:
            self._tell(process, msgspec.json.encode(Message(start=start)))
        return start

    def stop(self) -> None:
        """End early: requests in progress are cancelled, and their records are still reported."""
        for process in self._processes:
            if process.returncode is None:
                self._tell(process, msgspec.json.encode(Message(stop=True)))

    async def collect(self, on_report: Callable[[], None]) -> None:
        """Wait until every worker has ended; calls `on_report` after each report."""
        await asyncio.gather(*(self._follow(n, process, on_report) for n, process in enumerate(self._processes)))

    async def aclose(self) -> None:
        """End the processes by closing their input, and kill those that do not end.

        They are not killed at once, because `kill` would reap a process that has just ended, which asyncio's child
        watcher then misses ("Unknown child process pid").
        """
        await asyncio.gather(*(self._end(process) for process in self._processes))

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _LEAVE_S)
        except TimeoutError:
            with suppress(ProcessLookupError):  # it has ended already
                process.kill()
            await process.wait()

    async def _follow(self, number: int, process: asyncio.subprocess.Process, on_report: Callable[[], None]) -> None:
        while True:
            report = await self._report(process)
            self.collected.add(number, report)
            on_report()
            if report.end:
                return

    async def _report(self, process: asyncio.subprocess.Process) -> Report:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker process ended with {await process.wait()} before its work was done")
        return msgspec.json.decode(line, type=Report)

    def _tell(self, process: asyncio.subprocess.Process, message: bytes) -> None:
        assert process.stdin is not None
        process.stdin.write(message + b"\n")
