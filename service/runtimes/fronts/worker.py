"""A worker: one of several front processes, `python -m service.runtimes.fronts.worker LINK CONNECTIONS COUNTS`.

It serves HTTP as a single front process does, but for what concerns the whole service: the hub owns the engine and the
models, answers for all (`forwarding`), and gives out the connections to the port. The arguments are descriptors. A
worker ends when its hub does.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import uvicorn
import uvloop

from model.api.messages import Commands
from model.client.counts import SharedCounts, SharedTable
from model.client.relayed_engine import RelayedEngine
from model.system.child_process import ignore_signals
from service.app import create_app
from service.core.errors import ApiError, deadline_passed, internal, unavailable
from service.core.model_registry import Registry, Task
from service.core.request_context import RequestContext
from service.http.bodies import cancel_all
from service.lifecycle.state import Service, service_of
from service.observability import logs
from service.runtimes.assembly import tune_garbage_collector
from service.runtimes.fronts import messages as m
from service.runtimes.fronts.forwarding import forward_routes
from service.runtimes.fronts.link import Asked, Link
from service.runtimes.fronts.mirror import RegistryFollower
from service.runtimes.local import http_server
from service.settings.api_keys import Tenants
from service.settings.service_settings import ServiceSettings

_REPORT_SECONDS = 1.0  # between signs of life
_RECEIVED = 64  # connections taken at a time

logger = logging.getLogger("triptych.front")


class HubClient:
    """Gathers what the worker tells the hub in one turn of its event loop, and asks it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._asked = Asked()
        self._work = m.Work(0)
        self._scheduled = False
        self.epoch = 0

    def send(self, message: msgspec.Struct) -> None:
        self._link.send(message)

    def commands(self, commands: Commands) -> None:
        """Send an engine client's requests and aborts, with all that waits to be sent."""
        work = self._next()
        work.generate += commands.generate
        work.encode += commands.encode
        work.abort += commands.abort
        self._flush()

    def ended(self, request_id: str) -> None:
        self._next().ended.append(request_id)

    def settled(self, adoption: int) -> None:
        self._next().settled.append(adoption)

    def held(self, adoption: int, change: int) -> None:
        held = self._next().held
        held[adoption] = held.get(adoption, 0) + change

    async def ask(self, message: m.HoldModel | m.HttpRequest) -> m.Held | m.HttpReply:
        """Return the hub's answer; raises the `ApiError` that it is. Cancelling gives the question up."""
        message.ask, answer = self._asked.begin()
        self._flush()  # the hub reads first what was before
        self._link.send(message)
        try:
            return await answer
        except asyncio.CancelledError:
            self._asked.give_up(message.ask)
            self._link.send(m.GiveUp(message.ask))
            answered = answer.done() and not answer.cancelled() and answer.exception() is None
            if answered and isinstance(answer.result(), m.Held):
                self.held(answer.result().adoption, -1)
            raise

    def answer(self, message: m.Held | m.Failed | m.HttpReply) -> None:
        value = ApiError(**message.error) if isinstance(message, m.Failed) else message
        if not self._asked.answer(message.ask, value) and isinstance(message, m.Held):
            self.held(message.adoption, -1)  # for a request that has gone

    def _next(self) -> m.Work:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)
        return self._work

    def _flush(self) -> None:
        self._scheduled = False
        work, self._work = self._work, m.Work(self.epoch)
        if work.held or work.settled or work.generate or work.encode or work.abort or work.ended:
            work.epoch = self.epoch
            self._link.send(work)


class HubModels:
    """Makes requests hold models that the hub loads and unloads (`service.lifecycle.state.ModelHolder`)."""

    def __init__(self, hub: HubClient, follower: RegistryFollower, registry: Registry) -> None:
        self._hub = hub
        self._follower = follower
        self._registry = registry

    def hold_loaded(self, name: str | None, task: Task, context: RequestContext) -> bool:
        if name is None and not self._follower.applied.is_set():
            return False  # there may be more models than are known here
        if name is not None and self._registry.get(name) is None:
            return False
        use = self._follower.uses.get(self._registry.choose(name, task))
        if use is not None:
            use.hold(context)
        return use is not None

    async def hold(self, name: str | None, task: Task, context: RequestContext, deadline: float) -> None:
        while True:
            answer = await self._hub.ask(m.HoldModel(0, context.request_id, name, task.value, deadline))
            assert isinstance(answer, m.Held)
            context.model = answer.name
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._follower.applied.wait()
            except BaseException as error:
                self._hub.held(answer.adoption, -1)
                raise deadline_passed() if isinstance(error, TimeoutError) else error from None
            use = self._follower.uses.get(answer.name)
            if use is not None and use.adoption == answer.adoption:
                use.hold(context, counted=True)
                return
            self._hub.held(answer.adoption, -1)
            if self._follower.is_unreadable(answer.adoption):
                raise internal(f"model {answer.name} could not be read", "load_failed")


class Worker:
    """Serves the connections that the hub gives, and follows its messages until it goes."""

    def __init__(self, hello: m.Hello, link: Link, connections: socket.socket, counts: int) -> None:
        settings = _share(hello.config.settings)
        table = SharedTable(hello.columns, hello.number, counts)
        rows: dict[str, int] = {}

        def counts_of(model: str) -> SharedCounts:
            return table.counts(rows[model])

        self._hub = HubClient(link)
        self._link = link
        self._settings = settings
        self._connections = connections
        self._accepted = 0
        self._engine = RelayedEngine(
            self._hub.commands,
            self._hub.ended,
            counts_of,
            max_unread_bytes=settings.limits.stream_unread_bytes,
            stream_interval=settings.stream_interval_s,
            stall_seconds=settings.stall_timeout_s,
        )
        registry = Registry((), hello.config.models_elsewhere)
        self._app = create_app(self._engine, registry, settings, tenants=Tenants(hello.secret))
        self._service: Service = service_of(self._app)
        self._follower = RegistryFollower(registry, self._engine, rows, self._hub.held, self._hub.settled)
        self._service.holder = HubModels(self._hub, self._follower, registry)
        self._service.speech_planner.room.counts = table.audio
        forward_routes(self._app, self._forward)
        self._engine_ready = asyncio.Event()
        self._serves = False  # until the models of the start have been read and the engine was ready
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until the hub says so, or has gone."""
        loop = asyncio.get_running_loop()
        lifespan = self._app.router.lifespan_context(self._app)
        async with http_server(self._app, [], self._settings.limits) as server, lifespan:
            works = (self._follower.run(), self._report(server), self._announce())
            background = [asyncio.create_task(work) for work in works]
            await asyncio.sleep(0)  # `_report` observes the server before it has a connection
            loop.add_reader(self._connections.fileno(), self._take_connections, server)
            self._hub.send(m.Listening())
            try:
                await self._follow()
            finally:
                loop.remove_reader(self._connections.fileno())
                await cancel_all([*background, *self._tasks])

    async def _follow(self) -> None:
        async for message in self._link.receive():
            if isinstance(message, m.Stop):
                return
            self._receive(message)
        logger.error("the hub has gone")

    def _receive(self, message: m.ToWorker) -> None:
        match message:
            case m.Outputs():
                self._engine.receive(message.tokens, message.encoded, ())
            case m.AllSent():
                self._follower.all_sent()
            case m.Loaded() | m.Available() | m.Refused() | m.Removed():
                self._follower.receive(message)
            case m.EngineLoaded():
                self._follower.loaded(message.info)
                self._engine.receive((), (), [message.info])
            case m.EngineDropped():
                self._engine.drop(message.name)
                if self._service.embed_cache is not None:
                    self._service.embed_cache.forget(message.name)
            case m.EngineReady():
                self._hub.epoch = message.epoch
                self._engine_ready.set()
                if self._serves:
                    self._engine.ready()
            case m.EngineLost():
                self._engine_ready.clear()
                self._engine.lost(message.reason)
            case m.EngineHealth():
                self._engine.set_health(message.health)
            case m.Held() | m.Failed() | m.HttpReply():
                self._hub.answer(message)
            case m.CancelRequest():
                self._hub.send(m.Cancelled(message.ask, self._service.jobs.cancel(message.request_id)))
            case m.Drain():
                self._start(self._drain())

    async def _announce(self) -> None:
        """Be ready once the models of the start have been read."""
        await self._follower.applied.wait()
        while not self._engine_ready.is_set():  # it may be lost before this runs
            await self._engine_ready.wait()
        self._serves = True
        self._engine.ready()
        tune_garbage_collector()
        self._hub.send(m.Serving())

    async def _drain(self) -> None:
        await self._service.drain()
        self._hub.send(m.Drained())

    async def _forward(self, request: m.HttpRequest) -> m.HttpReply:
        try:
            async with asyncio.timeout(self._settings.limits.request_timeout_s + _REPORT_SECONDS):
                reply = await self._hub.ask(request)
        except TimeoutError:
            raise unavailable("the service did not answer", "not_live") from None
        assert isinstance(reply, m.HttpReply)
        return reply

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- connections

    def _take_connections(self, server: uvicorn.Server) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._connections, 1, _RECEIVED)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # the hub has gone, as the link tells too
            asyncio.get_running_loop().remove_reader(self._connections.fileno())
            return
        self._accepted += 1  # also one that is lost because there is no descriptor for it: the hub counts it
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            connection.setblocking(False)
            self._start(self._serve_connection(server, connection))

    async def _serve_connection(self, server: uvicorn.Server, connection: socket.socket) -> None:
        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = server.config.http_protocol_class(  # type: ignore[call-arg]
                config=server.config, server_state=server.server_state, app_state=server.lifespan.state
            )
            return made

        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        except OSError:  # the client has gone
            connection.close()

    async def _report(self, server: uvicorn.Server) -> None:
        """Tell the hub each second that this process lives, and soon of connections that have been closed."""
        closed = asyncio.Event()
        connections = server.server_state.connections = _Connections(closed)
        while True:
            closed.clear()
            cache = self._service.embed_cache
            used = (0, 0) if cache is None else (cache.store.size, len(cache.store))
            self._hub.send(m.Report(self._accepted, len(connections), *used))
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_SECONDS):
                    await closed.wait()


class _Connections(set[Any]):
    """The open connections of the server, which sets an event when one is closed."""

    def __init__(self, closed: asyncio.Event) -> None:
        super().__init__()
        self._closed = closed

    def discard(self, element: Any) -> None:
        super().discard(element)
        self._closed.set()


def _share(settings: ServiceSettings) -> ServiceSettings:
    """Return the settings of one worker: a part of the memory for results of /encode."""
    return replace(settings, embed_cache_bytes=settings.embed_cache_bytes // settings.front_processes)


async def _serve(link_descriptor: int, connections: int, counts: int) -> None:
    link = await Link.over(socket.socket(fileno=link_descriptor), m.ToWorker)
    hello = await anext(link.receive(), None)
    if hello is None:  # the hub has gone already
        return
    assert isinstance(hello, m.Hello)
    logs.setup(hello.config.settings.log_format, front=hello.number)
    for told_by_others in ("uvicorn", "model.client.model_table"):
        logging.getLogger(told_by_others).setLevel(logging.WARNING)
    inherited = socket.socket(fileno=connections)
    inherited.setblocking(False)
    await Worker(hello, link, inherited, counts).run()


if __name__ == "__main__":
    ignore_signals()
    uvloop.run(_serve(*map(int, sys.argv[1:])))
