"""Middleware of every request: request id, limits, API key, access log and metrics.

It is plain ASGI, so that streams pass through unchanged. `ContextMiddleware` is the outermost layer; `GuardMiddleware`
refuses requests that are too large or have no valid key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.service.core.errors import ANTHROPIC_PATHS, ApiError, internal, log_unexpected, render, request_too_slow
from triptych.service.core.request_context import (
    IN_PROXY,
    SENDS_ON,
    RequestContext,
    current,
    request_id_from,
    set_current,
)
from triptych.service.http.connections import LOSS, ConnectionLoss
from triptych.service.http.guard import FREE_BYTES, TENANT, BodyRoom, Guard, HeldBody
from triptych.service.http.message_head import all_of, header_of
from triptych.service.http.route_table import RouteTable
from triptych.service.observability.logs import access
from triptych.service.observability.metrics import Metrics
from triptych.service.settings.service_settings import Limits
from triptych.service.tenants.quotas import Quotas
from triptych.service.tenants.tenancy import TenantMetrics


class Accounts:
    """The contexts, counts and access log of requests."""

    def __init__(self, metrics: Metrics, table: RouteTable, tenants: TenantMetrics) -> None:
        self._metrics = metrics
        self._tenants = tenants
        self._table = table

    def context(self, scope: Scope) -> RequestContext:
        """Return a context for a request that is not counted yet."""
        headers = scope["headers"]
        return RequestContext(
            request_id=request_id_from(header_of(headers, b"x-request-id")),
            task=self._table.tasks.get(scope["path"]) if scope["method"] == "POST" else None,
            path=scope["path"],
            proxy_s=scope.get(IN_PROXY),
            scheme=scope.get("scheme", "http"),
            is_background=TENANT in scope,
            traceparent=header_of(headers, b"traceparent") or "",
            tracestate=all_of(headers, b"tracestate"),
        )

    def begin(self, context: RequestContext) -> None:
        """Make `context` the current one, and count the request as received."""
        set_current(context)
        if context.task is not None:
            self._metrics.received(context)

    def end(self, context: RequestContext, scope: Scope) -> None:
        """Count a request as rejected if it was not accepted, log it, and release what it holds."""
        if context.not_begun and SENDS_ON in scope and self._metrics.is_ready_elsewhere():
            context.rejection, context.status = "sent_on", scope[SENDS_ON]  # no client sees it
        if context.task is not None and not context.accepted:
            self._metrics.rejected(context, context.rejection or "client_closed")
            self._tenants.rejected(context)
        if context.task is not None and context.proxy_s is not None:
            self._metrics.proxied(context.model, context.proxy_s)
        self._metrics.replied(self._table.path_of(scope["path"]), scope["method"], context.status)
        access(context, scope["method"], scope["path"])
        context.begin_reply()
        context.end()


def request_id_headers(context: RequestContext) -> list[tuple[bytes, bytes]]:
    """Return the reply headers with the request id."""
    request_id = context.request_id.encode("latin-1")
    headers = [(b"x-request-id", request_id)]
    if context.path in ANTHROPIC_PATHS:
        headers.append((b"request-id", request_id))  # the header that this API's client reads
    return headers


class ContextMiddleware:
    """The layer that creates the request's context, counts the request once, and replies to unexpected errors."""

    def __init__(self, app: ASGIApp, accounts: Accounts, is_closing: Callable[[], bool]) -> None:
        """Wrap `app`; `is_closing` returns whether each reply is the last one of its connection."""
        self._app = app
        self._accounts = accounts
        self._is_closing = is_closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = self._accounts.context(scope)
        self._accounts.begin(context)
        try:
            await self._serve(context, scope, receive, send)
        finally:
            self._accounts.end(context, scope)

    async def _serve(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                context.begin_reply()
                message["headers"] = [*message["headers"], *request_id_headers(context)]
                for made in context.headers:
                    message["headers"] += made()
                if self._is_closing():
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            await self._app(scope, receive, tagged)
        except Exception as error:
            log_unexpected(error)
            if context.status:  # too late for an error reply: the server closes the connection
                raise RuntimeError("the reply broke off") from None
            await render(internal())(scope, receive, tagged)


class GuardMiddleware:
    """The layer that refuses large headers (431), missing or wrong keys (401, 403), large or slow bodies (413, 408).

    It refuses requests above their keys' quotas, and a body that grows while all together exceed their limit (429).
    """

    def __init__(self, app: ASGIApp, guard: Guard, limits: Limits, quotas: Quotas) -> None:
        self._app = app
        self._guard = guard
        self._quotas = quotas
        self._limits = limits
        self._room = BodyRoom(limits.max_held_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._guard.prove_key(scope)
            self._guard.check(scope)
            context = current()
            if context is not None and context.task is not None:
                await self._quotas.enter(context)
        except ApiError as error:
            await render(error)(scope, receive, send)
            return
        loss: ConnectionLoss | None = scope.get(LOSS)
        if loss is not None and self._guard.knows(scope):
            loss.is_known = True
        await self._app(scope, self._counted(scope, receive, loss), send)

    def _counted(self, scope: Scope, receive: Receive, loss: ConnectionLoss | None) -> Receive:
        """Wrap `receive` to raise a 413 for a body that is too large, and a 408 for one that is too slow."""
        deadline, most = asyncio.get_running_loop().time() + self._limits.receive_s, self._guard.max_body_bytes(scope)
        rate = self._guard.least_rate(scope)
        seen = 0
        complete = False
        held = None

        async def counted() -> Message:
            nonlocal seen, complete, held
            if complete:
                return await receive()
            if loss is not None and loss.has_whole_request:
                message = await receive()
            else:
                message = await self._in_time(receive, deadline + seen / rate)
            complete = not message.get("more_body", False)
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > most:
                    raise self._guard.body_too_large(scope)
                if seen > FREE_BYTES and self._guard.counts_body(scope):
                    held = held or self._enter()
                    held.hold(seen)
            return message

        return counted

    def _enter(self) -> HeldBody:
        """Return the count of a new body, which is released when its reply begins."""
        held, context = self._room.enter(), current()
        assert context is not None
        context.on_reply.append(held.release)
        return held

    async def _in_time(self, receive: Receive, deadline: float) -> Message:
        try:
            async with asyncio.timeout_at(deadline):
                return await receive()
        except TimeoutError:
            raise request_too_slow(self._limits.receive_s) from None


# -- HEAD, which is answered like GET without the body (RFC 9110, 9.3.2).


class HeadMiddleware:
    """The layer that answers HEAD; it is the innermost, so that requests are counted and logged as HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, without_body)
