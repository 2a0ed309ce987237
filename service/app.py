"""The factory of the FastAPI application, which serves an `EngineClient` under uvicorn and Ray Serve alike.

Its lifespan loads the models and releases the engines. There is no global state, so one process can have several
applications.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from service.core import errors
from service.core.engine_client import EngineClient, ModelReader
from service.core.models import Models
from service.http.bodies import cancel_all
from service.http.cors import CorsMiddleware, CrossOrigins
from service.http.direct_routes import DirectRoutes, direct_endpoints
from service.http.guard import Guard
from service.http.head_requests import HeadMiddleware
from service.http.immediate_refusal import ImmediateRefusals
from service.http.middleware import Accounts, ContextMiddleware, GuardMiddleware
from service.http.sites import Sites
from service.http.sse import DIRECT
from service.http.stream_writer import direct_send
from service.lifecycle.fleet import Replicas
from service.lifecycle.state import Service
from service.observability.logs import ActivityLog
from service.observability.metrics import Metrics
from service.routes import (
    docs,
    encode,
    generate,
    huggingface,
    images,
    messages,
    models,
    openai,
    operations,
    pipelines,
    playground,
    ranking,
    responses,
    text2text,
    tokens,
)
from service.settings.api_keys import KeyRing, Tenants
from service.settings.service_settings import ServiceSettings
from service.speech import routes as audio
from service.speech.routes import speech_planner

_ROUTES = (
    *(generate, encode, openai, responses, messages, huggingface, ranking, pipelines, text2text, images, audio),
    *(tokens, operations, models, playground),
)
_TASKS = {
    **dict.fromkeys(("/generate", "/generate_stream", "/", "/v1/completions", "/v1/chat/completions"), "generate"),
    **dict.fromkeys(("/v1/responses", "/v1/messages"), "generate"),
    **dict.fromkeys(("/encode", "/embed", "/embed_all", "/embed_sparse", "/similarity", "/predict"), "encode"),
    **dict.fromkeys(("/v1/embeddings", "/v1/embed", "/v2/embed", "/rerank", "/v1/rerank", "/v2/rerank"), "encode"),
    **dict.fromkeys(("/score", "/v1/score", "/classify", "/v1/classify"), "encode"),
    **dict.fromkeys((route.path for route in pipelines.router.routes if isinstance(route, APIRoute)), "encode"),
    "/pipeline/image-classification": "encode",
    **dict.fromkeys((route.path for route in text2text.router.routes if isinstance(route, APIRoute)), "generate"),
    **dict.fromkeys((route.path for route in audio.router.routes if isinstance(route, APIRoute)), "generate"),
}
_DESCRIPTION = (
    "One service for all three forms of the Transformer: decoder-only, encoder-decoder, encoder-only. Errors have "
    "one shape on every route. `X-Request-Id` (1-128 letters, digits and `._:-`) is accepted, or made if missing or "
    "invalid, and returned."
)


class Application(FastAPI):
    """Calls the endpoints of direct routes behind the middleware alone, and all others as FastAPI does.

    The server's own `send` is put into the scope, so that the body of a stream bypasses the middleware.
    """

    _direct_paths: frozenset[str] = frozenset()
    _direct: ASGIApp
    refusals: ImmediateRefusals  # for a server that asks before it calls the application

    def call_directly(self) -> None:
        """Take what can be called directly out of the present routes."""
        endpoints = direct_endpoints(self.router.routes)
        self._direct = DirectRoutes(endpoints)
        for layer, arguments, options in reversed(self.user_middleware):
            self._direct = layer(self._direct, *arguments, **options)
        self._direct_paths = frozenset(endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DIRECT] = direct_send(send)
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._direct_paths:
            scope["app"] = self
            await self._direct(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def create_app(
    client: EngineClient,
    models: Models,
    settings: ServiceSettings,
    reader: ModelReader | None = None,
    tenants: Tenants | None = None,
    replicas: Replicas | None = None,
) -> Application:
    """Return the application for the `models`, which `client` runs; `reader` reads those loaded later.

    `tenants` names the holders of keys; their results and prefixes are kept apart by these names.
    """
    metrics = Metrics(vllm_names=settings.vllm_metrics)
    service = Service(client, models, settings, metrics, reader, replicas)
    speech = speech_planner(service)
    keys, admins = KeyRing.of(settings), KeyRing.of_admins(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await service.start()
            works = (ActivityLog(client).report(), metrics.update_forever(client), service.look_after_models())
            background = [asyncio.create_task(work) for work in works]
            yield
            await cancel_all(background)
        finally:
            await asyncio.to_thread(speech.close)
            await service.close()

    accounts = Accounts(metrics, _TASKS)
    origins = CrossOrigins(settings.cors_origins)
    sites = Sites(origins, settings.allowed_hosts if settings.checks_host else None)
    guard = Guard(settings.limits, keys, admins, tenants or Tenants(), sites)
    app = Application(
        title="triptych",
        version=service.version,
        description=_DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,  # `docs.install` adds this and /docs
        middleware=[
            *([Middleware(CorsMiddleware, origins=origins)] if origins else []),
            Middleware(ContextMiddleware, accounts=accounts, is_closing=lambda: service.is_draining),
            Middleware(GuardMiddleware, guard=guard, limits=settings.limits),
            Middleware(HeadMiddleware),
        ],
    )
    app.state.service, app.state.speech = service, speech
    errors.install(app)
    for module in _ROUTES:
        # `include_router` would rebuild all routes, which delays the first request by 40 ms.
        app.router.routes.extend(module.router.routes)
    docs.install(app, with_keys=settings.asks_for_key)
    app.call_directly()
    app.refusals = ImmediateRefusals(service, accounts, guard, origins)
    return app
