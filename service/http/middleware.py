"""Middleware that every request passes: request id, limits, API key, access log and metrics.

It is plain ASGI, so that streams pass through unchanged. `ContextMiddleware` is the outermost; `GuardMiddleware`
refuses requests that are too large or have no valid key. The path that is checked is the one that is routed
(`scope["path"]`), never one built from headers.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.core.errors import (
    ANTHROPIC_PATHS,
    ApiError,
    forbidden,
    headers_too_large,
    internal,
    log_unexpected,
    render,
    request_too_slow,
    too_large,
    unauthorized,
)
from service.core.request_context import RequestContext, current, request_id_from, set_current
from service.http.connection_loss import LOSS, ConnectionLoss
from service.observability.logs import access
from service.observability.metrics import Metrics
from service.settings.api_keys import KeyRing, Tenants
from service.settings.service_settings import Limits

ADMIN_PATHS = frozenset({"/models", "/models/load", "/models/unload"})
OPEN_PATHS = frozenset({"/livez", "/readyz"})
_BROWSER = 'Basic realm="triptych", charset="UTF-8"'  # a browser asks for a password: the key


_Headers = Iterable[tuple[bytes, bytes]]


class ContextMiddleware:
    """Creates the request's context, and makes sure that the request gets a reply in one shape and is counted once."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tasks: Mapping[str, str]) -> None:
        self._app = app
        self._metrics = metrics
        self._tasks = tasks  # by path: the task of a POST request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        context = RequestContext(
            request_id=request_id_from(_header(headers, b"x-request-id")),
            task=self._tasks.get(scope["path"]) if scope["method"] == "POST" else None,
            path=scope["path"],
            traceparent=_header(headers, b"traceparent") or "",
        )
        set_current(context)
        if context.task is not None:
            self._metrics.received(context)
        try:
            await self._serve(context, scope, receive, send)
        finally:
            if context.task is not None and not context.accepted:
                self._metrics.rejected(context, context.rejection or "client_closed")
            access(context, scope["method"], scope["path"])
            for release in context.on_end:
                release()

    async def _serve(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                request_id = context.request_id.encode("latin-1")
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                if context.path in ANTHROPIC_PATHS:
                    message["headers"].append((b"request-id", request_id))  # where that API's client looks for it
            await send(message)

        try:
            await self._app(scope, receive, tagged)
        except Exception as error:
            log_unexpected(error)
            if context.status:  # too late for an error reply: the server closes the connection
                raise RuntimeError("the reply broke off") from None
            await render(internal())(scope, receive, tagged)


class GuardMiddleware:
    """Refuses large headers (431), missing and wrong keys (401, 403), and large or slow bodies (413, 408)."""

    def __init__(
        self, app: ASGIApp, limits: Limits, keys: KeyRing | None, admins: KeyRing | None, tenants: Tenants
    ) -> None:
        """`admins`: the keys of the routes for operators, which are off without any."""
        self._app = app
        self._limits = limits
        self._keys = keys
        self._admins = admins
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_headers(scope)
            self._check_key(scope)
            self._check_declared_body(scope)
        except ApiError as error:
            await render(error)(scope, receive, send)
            return
        loss: ConnectionLoss | None = scope.get(LOSS)
        await self._app(scope, self._counted(receive, loss), send)

    def _check_headers(self, scope: Scope) -> None:
        headers = scope["headers"]
        limits = self._limits
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > limits.max_header_fields or size > limits.max_header_bytes:
            message = f"headers exceed {limits.max_header_fields} fields or {limits.max_header_bytes} bytes"
            raise headers_too_large(message)

    def _check_key(self, scope: Scope) -> None:
        headers = scope["headers"]
        if scope["path"] in ADMIN_PATHS and self._admins is not None:
            self._check_admin_key(self._admins, headers)
            return
        if self._keys is not None and scope["path"] not in OPEN_PATHS:
            digest = self._keys.find(_key_in(headers))
            if digest is None:
                page = "text/html" in (_header(headers, b"accept") or "")
                message = "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
                raise unauthorized(message, _BROWSER if page else "Bearer")
            context = current()
            if context is not None:
                context.tenant = self._tenants.name(digest)

    def _check_admin_key(self, admins: KeyRing, headers: _Headers) -> None:
        """Raise a 401 without an admin key, a 403 with a key that is only an API key."""
        key = _key_in(headers)
        if admins.find(key) is not None:
            return
        if self._keys is not None and self._keys.find(key) is not None:
            raise forbidden("this route needs an admin key; this key is an API key", "admin_key_required")
        raise unauthorized("an admin key is needed: Authorization: Bearer KEY, or x-api-key: KEY")

    def _check_declared_body(self, scope: Scope) -> None:
        declared = _header(scope["headers"], b"content-length") or ""
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > self._limits.max_body_bytes):
            raise self._too_large()

    def _counted(self, receive: Receive, loss: ConnectionLoss | None) -> Receive:
        """Wrap `receive`: it raises a 413 for a body that is too large, and a 408 for one that is too slow."""
        limits = self._limits
        deadline = asyncio.get_running_loop().time() + limits.receive_s
        seen = 0
        complete = False

        async def counted() -> Message:
            nonlocal seen, complete
            if complete:
                return await receive()
            if loss is not None and loss.has_whole_request:
                message = await receive()
            else:
                message = await self._in_time(receive, deadline)
            complete = not message.get("more_body", False)
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > limits.max_body_bytes:
                    raise self._too_large()
            return message

        return counted

    async def _in_time(self, receive: Receive, deadline: float) -> Message:
        try:
            async with asyncio.timeout_at(deadline):
                return await receive()
        except TimeoutError:
            raise request_too_slow(self._limits.receive_s) from None

    def _too_large(self) -> ApiError:
        return too_large(f"the body has more than {self._limits.max_body_bytes} bytes")


def _header(headers: _Headers, name: bytes) -> str | None:
    """Return the first header of this name, which is in lower case."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


def _key_in(headers: _Headers) -> bytes:
    """Return the key of a request; empty if there is none."""
    return _authorized_key(_header(headers, b"authorization") or "") or (_header(headers, b"x-api-key") or "").encode(
        "latin-1"
    )


def _authorized_key(authorization: str) -> bytes:
    """Return the key of `Bearer KEY`, or the password of `Basic`, which browsers send; empty if there is none."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""
