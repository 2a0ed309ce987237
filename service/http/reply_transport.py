"""What replies are written to: a transport that joins a reply's head with its body, and how a reply ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_JOINED_BYTES = 65_536  # copied after a head, rather than sent as two buffers


class ReplyTransport:
    """Is the transport that a reply writes to; the protocol decides how to close the connection.

    The head of a reply is sent together with what follows it in the same turn of the event loop: each write is a system
    call, and wakes the client.
    """

    def __init__(
        self, transport: asyncio.Transport, close: Callable[[], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._transport = transport
        self._close = close
        self._loop = loop
        self._head: bytes | None = None
        self._has_begun = False
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._head = data
            self._loop.call_soon(self.send_head)
        elif self._head is None:
            self._transport.write(data)
        else:
            head, self._head = self._head, None
            if len(data) > _JOINED_BYTES:
                self._transport.writelines((head, data))
            else:
                self._transport.write(head + data)

    def close(self) -> None:
        self.send_head()
        self._close()

    def send_head(self) -> None:
        """Send the head of the reply if it still waits for what follows."""
        head, self._head = self._head, None
        if head is not None and not self.is_closing():
            self._transport.write(head)


def without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Wrap an application for an HTTP/1.0 client, which knows no chunks: the connection's end ends a reply's body."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def unframed(message: Message) -> None:
            if message["type"] == "http.response.start":
                if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
                    cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
            elif cycle.expected_content_length > sys.maxsize >> 1 and not message.get("more_body", False):
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, unframed)

    return call


def last_if_unread(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Wrap an application for a client that may wait for `100 Continue` before it sends the body.

    A reply before the body leaves open whether the body still comes: the next bytes may be the next request, of another
    client where a proxy shares the connection. So that reply is the last one of the connection (RFC 9110, 10.1.1).
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and cycle.more_body:
                cycle.keep_alive = False
            await send(message)

        await app(scope, receive, closing)

    return call
