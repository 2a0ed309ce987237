"""Requests about the whole service, which reach any worker and are answered by the hub.

A worker checks keys, headers and bodies, and writes the access log; the hub runs the route.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from service.app import Application
from service.core import errors
from service.core.request_context import RequestContext, set_current
from service.http.bodies import context_of_request, whole_body
from service.runtimes.fronts.messages import HttpReply, HttpRequest

_PATHS = frozenset(
    {
        "/info",
        "/metrics",
        "/models",
        "/models/load",
        "/models/unload",
        "/v1/models",
        "/v1/models/{id}",
        "/requests/{id}",
    }
)

Ask = Callable[[HttpRequest], Awaitable[HttpReply]]


def forward_routes(app: Application, ask: Ask) -> None:
    """Make a worker's application have the hub answer the routes that are about the whole service."""

    async def forward(request: Request) -> Response:
        made = HttpRequest(
            ask=0,  # the link numbers it
            request_id=context_of_request().request_id,
            method=request.method,
            path=request.scope["path"],
            query=request.scope["query_string"],
            headers=list(request.scope["headers"]),
            body=await whole_body(request.receive),
        )
        reply = await ask(made)
        response = Response(reply.body, reply.status)
        response.raw_headers = reply.headers
        return response

    found = [route for route in app.router.routes if isinstance(route, APIRoute) and route.path in _PATHS]
    assert {route.path for route in found} == _PATHS
    app.router.routes[:0] = [Route(route.path, forward, methods=list(route.methods or ())) for route in found]
    app.call_directly()


def without_middleware(app: FastAPI) -> FastAPI:
    """Return an application of the same routes and state that checks and logs nothing."""
    bare = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    bare.router.routes = app.router.routes
    bare.state = app.state
    errors.install(bare)
    return bare


async def answer(app: FastAPI, request: HttpRequest) -> HttpReply:
    """Run a worker's request in the hub's application."""
    set_current(RequestContext(request_id=request.request_id, path=request.path))
    reply = HttpReply(request.ask, 500, [], b"")
    body = [request.body]

    async def receive() -> Message:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await asyncio.Event().wait()  # the worker's client may leave; what it asked for goes on
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status, reply.headers = message["status"], list(message["headers"])
        else:
            reply.body += message.get("body", b"")

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
    }
    await app(scope, receive, send)
    return reply
