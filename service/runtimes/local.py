"""The local runtime: the application under uvicorn, in this process.

The first SIGTERM or SIGINT drains the service: /readyz answers 503, new requests are refused, and running requests may
continue for `drain_timeout_s`. A second signal stops it at once.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

import uvloop

from triptych.model.system.child_process import ConnectedChild
from triptych.service.http.bodies import cancel_all
from triptych.service.http.connections import raise_descriptor_limit
from triptych.service.lifecycle.state import service_of
from triptych.service.runtimes.assembly import (
    base_url,
    build_app,
    exit_code,
    listening,
    tune_garbage_collector,
    uses_of,
)
from triptych.service.runtimes.http_server import http_server
from triptych.service.settings.serve_config import OnReady, Ready, ServeConfig


def run_local(config: ServeConfig, on_ready: OnReady, engine: ConnectedChild | None = None) -> int:
    """Serve until a signal and return the exit code. Raises `ConfigError`, or `EngineDeadError` if loading fails.

    `engine` is an engine process that has already been started.
    """
    raise_descriptor_limit()
    return uvloop.run(_serve(config, on_ready, engine))


class Signals:
    """Handles SIGTERM and SIGINT: the first sets `stop`, a second sets `stop_now`."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.stop_now = asyncio.Event()
        self.number = 0  # of the last signal
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)

    def _receive(self, number: signal.Signals) -> None:
        if self.stop.is_set():
            self.stop_now.set()
        self.stop.set()
        self.number = number


async def _serve(config: ServeConfig, on_ready: OnReady, engine: ConnectedChild | None) -> int:
    """Serve HTTP until a signal; answer 503 while the models load."""
    signals = Signals()
    drained = False
    app = build_app(config, engine)
    lifespan = app.router.lifespan_context(app)
    with listening(config.settings) as listener:
        async with http_server(app, [listener], config.settings.limits):
            if await run_unless(signals.stop, lifespan.__aenter__()):
                try:
                    tune_garbage_collector()
                    url = base_url(config.settings.host, listener.getsockname()[1])
                    service = service_of(app)
                    uses = uses_of(service.models, url, with_key=config.settings.asks_for_key)
                    on_ready(Ready(url, "uvicorn", service.client.models, uses))
                    await signals.stop.wait()
                    drained = await run_unless(signals.stop_now, service_of(app).drain())
                finally:
                    await lifespan.__aexit__(None, None, None)
    return exit_code(signals.number, drained=drained)


async def run_unless(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Run `work` and return True, or cancel it once `event` is set and return False."""
    task, watch = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        await cancel_all((task, watch))
