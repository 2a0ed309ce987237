"""Writing the body of a stream to uvicorn's connection without an ASGI message for each piece.

ASGI's `send` is a coroutine, so each piece would need a task. uvicorn's does nothing but frame the piece and write it,
unless the connection's buffer is full; `StreamWriter` does the same in a plain call. The start and the end of a reply
are sent as ASGI's messages, through all layers.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

# The `send` of the server itself where layers of others lie between it and the application, and its event loop.
_outermost: ContextVar[tuple[Send, asyncio.AbstractEventLoop] | None] = ContextVar("outermost_send", default=None)


def set_outermost_send(send: Send) -> None:
    """Remember the server's own `send` of the current request, for applications that run in its event loop."""
    _outermost.set((send, asyncio.get_running_loop()))


def direct_send(send: Send) -> Send:
    """Return the server's own `send`, if it is known, else the given one."""
    outermost = _outermost.get()
    known = outermost is not None and outermost[1] is asyncio.get_running_loop()
    return outermost[0] if known and outermost is not None else send


class StreamWriter:
    """Writes pieces of a reply that has begun, in chunks."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @classmethod
    def of(cls, send: Send) -> StreamWriter | None:
        """Return a writer to the connection of `send`, uvicorn's own; None for any other server's, or no chunks."""
        cycle = getattr(send, "__self__", None)
        if not isinstance(cycle, RequestResponseCycle) or cycle.scope["method"] == "HEAD":
            return None
        return cls(cycle) if cycle.response_started and cycle.chunked_encoding else None

    @property
    def paused(self) -> bool:
        """Whether the client has not read so much that nothing more should be written."""
        return self._cycle.flow.write_paused

    async def drain(self) -> None:
        """Wait until more can be written, or the client has gone."""
        await self._cycle.flow.drain()

    def write(self, data: bytes) -> None:
        """Write a piece; nothing if the client has gone, or the reply is complete."""
        cycle = self._cycle
        if not (cycle.disconnected or cycle.response_complete or cycle.transport.is_closing()):
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
