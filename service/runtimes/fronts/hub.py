"""The hub of several front processes: it owns the engine, the models and the port, and serves no HTTP itself.

Workers parse, validate, tokenise and stream; `model.client.relay` joins them to the engine. Requests about the whole
service are answered here, in an application that is like theirs (`forwarding`). A worker that dies or hangs is replaced
within bounds; its requests are aborted at once, and nobody else's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from model.api.messages import ModelSpec
from model.api.stats import Health
from model.client.counts import SharedTable
from model.client.relay import Relay, RelayedCommands, RelayedRequest
from model.errors import EngineDeadError
from model.system.fault_limit import FaultLimit
from service.core.errors import ApiError, error_fields, internal, log_unexpected
from service.core.model_registry import Task
from service.core.request_context import RequestContext, set_current
from service.http.bodies import cancel_all
from service.lifecycle.model_slots import Origin, Slot, State
from service.lifecycle.state import Service, service_of
from service.planning.generate import public_id
from service.runtimes.fronts import messages as m
from service.runtimes.fronts.connections import ConnectionGiver
from service.runtimes.fronts.forwarding import answer, without_middleware
from service.runtimes.fronts.front import Front
from service.runtimes.fronts.link import Asked
from service.runtimes.fronts.mirror import MirroredRegistry
from service.settings.serve_config import ServeConfig

_CANCEL_SECONDS = 5.0  # for an answer of all workers
_SETTLE_SECONDS = 5.0
_WATCH_SECONDS = 0.25
_HEALTH_SECONDS = 1.0
_START_SECONDS = 120.0  # for the first sign of life, which imports and large tokenizers delay
_EXIT_SECONDS = 12.0  # for a worker that was told to end; its server takes 5 for replies
_MAX_FAULTS, _FAULT_SECONDS = 8, 600.0  # ends of one worker, after which it is left alone for as long
_PAUSES = (0.0, 0.5, 1.0, 2.0, 5.0)  # before it is started again

logger = logging.getLogger("triptych.front")


class Hub:
    """Starts and watches the workers, and does what they ask."""

    def __init__(
        self, config: ServeConfig, app: FastAPI, registry: MirroredRegistry, relay: Relay, table: SharedTable
    ) -> None:
        """`app` is the application of the hub's engine client and `registry`."""
        self._config = config
        self._settings = config.settings
        self._app = without_middleware(app)
        self._service: Service = service_of(app)
        self._registry = registry
        self._relay = relay
        self._table = table
        self.fronts: list[Front] = []
        self._asked = Asked()
        self._secret = secrets.token_bytes(32)
        self._slots: dict[int, Slot] = {}  # by adoption
        self._removed: dict[str, int] = {}  # the last adoption of each model that is loaded no more
        self._settling: dict[int, set[Front]] = {}  # workers that may still begin to hold such a one
        self._health = Health(live=True, ready=False, reason="loading models")
        self._health_told = 0.0
        self._ending = False
        self._was_ready = False
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why the service must end
        self._tasks: set[asyncio.Task[Any]] = set()
        self._giver = ConnectionGiver(lambda: self.fronts)
        registry.observe = self._tell_change
        registry.info_of = lambda name: self._service.client.models.get(name)
        self._service.models.settle = self._settle
        self._service.cancel_elsewhere = self._cancel
        self._service.cached_elsewhere = self._cached

    @asynccontextmanager
    async def running(self, listener: socket.socket) -> AsyncIterator[None]:
        """Keep the workers running inside the block, with the connections of `listener`, and end them after it."""
        self._giver.start(listener)
        keepers = [asyncio.create_task(self._keep(number)) for number in range(1, self._settings.front_processes + 1)]
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            await self.stop()
            await cancel_all([watch, *keepers, *self._tasks])

    async def wait_ready(self) -> None:
        """Return when every worker serves; raises `EngineDeadError` if one ended before."""
        while len(self.fronts) < self._settings.front_processes or not all(
            front.serving.is_set() for front in self.fronts
        ):
            if self.failed.done():
                raise EngineDeadError(self.failed.result())
            await asyncio.sleep(0.01)
        self._was_ready = True

    async def drain(self) -> None:
        """Have all workers refuse new requests; return when the others have ended, or the time for them is over."""
        self._ending = True
        self._service.begin_drain()
        for front in self.fronts:
            front.send(m.Drain())
        for front in [front for front in self.fronts if front.listening]:  # others have no requests
            await _first(front.drained, front.gone)

    # -- processes

    async def _keep(self, number: int) -> None:
        """Run one worker after another under a number, until the hub ends."""
        limit, faults = FaultLimit(_MAX_FAULTS, _FAULT_SECONDS), 0
        while not self._ending:
            began = time.monotonic()
            try:
                how = await self._run(Front(number, self._table.descriptor))
            except OSError as error:  # no descriptors or memory for a process
                how = f"before it began: {error.strerror}"
            if self._ending:
                return
            logger.error("front process %d ended %s", number, how)
            if not self._was_ready:
                self._fail(f"front process {number} ended {how}")
                return
            faults = 0 if time.monotonic() - began > 60.0 else faults + 1
            pause = _PAUSES[min(faults, len(_PAUSES) - 1)]
            if limit.record_fault():
                pause = _FAULT_SECONDS
                logger.error("front process %d is left alone for %.0f s: it ended too often", number, pause)
                if not self.fronts:
                    self._fail("no front process stays alive")
            await asyncio.sleep(pause)

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)

    async def _run(self, front: Front) -> str:
        """Follow a worker until it ends; return how."""
        self.fronts.append(front)
        try:
            columns = self._settings.front_processes + 1
            await front.connect(m.Hello(self._config, front.number, columns, self._secret), self._relay)
            front.health(self._health)
            for change in self._registry.changes():
                front.send(change)
            front.send(m.AllSent())
            if self._ending:  # a drain could not tell it before
                front.send(m.Drain())
            assert front.link is not None
            async for message in front.link.receive():
                self._receive(front, message)
        except Exception as error:
            log_unexpected(error)
        finally:
            front.process.kill()  # it has closed its link, if it has not ended
            self._let_go(front)
        how = await front.wait()
        self._table.clear(front.number)
        return how

    def _let_go(self, front: Front) -> None:
        """Take back all that a worker had, but for its counts, which it may still be changing."""
        self.fronts.remove(front)
        if front.client is not None:
            self._count_lost(self._relay.leave(front.client))
        for hold in front.holds.values():
            hold.cancel()
        front.let_go()
        for adoption in list(self._settling):
            self._note_settled(front, adoption)

    def _count_lost(self, requests: Sequence[RelayedRequest]) -> None:
        """Count what a worker had accepted and will not report as ended; parts of one HTTP request are one."""
        lost = {(public_id(one.request_id), one.model, one.generates) for one in requests}
        for _, model, generates in lost:
            self._service.metrics.lost(model, Task.GENERATE if generates else Task.ENCODE)

    async def stop(self) -> None:
        """Accept no more connections, and end all workers, which finish the replies that they send. Idempotent."""
        self._ending = True
        self._giver.stop()
        fronts = list(self.fronts)
        for front in fronts:
            front.send(m.Stop())
            if not front.listening:  # it has no request, and would import for seconds before it read that
                front.process.kill()
        try:
            async with asyncio.timeout(_EXIT_SECONDS):
                for front in fronts:
                    await front.gone.wait()
        except TimeoutError:
            for front in fronts:
                if not front.gone.is_set():
                    front.kill("does not end")

    async def _watch(self) -> None:
        """Tell the workers of the engine's health, and end a worker that gives no sign of life."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_WATCH_SECONDS)
            late = max(
                0.0, time.monotonic() - before - _WATCH_SECONDS
            )  # this process did not run: no silence of theirs
            self._tell_health()
            for front in list(self.fronts):
                front.seen = min(time.monotonic(), front.seen + late)
                allowed = self._settings.stall_timeout_s if front.listening else _START_SECONDS
                if time.monotonic() > front.seen + allowed:
                    front.kill(f"has given no sign for {allowed:g} s")

    def _tell_health(self) -> None:
        """Send the engine's health if it has changed, and each second, as a sign of the hub's life."""
        health, now = self._service.client.health(), time.monotonic()
        if health != self._health or now >= self._health_told + _HEALTH_SECONDS:
            self._health, self._health_told = health, now
            for front in self.fronts:
                front.health(health)

    # -- messages

    def _receive(self, front: Front, message: m.ToHub) -> None:
        front.seen = time.monotonic()
        match message:
            case m.RawWork():
                self._take(front, message)
            case m.Report():
                front.report = message
            case m.HoldModel():
                front.holds[message.ask] = self._spawn(self._hold(front, message))
            case m.GiveUp():
                if message.ask in front.holds:
                    front.holds.pop(message.ask).cancel()
            case m.HttpRequest():
                self._spawn(self._answer(front, message))
            case m.Cancelled():
                self._asked.answer(message.ask, message.count)
            case m.Listening():
                front.listening = True
                self._giver.resume()
            case m.Serving():
                front.serving.set()
                logger.info("front process %d serves", front.number)
            case m.Drained():
                front.drained.set()

    def _take(self, front: Front, work: m.RawWork) -> None:
        for adoption, change in work.held.items():
            front.hold(adoption, self._slot(adoption), change)
        for adoption in work.settled:
            self._note_settled(front, adoption)
        assert front.client is not None
        commands = RelayedCommands(work.generate, work.encode, work.abort)
        self._relay.take(front.client, work.epoch, commands, work.ended)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- models

    def _slot(self, adoption: int) -> Slot:
        """Return who counts the requests that hold a model."""
        if adoption not in self._slots:
            name = self._registry.name_of(adoption)
            slot = self._service.models.get(name)
            if slot is None:
                # A worker says this late that stood still for longer than an unload waits. The engine refuses the
                # requests; here nobody asks how many they are.
                slot = Slot(ModelSpec(name, ""), Origin.REQUEST, False, State.UNLOADED)
            self._slots[adoption] = slot
        return self._slots[adoption]

    def _tell_change(self, change: m.Change) -> None:
        if not isinstance(change, m.Loaded) and change.adoption is not None:
            self._removed[change.name] = change.adoption
            self._settling[change.adoption] = {front for front in self.fronts if front.link is not None}
        for front in self.fronts:
            front.send(change)

    def _note_settled(self, front: Front, adoption: int) -> None:
        waiting = self._settling.get(adoption, set())
        waiting.discard(front)
        if not waiting:
            self._settling.pop(adoption, None)

    async def _settle(self, name: str) -> None:
        """Return once no worker can begin to hold a model that has been removed."""
        adoption, deadline = self._removed.get(name), time.monotonic() + _SETTLE_SECONDS
        while adoption in self._settling and time.monotonic() < deadline:
            await asyncio.sleep(0.002)

    async def _hold(self, front: Front, asked: m.HoldModel) -> None:
        """Load a model if need be, and count a request of the worker that holds it."""
        context = RequestContext(request_id=asked.request_id)
        set_current(context)
        try:
            await self._service.models.hold(asked.name, Task(asked.task), context, asked.deadline)
        except ApiError as error:
            front.send(m.Failed(asked.ask, error_fields(error)))
        except Exception as error:
            log_unexpected(error)
            front.send(m.Failed(asked.ask, error_fields(internal())))
        else:
            adoption = self._registry.adoption(context.model)
            assert adoption is not None
            front.count(adoption, self._slot(adoption), 1)
            front.send(m.Held(asked.ask, context.model, adoption))
        finally:
            front.holds.pop(asked.ask, None)

    # -- requests about the whole service

    async def _answer(self, front: Front, request: m.HttpRequest) -> None:
        try:
            front.send(await answer(self._app, request))
        except Exception as error:
            log_unexpected(error)
            front.send(m.Failed(request.ask, error_fields(internal())))

    async def _cancel(self, request_id: str) -> int:
        """Cancel a request in all workers and return how many ended; raises `TimeoutError`."""
        async with asyncio.timeout(_CANCEL_SECONDS):
            listening = [front for front in self.fronts if front.listening]  # others have no requests
            return sum(await asyncio.gather(*(self._cancel_in(front, request_id) for front in listening)))

    async def _cancel_in(self, front: Front, request_id: str) -> int:
        number, answered = self._asked.begin()
        front.send(m.CancelRequest(number, request_id))
        gone = asyncio.create_task(front.gone.wait())
        try:
            await asyncio.wait((answered, gone), return_when=asyncio.FIRST_COMPLETED)
            return int(answered.result()) if answered.done() else 0
        finally:
            gone.cancel()
            self._asked.give_up(number)

    def _cached(self) -> tuple[int, int]:
        reports = [front.report for front in self.fronts]
        return sum(one.cache_bytes for one in reports), sum(one.cache_entries for one in reports)


async def _first(*events: asyncio.Event) -> None:
    """Return when one of the events is set."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all(tasks)
