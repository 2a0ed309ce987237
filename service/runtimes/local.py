"""How the application is run: what to serve as plain data, the application made of it, and uvicorn around that.

`run` serves until SIGTERM or SIGINT and returns the exit code. The first signal drains: /readyz turns red, new work is
refused, what runs may end within `drain_timeout_s`; the second one ends at once. A SIGTERM that was obeyed in order is
a success; whatever else a signal ends is not. Imports no Ray: that is `service.runtimes.ray_serve.deployment`, chosen
by `ServeConfig.runtime`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import uvicorn
import uvloop
from fastapi import FastAPI

from model.api.messages import ModelSpec
from model.api.stats import ModelInfo
from model.checkpoint.folder import read_checkpoint
from model.client.async_engine import AsyncEngine
from model.client.process_transport import ProcessTransport
from model.errors import ConfigError
from model.text.tokenizer import Tokenizer
from service.app import create_app
from service.core.chat_template import ChatTemplate
from service.core.model_registry import Registry, ServedModel
from service.http.bodies import cancel_all
from service.http.bounded_protocol import bounded_protocol
from service.lifecycle.state import service_of
from service.observability import logs
from service.runtimes.ray_serve.autoscaling_policy import Scaling
from service.settings.service_settings import Limits, ServiceSettings

KEEP_ALIVE_SECONDS = 75  # an idle connection is kept so long
_YOUNG_OBJECTS = 5_000  # that are new before a collection looks at them
_CLOSE_SECONDS = 5  # what is still being answered after the drain gets so long


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What is served and how; plain data, which travels to Ray's replicas as it is."""

    models: tuple[ModelSpec, ...]
    settings: ServiceSettings = field(default_factory=ServiceSettings)
    runtime: Literal["ray", "local"] = "ray"
    scaling: Scaling = field(default_factory=Scaling)
    name: str = "triptych"  # of the application, for Serve
    route: str = "/"  # the paths below which it answers
    groups: tuple[ServeConfig, ...] = ()  # applications beside it, with replicas of their own
    haproxy: bool = True  # under Ray: Serve's HAProxy ingress where its binary is found, else its own proxy

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("there is no model to serve")
        if self.scaling.most > 1 and self.runtime == "local":
            found = self.scaling.most
            raise ConfigError(f"replicas must be 1 with the local runtime, found {found}; use --runtime ray")
        if self.groups and self.runtime == "local":
            raise ConfigError("groups of models need --runtime ray")
        routes = [one.route for one in (self, *self.groups)]
        names = [model.name for one in (self, *self.groups) for model in one.models]
        for what, values in (("groups of models have the route", routes), ("models are named", names)):
            for value in values:
                if values.count(value) > 1:
                    raise ConfigError(f"two {what} {value}")

    @property
    def elsewhere(self) -> dict[str, str]:
        """Models of the other applications, with their routes."""
        return {model.name: group.route for group in self.groups for model in group.models}


@dataclass(frozen=True, slots=True)
class Ready:
    """What there is to tell when the first request can be served."""

    url: str
    ingress: str  # who listens, in words
    models: Mapping[str, ModelInfo]


OnReady = Callable[[Ready], None]


def run(config: ServeConfig, on_ready: OnReady) -> int:
    """Serve until a signal; `exit_code` of it. Raises `ConfigError`, or `EngineDeadError` when loading fails."""
    logs.setup(config.settings.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if config.runtime == "local":
        return uvloop.run(_serve(config, on_ready))
    from service.runtimes.ray_serve import environment

    with environment.prepared(config) as folder:
        from service.runtimes.ray_serve.deployment import run_ray  # reads the environment when it is imported

        return run_ray(config, folder, on_ready)


def exit_code(number: int, *, drained: bool) -> int:
    """0 for a SIGTERM after which the service drained, as supervisors want it; else 128 + the signal's number."""
    return 0 if drained and number == signal.SIGTERM else 128 + number


def build_registry(config: ServeConfig) -> Registry:
    """The models' folders, read but for their weights; raises `ConfigError`."""
    return Registry((_served(spec) for spec in config.models), config.elsewhere)


def build_app(config: ServeConfig) -> FastAPI:
    """The application over engines in a child process, which starts when the application's lifespan does."""
    registry = build_registry(config)
    tokenizers = {model.name: model.tokenizer for model in registry}
    client = AsyncEngine(
        config.models,
        ProcessTransport,
        tokenizers,
        stall_seconds=config.settings.stall_timeout_s,
        max_unread_bytes=config.settings.limits.stream_unread_bytes,
        stream_interval=config.settings.stream_interval_s,
    )
    return create_app(client, registry, config.settings)


def settle() -> None:
    """What is there once the models are loaded stays: no later collection of garbage has to look at it.

    Going through the objects of all libraries took a fifth of this process's time at 64 streams. Tokens under way are
    soon gone by themselves: young objects are looked at less often than Python would.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


@contextmanager
def listening(settings: ServiceSettings) -> Iterator[socket.socket]:
    """A socket bound to the configured address (port 0: a free one); `ConfigError` where that cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    both = settings.host == "::" and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            (settings.host, settings.port), family=family, backlog=2048, dualstack_ipv6=both
        )
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(f"cannot listen on {settings.host} port {settings.port}: {reason}") from None
    with listener:
        yield listener


def base_url(host: str, port: int) -> str:
    """Where a client on this machine finds the service."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _served(spec: ModelSpec) -> ServedModel:
    folder = Path(spec.path)
    return ServedModel(
        spec.name,
        read_checkpoint(folder),
        Tokenizer.from_folder(folder),
        spec.engine,
        ChatTemplate.from_folder(folder),
    )


class _Signals:
    """SIGTERM and SIGINT: the first asks to end, the second insists."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()
        self.number = 0  # of the last one
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._take, number)

    def _take(self, number: signal.Signals) -> None:
        if self.asked.is_set():
            self.insisted.set()
        self.asked.set()
        self.number = number


async def _serve(config: ServeConfig, on_ready: OnReady) -> int:
    """HTTP answers from the start; while the models load it says so."""
    signals = _Signals()
    drained = False
    app = build_app(config)
    lifespan = app.router.lifespan_context(app)
    with listening(config.settings) as listener:
        async with _http(app, listener, config.settings.limits):
            if await _unless(signals.asked, lifespan.__aenter__()):
                try:
                    settle()
                    url = base_url(config.settings.host, listener.getsockname()[1])
                    on_ready(Ready(url, "uvicorn", service_of(app).client.models))
                    await signals.asked.wait()
                    drained = await _unless(signals.insisted, service_of(app).drain())
                finally:
                    await lifespan.__aexit__(None, None, None)
    return exit_code(signals.number, drained=drained)


async def _unless(signalled: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Whether `work` came to its end; once `signalled` is set it is cancelled, and waited for."""
    task, watch = asyncio.create_task(work), asyncio.create_task(signalled.wait())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        await cancel_all((task, watch))


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: `_Signals` has them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def _http(app: FastAPI, listener: socket.socket, limits: Limits) -> AsyncIterator[None]:
    """Serve `app` on `listener` inside the block, without its lifespan."""
    server = _Server(
        uvicorn.Config(
            app,
            http=bounded_protocol(limits),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # the application writes its own
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
    )
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving
