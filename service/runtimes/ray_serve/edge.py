"""Changes to Ray Serve's own HTTP servers, so that both runtimes look the same to clients.

They are `BoundedProtocol`, in place of uvicorn's protocol, and an ASGI middleware. Without the middleware Serve obeys
internal headers that clients send, accepts and repeats any request id, and answers some errors in plain text.
"""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from typing import Any

import msgspec
import uvicorn.config
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.service.core.errors import ApiError, internal, not_found, unavailable
from triptych.service.core.request_context import request_id_from
from triptych.service.http.bounded_protocol import bounded_protocol
from triptych.service.http.connections import LOSS, raise_descriptor_limit
from triptych.service.http.reply_writing import set_outermost_send
from triptych.service.runtimes.ray_serve.environment import EDGE_LIMITS, HA_PROXY
from triptych.service.settings.service_settings import Limits

Headers = list[tuple[bytes, bytes]]

_ID = b"x-request-id"
# Headers by which clients would steer Serve, in the spelling with "-", as it reads some with "_" too. HAProxy has read
# the session before; Serve replies 500 to one that is not UTF-8.
_DROPPED = frozenset(
    {
        *(_ID, b"x-request-timeout-seconds", b"x-request-disconnect-disabled"),
        *(b"serve-multiplexed-model-id", b"x-session-id"),
    }
)
_SERVE_ROUTES = "/-/"  # routes of Ray Serve itself, which its health checks request


def middlewares() -> list[Middleware]:
    """Return the middlewares for Serve; `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names this function.

    Serve calls it in each process with an HTTP server, before the server starts, so the protocol is also set here.
    """
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:protocols"
    return [Middleware(EdgeMiddleware)]


def _limits() -> Limits:
    """Return the limits of connections: the defaults if the cluster was started without this service (KubeRay).

    With HAProxy idle connections are not limited, because HAProxy keeps them open and shares them between clients.
    """
    given = msgspec.json.decode(os.environ.get(EDGE_LIMITS) or "{}", type=dict[str, float])
    whole = {item.name for item in fields(Limits) if item.type == "int"}
    values: dict[str, Any] = {name: int(value) if name in whole else value for name, value in given.items()}
    limits = Limits(**values)
    return replace(limits, max_idle_connections=sys.maxsize) if os.environ.get(HA_PROXY) == "1" else limits


raise_descriptor_limit()  # half of the limit bounds idle connections
protocols = bounded_protocol(_limits())  # for the servers of this process


class EdgeMiddleware:
    """Checks the request id, drops headers that control Serve, and converts Serve's errors to the service's form."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_SERVE_ROUTES):
            await self._app(scope, receive, send)
            return
        set_outermost_send(send)
        given = next((value for name, value in scope["headers"] if name == _ID), None)
        request_id = request_id_from(given.decode("latin-1") if given is not None else None).encode()
        kept = [(name, value) for name, value in scope["headers"] if name.replace(b"_", b"-") not in _DROPPED]
        # The application may run in another process; there `http.disconnect` reports a lost connection.
        passed = {key: value for key, value in scope.items() if key != LOSS}
        await self._app({**passed, "headers": [*kept, (_ID, request_id)]}, receive, _Reply(send, request_id))


class _Reply:
    """Sends one reply: replaces errors of Serve, and keeps one request id header."""

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self._request_id = request_id
        self._replaced = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._start(message)
        elif not self._replaced:
            await self._send(message)

    async def _start(self, message: Message) -> None:
        headers = _with_one_id(message.get("headers", ()), self._request_id)
        error = _error_of_serve(message["status"], headers)
        if error is None:
            await self._send({**message, "headers": headers})
            return
        self._replaced = True
        body = msgspec.json.encode(error.body())
        extra = {**error.headers, "content-type": "application/json", "content-length": str(len(body))}
        headers = [(_ID, self._request_id), *((name.lower().encode(), value.encode()) for name, value in extra.items())]
        await self._send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _with_one_id(headers: Headers, request_id: bytes) -> Headers:
    """Keep one request id header. An id that the application chose, from the body for example, wins."""
    chosen = [value for name, value in headers if name.lower() == _ID]
    others = [(name, value) for name, value in headers if name.lower() != _ID]
    return [*others, (_ID, next((value for value in chosen if value != request_id), request_id))]


def _error_of_serve(status: int, headers: Headers) -> ApiError | None:
    """Return the service's error that replaces an error of Serve itself (which is plain text); else None."""
    kind = next((value for name, value in headers if name.lower() == b"content-type"), b"")
    if status < 400 or not kind.startswith(b"text/plain"):
        return None
    if status == 404:
        return not_found("there is no such route; /docs lists them")
    if status == 429:
        message = "too many requests; try again after the time in Retry-After"
        retry = {"Retry-After": "5"}
        return ApiError(429, message, type="overloaded_error", code="queue_full", headers=retry)
    if status in (502, 503):
        return unavailable("no replica accepts requests at the moment", "not_ready")
    if status in (408, 504):
        return ApiError(504, "the deadline passed", type="timeout_error", param="timeout_s", code="deadline")
    return internal()
