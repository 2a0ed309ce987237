"""Writes replies to the connection: head and body in one write, and the events of a stream."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

# -- The transport of replies, which joins a reply's head with its body, and the end of a reply.

_JOINED_BYTES = 65_536  # largest body that is copied after its head, rather than sent as a second buffer


class ReplyTransport:
    """The transport to which a reply is written; the protocol decides how to close the connection.

    The head of a reply is sent together with the data that follows in the same turn of the event loop, because each
    write is a system call and wakes the client.
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
        """Send the head of the reply if it still waits for data."""
        head, self._head = self._head, None
        if head is not None and not self.is_closing():
            self._transport.write(head)


def without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Wrap an application for an HTTP/1.0 client, which knows no chunks: closing the connection ends a reply's body."""

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

    After a reply before the body, it is unknown whether the body follows: the next bytes may be the next request, of
    another client if a proxy shares the connection. So that reply is the connection's last one (RFC 9110, 10.1.1).
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and cycle.more_body:
                cycle.keep_alive = False
            await send(message)

        await app(scope, receive, closing)

    return call


# -- The body of a stream, written to uvicorn's connection without an ASGI message for each piece. ASGI's `send` is a
# coroutine, so each piece would need a task. uvicorn's `send` only frames the piece and writes it, unless the
# connection's buffer is full; `StreamWriter` does the same in a plain call. The start and the end of a reply are sent
# as ASGI messages through all layers.

# The server's own `send` and its event loop, for applications inside layers of other software.
_outermost: ContextVar[tuple[Send, asyncio.AbstractEventLoop] | None] = ContextVar("outermost_send", default=None)


def set_outermost_send(send: Send) -> None:
    """Record the server's own `send` of the current request, for applications that run in its event loop."""
    _outermost.set((send, asyncio.get_running_loop()))


def direct_send(send: Send) -> Send:
    """Return the server's own `send`, if it is known, else the given one."""
    outermost = _outermost.get()
    known = outermost is not None and outermost[1] is asyncio.get_running_loop()
    return outermost[0] if known and outermost is not None else send


class StreamWriter:
    """A writer of pieces of a reply that has begun, in chunks."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @classmethod
    def of(cls, send: Send) -> StreamWriter | None:
        """Return a writer to the connection of uvicorn's `send`; None for another server, or a reply without chunks."""
        cycle = getattr(send, "__self__", None)
        if not isinstance(cycle, RequestResponseCycle) or cycle.scope["method"] == "HEAD":
            return None
        return cls(cycle) if cycle.response_started and cycle.chunked_encoding else None

    @property
    def paused(self) -> bool:
        """Whether writing should pause because the client reads too slowly."""
        return self._cycle.flow.write_paused

    async def drain(self) -> None:
        """Wait until writing may continue, or the client has gone."""
        await self._cycle.flow.drain()

    def write(self, data: bytes) -> None:
        """Write a piece; do nothing if the client has gone or the reply is complete."""
        cycle = self._cycle
        if not (cycle.disconnected or cycle.response_complete or cycle.transport.is_closing()):
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
