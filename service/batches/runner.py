"""Runs batches in the background: checks their files, sends their lines, and writes their output files.

Of several processes with one folder, the holder of the lease does this. A line is sent to its own route, as a request
of the batch's owner. Its result counts from the transaction that stores it, so each line has one result, whatever ends
in between; a line may be computed twice.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import asdict
from operator import methodcaller
from typing import Protocol

from starlette.types import ASGIApp

from triptych.service.batches import calls
from triptych.service.batches.lines import Checker, InputLostError, Line, LineError, checked, read_lines
from triptych.service.batches.metrics import BatchMetrics
from triptych.service.batches.objects import ENDPOINTS
from triptych.service.batches.output_files import OutputFiles
from triptych.service.batches.records import Batch, Result, now
from triptych.service.batches.store import LeaseLostError, Store, sweep
from triptych.service.batches.turns import Turns
from triptych.service.core.errors import ApiError, log_unexpected, unauthorized
from triptych.service.core.threads import Threads
from triptych.service.http.in_process import post
from triptych.service.settings.service_settings import Limits
from triptych.service.settings.tenant import Tenant

POLL_SECONDS = 1.0
_SWEEP_SECONDS = 3_600.0
_PAUSE_SECONDS = 5.0  # after a failure of the disk or the database
_MAX_BATCHES = 32  # that run at a time; further ones wait
_READ_LINES, _READ_BYTES = 16, 1 << 20  # that are read at a time
_HELD_BYTES = 16 << 20  # of a batch's lines in memory; a single line may be larger

logger = logging.getLogger(__name__)


class Room(Protocol):
    """What the service allows batches."""

    def tenant(self, owner: str) -> Tenant | None:
        """Return the holder of the key that made a batch; None if the key is not valid any more."""

    def slots(self, endpoint: str) -> int:
        """Return how many lines may be sent to a route at a time."""


class BatchRunner:
    """The background work of one process."""

    def __init__(self, app: ASGIApp, store: Store, room: Room, limits: Limits, metrics: BatchMetrics) -> None:
        """Lines are sent to `app`."""
        self.app = app
        self.store = store
        self.room = room
        self.metrics = metrics
        self._turns: dict[bool, Turns] = {}  # for audio, and for other lines of all batches together
        self.is_stopping = False
        self.file_thread = Threads(1, "triptych-batches")
        self._limits = limits
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()  # batches whose task began after they were cancelled
        self._news = asyncio.Event()
        self._swept = -_SWEEP_SECONDS

    async def run(self) -> None:
        """Run batches until cancelled."""
        try:
            while not self.is_stopping:
                try:
                    await self._look()
                except LeaseLostError:
                    await self._rest()
                except (sqlite3.Error, OSError) as error:
                    logger.error("the state of batches cannot be read: %s", error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._news.wait()
                self._news.clear()
        finally:
            await self._end_tasks()

    def turns(self, endpoint: str) -> Turns:
        """Return the places for lines to a route, as many as the models that are loaded now allow."""
        is_audio, places = endpoint in calls.AUDIO_ROUTES, self.room.slots(endpoint)
        if is_audio not in self._turns:
            self._turns[is_audio] = Turns(places)
        self._turns[is_audio].resize(places)
        return self._turns[is_audio]

    def notice(self) -> None:
        """Look at once for what has changed."""
        self._news.set()

    def stop(self) -> None:
        """Send no more lines, and give up those that run: the service drains."""
        self.is_stopping = True
        for task in self._tasks.values():
            task.cancel()
        self._news.set()

    def lines(self, batch: Batch) -> Generator[tuple[int, bytes], None, None]:
        """Yield the numbers and lines of a batch's input file."""
        checker = Checker(batch.endpoint, self._most_body_bytes(batch))
        return read_lines(self.store.path_of(batch.input_file_id), checker.most_line_bytes)

    def _most_body_bytes(self, batch: Batch) -> int:
        name = ENDPOINTS[batch.endpoint]
        most: int = getattr(self._limits, name)
        return most * 4 // 3 + 4 if name == "max_audio_bytes" else most  # a file is base64 in a line

    async def _look(self) -> None:
        """Start, cancel and end the work on batches as their states ask for."""
        active, num_bytes = await self.store.run(lambda tables: (tables.active(), tables.bytes_used))
        self.metrics.stored(num_bytes)
        if not active:
            await self.store.shrink()
        sweeps = time.monotonic() - self._swept >= _SWEEP_SECONDS
        if not (active or sweeps or self._tasks):
            return
        if not await self.store.run(lambda tables: tables.take_lease()):
            await self._rest()
            return
        if sweeps:
            self._swept = time.monotonic()
            gone, known = await self.store.run(lambda tables: tables.expire())
            await self.file_thread.run_in_thread(lambda: sweep(self.store.files, gone, known))
        self.metrics.state(active)
        chosen = _in_turns(active)[:_MAX_BATCHES]
        for batch_id in self._tasks.keys() - {batch.id for batch in chosen}:
            await self._end_task(batch_id)  # it has ended, or waits for those of others
        for batch in chosen:
            await self._look_at(batch)
        if not active:
            await self.store.run(lambda tables: tables.drop_lease())

    async def _look_at(self, batch: Batch) -> None:
        """Begin the work on a batch; begin it again if the batch was cancelled meanwhile."""
        task = self._tasks.get(batch.id)
        if task is not None and batch.status == "cancelling" and batch.id not in self._cancelled:
            await self._end_task(batch.id)
            task = None
        if (task is None or task.done()) and not self.is_stopping:
            if batch.status == "cancelling":
                self._cancelled.add(batch.id)
            self._tasks[batch.id] = asyncio.create_task(self._guarded(batch))

    async def _end_task(self, batch_id: str) -> None:
        task = self._tasks.pop(batch_id)
        task.cancel()
        await asyncio.wait({task})

    async def _rest(self) -> None:
        """Leave the batches to another process."""
        await self._end_tasks()
        self.metrics.state([])

    async def _end_tasks(self) -> None:
        for batch_id in list(self._tasks):
            await self._end_task(batch_id)

    async def _guarded(self, batch: Batch) -> None:
        """Work on a batch; after a failure, pause: the next look begins again."""
        try:
            await self._work(batch)
            self._cancelled.discard(batch.id)
        except LeaseLostError:
            return
        except (sqlite3.Error, OSError) as error:
            logger.error("batch %s waits: %s", batch.id, error)
            await asyncio.sleep(_PAUSE_SECONDS)
        except Exception as error:
            log_unexpected(error)
            await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            self._news.set()

    async def _work(self, batch: Batch) -> None:
        """Bring a batch to its end; without its input file it fails, with the results that it has."""
        found = await self.store.run(lambda tables: tables.unfinished(batch.id))
        if found is None:
            return  # it ended after it was looked at
        batch = found
        try:
            await self._advance(batch)
        except InputLostError as error:
            lost = LineError("file_missing", str(error))

            def note(one: Batch) -> None:
                one.errors = [asdict(lost)]

            await self._finish(await self.change(batch, note), "failed")

    async def _advance(self, batch: Batch) -> None:
        if batch.status == "validating":
            batch = await self._check(batch)
        if batch.status == "in_progress":
            with suppress(TimeoutError):
                async with asyncio.timeout(batch.expires_at - now()):
                    await RunningBatch(self, batch).send_all()
            batch = await self.change(batch, _finalize)
        if batch.status == "finalizing":
            await self._finish(batch, "completed" if batch.completed + batch.failed == batch.total else "expired")
        elif batch.status == "cancelling":
            await self._finish(batch, "cancelled")

    async def change(self, batch: Batch, act: Callable[[Batch], None]) -> Batch:
        return await self.store.run(lambda tables: tables.change(batch.id, act))

    # Checking

    async def _check(self, batch: Batch) -> Batch:
        """Check all lines; then the batch has failed or is in progress."""
        checker, stop = Checker(batch.endpoint, self._most_body_bytes(batch)), threading.Event()
        try:
            errors = await self.file_thread.run_in_thread(lambda: self._errors(batch, checker, stop))
        finally:
            stop.set()

        def enter(one: Batch) -> None:
            if one.status != "validating":
                return  # cancelled meanwhile
            one.total = 0 if errors else checker.total
            one.model = next(iter(checker.models)) if len(checker.models) == 1 else None
            one.errors = [asdict(error) for error in errors]
            one.enter("failed" if errors else "in_progress")

        found = await self.change(batch, enter)
        if found.status == "failed":
            self.metrics.ended("failed")
        return found

    def _errors(self, batch: Batch, checker: Checker, stop: threading.Event) -> list[LineError]:
        try:
            for number, line in self.lines(batch):
                checker.add(number, line)
                if checker.is_full or stop.is_set():
                    break
        except InputLostError as error:
            return [LineError("file_missing", str(error))]
        return checker.finish()

    # The output files

    async def _finish(self, batch: Batch, status: str) -> None:
        """Write the output files and end the batch. Until the last transaction nothing of it counts."""
        files = OutputFiles(self.store)
        try:
            last = 0
            while some := await self.store.run(methodcaller("results", batch.id, last)):
                await self.file_thread.run_in_thread(lambda: files.add(some))
                last = some[-1][0]
            done = await self.store.run(lambda tables: tables.lines_done(batch.id))
            unrun = batch.total - len(done)
            if unrun and status != "failed":
                unrun = await self.file_thread.run_in_thread(
                    lambda: files.add_unrun(batch, self.lines(batch), done, status)
                )
            output, errors = await self.file_thread.run_in_thread(files.complete)
            found = await self.store.run(lambda tables: tables.finish(batch.id, status, output, errors, unrun))
        except Exception:
            files.discard()
            raise
        finally:
            files.close()
        self.metrics.ended(found.status)
        logger.info(
            "batch %s is %s: %d lines, %d completed, %d failed",
            *(batch.id, found.status, found.total, found.completed, found.failed),
        )


class RunningBatch:
    """The lines of one batch while they are sent."""

    def __init__(self, runner: BatchRunner, batch: Batch) -> None:
        self._runner = runner
        self._batch = batch
        self._pending: list[Result] = []  # with a reply, and not stored yet
        self._writing = asyncio.Lock()
        self._held: dict[int, int] = {}  # lines that run or wait to be sent again: the bytes of each
        self._ended = asyncio.Event()  # one of these

    async def send_all(self) -> None:
        """Return when every line has a result. Raises `LeaseLostError`."""
        runner = self._runner
        done = await runner.store.run(lambda tables: tables.lines_done(self._batch.id))
        lines = runner.lines(self._batch)
        try:
            async with asyncio.TaskGroup() as group:
                while some := await runner.file_thread.run_in_thread(lambda: _next(lines, done)):
                    for number, line in some:
                        await self._hold(number, len(line))
                        group.create_task(self._run(number, line))
        except* LeaseLostError:
            raise LeaseLostError from None
        except* InputLostError as lost:
            raise InputLostError(str(lost.exceptions[0])) from None
        finally:  # after a cancellation, the garbage collector would close the file at some time
            await runner.file_thread.run_in_thread(lines.close)

    async def _hold(self, number: int, size: int) -> None:
        """Count a line when there is room for it."""
        held, slots = self._held, self._runner.room.slots
        while held and (len(held) >= slots(self._batch.endpoint) or sum(held.values()) + size > _HELD_BYTES):
            self._ended.clear()
            await self._ended.wait()
        held[number] = size

    async def _run(self, number: int, raw: bytes) -> None:
        try:
            await self._put(await self._result(number, checked(raw)))
        finally:
            del self._held[number]
            self._ended.set()

    async def _result(self, number: int, line: Line) -> Result:
        """Send a line until its reply is final."""
        batch, metrics = self._batch, self._runner.metrics
        failures = 0
        while True:
            tenant = self._runner.room.tenant(batch.owner)
            if tenant is None:
                gone = unauthorized("the API key that made this batch is not valid any more")
                return calls.refused(batch.id, number, line.custom_id, gone)
            async with self._runner.turns(batch.endpoint).place(batch.owner):
                try:
                    body, media_type = await asyncio.to_thread(calls.request_of, line)
                except ApiError as error:
                    return calls.refused(batch.id, number, line.custom_id, error)
                reply = await post(self._runner.app, line.url, body, tenant, media_type)
                del body
            if self._runner.is_stopping:  # what a drain has cut off is no result
                await asyncio.Event().wait()
            broke = calls.broke_engine(reply)
            failures += broke
            seconds = calls.seconds_to_wait(reply, failures)
            if seconds is None:
                return calls.result_of(batch.id, number, line.custom_id, reply)
            metrics.retried(batch.endpoint, "engine" if broke else "load")
            await asyncio.sleep(seconds)

    async def _put(self, result: Result) -> None:
        """Store a result, in one transaction with those of other lines that are ready."""
        self._pending.append(result)
        async with self._writing:
            if not self._pending:
                return
            results, self._pending = self._pending, []
            await self._store(results)
        for one in results:
            self._runner.metrics.line(self._batch.endpoint, ok=one.ok)

    async def _store(self, results: list[Result]) -> None:
        """Store results; while the disk is full, wait."""
        store, id_ = self._runner.store, self._batch.id
        while True:
            try:
                if await store.run(lambda tables: tables.has_room and bool(tables.add_results(id_, results))):
                    return
                logger.warning("batch %s waits: max_state_bytes is reached; delete files", id_)
            except (sqlite3.Error, OSError) as error:
                logger.error("batch %s waits: its results cannot be written: %s", id_, error)
            await asyncio.sleep(_PAUSE_SECONDS)


def _next(lines: Iterator[tuple[int, bytes]], done: set[int]) -> list[tuple[int, bytes]]:
    """Return a few lines without a result; none at the end of the file."""
    found, size = [], 0
    for number, line in lines:
        if number not in done:
            found.append((number, line))
            size += len(line)
            if len(found) == _READ_LINES or size >= _READ_BYTES:
                break
    return found


def _in_turns(active: list[Batch]) -> list[Batch]:
    """Return batches in the order in which they may run: those to cancel, then one of each owner, then more."""
    turn: Counter[str] = Counter()
    places: list[tuple[bool, int, int]] = []
    for batch in active:
        turn[batch.owner] += 1
        places.append((batch.status != "cancelling", turn[batch.owner], len(places)))
    return [active[place[-1]] for place in sorted(places)]


def _finalize(batch: Batch) -> None:
    if batch.status == "in_progress":  # else it was cancelled meanwhile
        batch.enter("finalizing")
