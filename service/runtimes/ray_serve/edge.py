"""What a request passes before Ray Serve sees it: Serve installs `middlewares` around its own HTTP servers.

Serve obeys headers that clients have no business to send, takes any request id and adds it to the reply a second time,
and answers some errors in plain text. Behind `EdgeMiddleware` a client cannot tell which runtime it talks to.
"""

from __future__ import annotations

import msgspec
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.core.errors import ApiError, internal, not_found, unavailable
from service.core.request_context import request_id_from

Headers = list[tuple[bytes, bytes]]

_ID = b"x-request-id"
_DROPPED = frozenset({_ID, b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})
_SERVES_OWN = "/-/"  # routes of Ray Serve, which its own health checks read


def middlewares() -> list[Middleware]:
    """What `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names."""
    return [Middleware(EdgeMiddleware)]


class EdgeMiddleware:
    """One checked request id in and out; no header that steers Serve; Serve's errors in the contract's shape."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_SERVES_OWN):
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _ID), None)
        request_id = request_id_from(given.decode("latin-1") if given is not None else None).encode()
        kept = [(name, value) for name, value in scope["headers"] if name not in _DROPPED]
        await self._app({**scope, "headers": [*kept, (_ID, request_id)]}, receive, _Reply(send, request_id))


class _Reply:
    """`send` of one request: replaces an error of Serve's own, and leaves one request id."""

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
        error = _serves_own_error(message["status"], headers)
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
    """A request id that the application chose (from the body, say) wins over the one that came in."""
    chosen = [value for name, value in headers if name.lower() == _ID]
    others = [(name, value) for name, value in headers if name.lower() != _ID]
    return [*others, (_ID, next((value for value in chosen if value != request_id), request_id))]


def _serves_own_error(status: int, headers: Headers) -> ApiError | None:
    """The contract's error for one that Serve answered itself; the application's are JSON."""
    kind = next((value for name, value in headers if name.lower() == b"content-type"), b"")
    if status < 400 or not kind.startswith(b"text/plain"):
        return None
    if status == 404:
        return not_found("there is no such route; /docs lists them")
    if status == 429:
        message = "too many requests at once; try again after the time in Retry-After"
        retry = {"Retry-After": "5"}
        return ApiError(429, message, type="overloaded_error", code="queue_full", headers=retry)
    if status in (502, 503):
        return unavailable("no replica takes requests at the moment", "not_ready")
    if status in (408, 504):
        return ApiError(504, "the deadline passed", type="timeout_error", param="timeout_s", code="deadline")
    return internal()
