"""Requests that the service sends to its own routes, for work that its clients have left with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from triptych.service.http.bodies import cancel_all
from triptych.service.http.guard import TENANT
from triptych.service.http.message_head import header_of
from triptych.service.http.route_table import JSON
from triptych.service.settings.tenant import Tenant


@dataclass(frozen=True, slots=True)
class InnerReply:
    """A complete reply."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: bytes) -> str:
        return header_of(self.headers, name) or ""

    @property
    def is_json(self) -> bool:
        return self.header(b"content-type").partition(";")[0] == JSON


async def post(app: ASGIApp, path: str, body: bytes, tenant: Tenant, media_type: str = JSON) -> InnerReply:
    """Return the reply of `app` to a request for `tenant`, which runs in the background; cancelling ends the request.

    The request is counted, limited and logged like a client's.
    """
    headers = [(b"content-type", media_type.encode()), (b"content-length", str(len(body)).encode())]
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        TENANT: tenant,
    }
    exchange = _Exchange(body)
    work = asyncio.ensure_future(app(scope, exchange.receive, exchange.send))  # a task has a context of its own
    try:
        await work
    finally:
        await cancel_all([work])
    return InnerReply(exchange.status, exchange.headers, bytes(exchange.reply))


class _Exchange:
    """One request and its reply."""

    def __init__(self, body: bytes) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.reply = bytearray()
        self._body: bytes | None = body

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()  # the sender never disconnects
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
        else:
            self.reply += message.get("body", b"")
