"""The local runtime with several front processes; with one it is `service.runtimes.local`."""

from __future__ import annotations

import asyncio

import uvloop
from fastapi import FastAPI

from model.client.async_engine import AsyncEngine
from model.client.counts import SharedTable
from model.client.process_transport import ProcessTransport
from model.client.relay import Relay, RelayedEvents
from model.errors import EngineDeadError
from model.system.child_process import ConnectedChild
from service.app import create_app
from service.lifecycle.state import service_of
from service.runtimes.assembly import base_url, exit_code, listening, read_models, tune_garbage_collector, with_folders
from service.runtimes.fronts.hub import Hub
from service.runtimes.fronts.mirror import MirroredRegistry
from service.runtimes.local import Signals, run_unless
from service.runtimes.model_reader import FolderReader
from service.settings.serve_config import OnReady, Ready, ServeConfig


def run_fronts(config: ServeConfig, on_ready: OnReady, engine: ConnectedChild | None = None) -> int:
    """Serve by `front_processes` workers until a signal; as `service.runtimes.local.run_local`."""
    return uvloop.run(_serve(with_folders(config), on_ready, engine))


async def _serve(config: ServeConfig, on_ready: OnReady, engine: ConnectedChild | None) -> int:
    signals = Signals()
    drained, hub_failed = False, ""
    with listening(config.settings) as listener:
        app, hub = _build(config, engine)
        lifespan = app.router.lifespan_context(app)
        async with hub.running(listener):
            if await run_unless(signals.stop, lifespan.__aenter__()):
                try:
                    tune_garbage_collector()
                    if await run_unless(signals.stop, hub.wait_ready()):
                        url = base_url(config.settings.host, listener.getsockname()[1])
                        server = f"uvicorn, {config.settings.front_processes} front processes"
                        on_ready(Ready(url, server, service_of(app).client.models))
                        hub_failed = await _until(signals.stop, hub.failed)
                    drained = not hub_failed and await run_unless(signals.stop_now, hub.drain())
                finally:
                    await hub.stop()
                    await lifespan.__aexit__(None, None, None)
    if hub_failed:
        raise EngineDeadError(hub_failed)
    return exit_code(signals.number, drained=drained)


async def _until(stop: asyncio.Event, failed: asyncio.Future[str]) -> str:
    """Wait for `stop` or `failed`; return the latter's reason, else nothing."""
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
        return failed.result() if failed.done() else ""
    finally:
        stopped.cancel()


def _build(config: ServeConfig, engine: ConnectedChild | None) -> tuple[FastAPI, Hub]:
    """Build the hub and its application, whose lifespan starts the engines. Raises `ConfigError`."""
    settings = config.settings
    started = [engine] if engine is not None else []
    relay, table = Relay(), SharedTable(settings.front_processes + 1, 0)
    registry = MirroredRegistry(
        read_models(config), config.models_elsewhere, table.row_of, pickle=settings.models.engine.pickle
    )
    client = AsyncEngine(
        config.models,
        lambda: relay.transport(ProcessTransport(started.pop() if started else None, RelayedEvents)),
        {model.name: model.tokenizer for model in registry},
        stall_seconds=settings.stall_timeout_s,
        counts=lambda name: table.counts(table.row_of(name)),
    )
    reader = FolderReader(settings.models.max_download, settings.log_format)
    app = create_app(client, registry, settings, reader)
    return app, Hub(config, app, registry, relay, table)
