"""Answers the requests that a full queue refuses where the server has read them: no task, no layers, one write.

Under overload most requests are refused, and each takes time from those that are served. The reply, its headers, what
is counted and what is logged are those of the application, made by the same functions; whatever is not plainly such a
request is left to the application, with nothing of it counted or logged.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import copy_context

from starlette.types import Scope

from service.core.errors import ApiError, render
from service.http.bodies import JSON
from service.http.cors import CrossOrigins
from service.http.early_refusal import REFUSING, FullQueue, full_queue
from service.http.guard import Guard
from service.http.headers import header_of
from service.http.middleware import Accounts, request_id_headers
from service.lifecycle.state import Service

_Headers = Iterable[tuple[bytes, bytes]]


class ImmediateRefusals:
    """Refuses requests whose body has come whole with their headers."""

    def __init__(self, service: Service, accounts: Accounts, guard: Guard, origins: CrossOrigins) -> None:
        self._service = service
        self._accounts = accounts
        self._guard = guard
        self._origins = origins

    def of(self, scope: Scope, body: bytearray) -> tuple[int, _Headers, bytes] | None:
        """Return status, headers and body of the refusal of an HTTP request; None if the application must answer it.

        The request is counted and logged with that, so the reply must be sent.
        """
        if scope["path"] not in REFUSING or scope["method"] != "POST":
            return None
        if header_of(scope["headers"], b"content-type") != JSON or len(body) > self._service.limits.max_body_bytes:
            return None
        full = full_queue(self._service, body)
        return None if full is None else copy_context().run(self._refusal, scope, full)

    def _refusal(self, scope: Scope, full: FullQueue) -> tuple[int, _Headers, bytes] | None:
        context = self._accounts.context(scope)
        try:
            self._guard.check(scope)
            if not full.takes(self._service, context):
                return None
        except ApiError:
            return None
        self._accounts.begin(context)
        try:
            reply = render(full.refusal)
            context.status = reply.status_code
            headers = [*reply.raw_headers, *request_id_headers(context)]
            headers += self._origins.reply_headers(scope) if self._origins else []
            return reply.status_code, headers, bytes(reply.body)
        finally:
            self._accounts.end(context, scope)
