"""Builds the application, which serves the models of an `EngineClient` under uvicorn or Ray Serve.

Its lifespan loads the models and releases the engines. There is no global state, so one process can have several
applications.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.service.batches import routes as batch_routes
from triptych.service.batches.state import Batches
from triptych.service.core.engine_client import EngineClient, ModelReader
from triptych.service.core.errors import log_unexpected
from triptych.service.core.models import Models
from triptych.service.http.bodies import cancel_all
from triptych.service.http.guard import Guard
from triptych.service.http.middleware import Accounts, ContextMiddleware, GuardMiddleware, HeadMiddleware
from triptych.service.http.reply_writing import direct_send
from triptych.service.http.route_table import RouteTable
from triptych.service.http.sites import CorsMiddleware, CrossOrigins, Sites
from triptych.service.http.sse import DIRECT
from triptych.service.lifecycle.fleet import Replicas
from triptych.service.lifecycle.state import Service
from triptych.service.observability.logs import ActivityLog
from triptych.service.observability.metrics import Metrics
from triptych.service.routes import (
    decisions,
    docs,
    encode,
    generate,
    huggingface,
    images,
    llama_cpp,
    messages,
    models,
    ollama,
    openai,
    operations,
    pipelines,
    playground,
    ranking,
    responses,
    text2text,
    tokens,
    usage,
)
from triptych.service.settings.api_keys import KeyRing
from triptych.service.settings.service_settings import ServiceSettings
from triptych.service.speech import routes as audio
from triptych.service.speech.routes import speech_planner

_MODULES = (
    *(generate, encode, openai, responses, messages, ollama, huggingface, ranking, pipelines, text2text, images, audio),
    *(batch_routes, decisions, llama_cpp, tokens, operations, models, usage, playground, docs),
)
TABLE = RouteTable(row for module in _MODULES for row in module.routes.rows)
_PAUSE_SECONDS = 5.0  # before background work that broke begins again


class Application(Starlette):
    """The application: the middleware around the table of routes.

    The server's own `send` is put into the scope, so that the body of a stream bypasses the middleware.
    """

    table = TABLE

    def build_middleware_stack(self) -> ASGIApp:
        """Return the middleware around the table; Starlette's own layers would do nothing for a request."""
        found: ASGIApp = self.table
        for layer, arguments, options in reversed(self.user_middleware):
            found = layer(found, *arguments, **options)
        return found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            scope["app"] = self
            await self.router(scope, receive, send)
            return
        scope[DIRECT] = direct_send(send)
        await super().__call__(scope, receive, send)


async def _go_on(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do background work; what it raises is logged, and it begins again after a pause."""
    while True:
        try:
            await work()
            return
        except Exception as error:  # nothing else would see it: idle models would stay, usage would not be written
            log_unexpected(error)
            await asyncio.sleep(_PAUSE_SECONDS)


def create_app(
    client: EngineClient,
    models: Models,
    settings: ServiceSettings,
    reader: ModelReader | None = None,
    replicas: Replicas | None = None,
) -> Application:
    """Build the application for the `models` that `client` runs; `reader` reads models that are loaded on demand."""
    metrics = Metrics(vllm_names=settings.vllm_metrics, max_loras=settings.models.max_loras)
    service = Service(client, models, settings, metrics, reader, replicas)
    speech = speech_planner(service)
    keys, admins = (ring(settings, metrics.key_file_failed) for ring in (KeyRing.of, KeyRing.of_admins))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            await service.start()
            works = [
                *(ActivityLog(client).report, partial(metrics.update_forever, client), service.look_after_models),
                *(service.tenants.usage.write_forever, service.tenants.quotas.share_forever),
                *(() if batches is None else (batches.runner.run,)),
            ]
            background = [asyncio.create_task(_go_on(work)) for work in works]
            yield
            await cancel_all(background)
        finally:
            if batches is not None:
                await batches.close()
            await asyncio.to_thread(speech.close)
            await service.close()

    accounts = Accounts(metrics, TABLE, service.tenants.metrics)
    origins = CrossOrigins(settings.cors_origins)
    sites = Sites(origins, settings.allowed_hosts if settings.checks_host else None)
    guard = Guard(TABLE, settings.limits, keys, admins, sites)
    app = Application(
        lifespan=lifespan,
        middleware=[
            *([Middleware(CorsMiddleware, origins=origins)] if origins else []),
            Middleware(ContextMiddleware, accounts=accounts, is_closing=lambda: service.is_draining),
            Middleware(GuardMiddleware, guard=guard, limits=settings.limits, quotas=service.tenants.quotas),
            Middleware(HeadMiddleware),
        ],
    )
    batches = Batches.of(app, service, keys)
    app.state.service, app.state.speech, app.state.batches = service, speech, batches
    return app
