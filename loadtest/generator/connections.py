"""HTTP/1.1 connections with low CPU cost, so that clients on the server's machine disturb it little.

A connection is an asyncio protocol around httptools, the parser llhttp. Data is parsed and passed on inside the event
loop's callback, so no task wakes up for a piece of a stream, and its arrival time is the time of reading. (With httpx
and h11 a token cost three times as much.) The pool of free connections is a stack: the one used last is the least
likely to have been closed by the server.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httptools
import httpx

HEADERS = {"Content-Type": "application/json", "User-Agent": "triptych-loadtest"}

Sink = Callable[[bytes, float], float]
"""Takes a piece of a body and when it came (`time.monotonic`); answers how many seconds to read nothing more."""


class Connections:
    """Sends bodies to one route of one server."""

    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        self._url = httpx.URL(url)
        headers = {"Host": self._url.netloc.decode("ascii"), **HEADERS}
        headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        lines = [f"POST {self._url.raw_path.decode('ascii')} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        self._head = "\r\n".join(lines).encode("latin-1") + b"\r\nContent-Length: %d\r\n\r\n"
        self._timeout = timeout_s
        self._tls = ssl.create_default_context() if self._url.scheme == "https" else None
        self._free: list[Connection] = []
        self._all: set[Connection] = set()

    @asynccontextmanager
    async def post(self, body: bytes) -> AsyncIterator[Connection]:
        """Yield the connection once the reply's headers have arrived; leaving before the reply's end closes it.

        Raises `httpx.HTTPError`.
        """
        while self._free and self._free[-1].closed:
            self._free.pop()
        connection = self._free.pop() if self._free else await self._new()
        try:
            await connection.ask(self._head % len(body) + body)
            yield connection
        finally:
            if connection.release():
                self._free.append(connection)

    async def aclose(self) -> None:
        for connection in self._all:
            connection.close()

    async def _new(self) -> Connection:
        port = self._url.port or (443 if self._tls else 80)
        host = self._url.raw_host.decode("ascii").strip("[]")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, self._timeout, self._all.discard), host, port, ssl=self._tls
                )
        except TimeoutError:
            raise httpx.ConnectTimeout("no connection in time") from None
        except OSError as error:  # includes TLS errors
            raise httpx.ConnectError(str(error)) from None
        self._all.add(connection)
        return connection


class Connection(asyncio.Protocol):
    """Holds one connection and its current reply: `status`, `headers` (names in lower case), and the body."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, timeout_s: float, on_lost: Callable[[Connection], None]
    ) -> None:
        self._loop = loop
        self._timeout = timeout_s  # without receiving a byte
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None  # reading is paused until then
        self.status = 0
        self.headers: dict[str, str] = {}
        self._reset()

    def _reset(self) -> None:
        self._head: asyncio.Future[None] = self._loop.create_future()
        self._end: asyncio.Future[None] = self._loop.create_future()
        for future in (self._head, self._end):
            future.add_done_callback(_seen)
        self._pieces: list[bytes] = []  # parsed and not yet passed on
        self._early: list[tuple[bytes, float]] = []  # that arrived before there was a sink
        self._sink: Sink | None = None
        self._complete = self._framed = self._lasts = False
        self._heard = self._loop.time()

    # -- methods for the client

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    async def ask(self, request: bytes) -> None:
        """Send the request and wait for the headers of the reply."""
        self._reset()
        if self._transport is None:
            raise httpx.RemoteProtocolError("the server closed the connection")
        self._transport.write(request)
        self._timer = self._loop.call_later(self._timeout, self._watch)
        await self._head

    async def read(self) -> bytes:
        """Return the whole body."""
        pieces: list[bytes] = []

        def keep(piece: bytes, at: float) -> float:
            pieces.append(piece)
            return 0.0

        await self.each(keep)
        return b"".join(pieces)

    async def each(self, sink: Sink) -> None:
        """Pass each piece of the body to `sink` until its end; raises what `sink` raises."""
        self._sink = sink
        early, self._early = self._early, []
        self._take(early)
        await self._end

    def release(self) -> bool:
        """Stop reading the reply; return whether the connection can be reused."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        whole = self._end.done() and not self._end.cancelled() and self._end.exception() is None
        if not whole or not self._lasts:
            self.close()
        return not self.closed

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        at = time.monotonic()
        self._heard = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(httpx.RemoteProtocolError(str(error)))
            return
        pieces, self._pieces = self._pieces, []
        self._take([(piece, at) for piece in pieces])

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_lost(self)
        if error is not None:
            self._fail(httpx.ReadError(str(error)))
        elif self._head.done() and not self._framed:
            self._finish()  # without a length, the body ends with the connection
        else:
            self._fail(httpx.RemoteProtocolError("the server closed the connection before the reply's end"))

    # -- httptools' callbacks

    def on_message_begin(self) -> None:
        self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        self._lasts = self._framed and self._parser.should_keep_alive()
        if self.status >= 200 and not self._head.done():
            self._head.set_result(None)

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._complete = self.status >= 200

    # -- parts

    def _take(self, pieces: list[tuple[bytes, float]]) -> None:
        if self._sink is None:
            self._early += pieces
            return
        pause = 0.0
        for piece, at in pieces:
            if self._end.done():  # no reader is left
                return
            try:
                pause += self._sink(piece, at)
            except Exception as error:
                self._fail(error)
                return
        if pause and self._transport is not None:
            self._transport.pause_reading()
            self._pause = self._loop.call_later(pause, self._resume)
        elif self._complete:
            self._finish()

    def _resume(self) -> None:
        self._pause = None
        self._heard = self._loop.time()
        if self._complete:
            self._finish()
        if self._transport is not None:
            self._transport.resume_reading()

    def _finish(self) -> None:
        if not self._end.done():
            self._end.set_result(None)

    def _watch(self) -> None:
        left = self._heard + self._timeout - self._loop.time()
        if left > 0 or self._pause is not None:
            left = max(left, 0.01)
            self._timer = self._loop.call_later(left, self._watch)
        else:
            self._fail(httpx.ReadTimeout(f"nothing came for {self._timeout:g} s"))

    def _fail(self, error: Exception) -> None:
        for future in (self._head, self._end):
            if not future.done():
                future.set_exception(error)
        self.close()


def _seen(future: asyncio.Future[None]) -> None:
    """Mark a future's error as retrieved, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
