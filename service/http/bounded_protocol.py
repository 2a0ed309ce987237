"""uvicorn's HTTP protocol with bounds, which uvicorn has none for, on what comes before the application is asked and
after it has answered.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.core.errors import ApiError, headers_too_large, invalid, request_too_slow
from service.settings.service_settings import Limits

# Times `max_header_bytes`: what is no longer is refused by the application, which names the request. HAProxy's bound.
_MARGIN = 4
_DRAINED_BODIES = 8  # times `max_body_bytes`: so much of one connection is read behind its answer
_MOST_DRAINED = 64  # connections of a server of which that is read at a time
_NO_LINGERING = struct.pack("ii", 1, 0)  # on, for no second


def bounded_protocol(limits: Limits) -> Callable[..., BoundedProtocol]:
    """What makes the protocols of one server, for uvicorn's `http`."""
    return partial(BoundedProtocol, limits, set())


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a head, or what follows a body, that never ends, in bytes (431) and in seconds (408), and then closes.
    A reply of which the client takes no byte for `stream_stall_s` is thrown away with its connection.

    A body that goes on when its answer is complete is drained, that is, read and thrown away: a client may only begin
    to read when it has written all, and closing under its bytes would reset the connection and lose the answer (RFC
    9112, 9.6). It has `receive_s` and `_DRAINED_BODIES` for that, and a server does it for `_MOST_DRAINED` connections
    at a time; the rest is closed at once. Where the connection is to be closed, only its writing side is until then.
    """

    def __init__(self, limits: Limits, drained: set[BoundedProtocol], *args: Any, **kwargs: Any) -> None:
        """`drained`: the connections of the server that are drained."""
        super().__init__(*args, **kwargs)
        self._drained = drained
        self._left = self._most_left = _DRAINED_BODIES * limits.max_body_bytes  # bytes to be read while it is drained
        self._lingers = False  # everything that still comes is thrown away
        self._most = _MARGIN * limits.max_header_bytes
        self._seconds = limits.receive_s
        self._stall_seconds = limits.stream_stall_s
        self._silent = 0  # bytes since the last complete head or message, or piece of a body
        self._progressed = False
        self._head_is_complete = False  # and its message is not
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes of replies, when they were looked at last
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_watching()
        self._drained.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self in self._drained:
            self._left -= len(data)
            if self._left < 0:
                self.transport.close()
                return
        if self._lingers:
            return
        self._progressed = False
        super().data_received(data)
        self._silent = 0 if self._progressed else self._silent + len(data)
        if self._silent > self._most:
            self._refuse(headers_too_large(f"the headers exceed {self._most} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._progressed = self._head_is_complete = True
        super().on_headers_complete()
        self.cycle.transport = _ReplyTransport(self.transport, self._close)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._progressed = True
        self._head_is_complete = False
        self._drained.discard(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._answered_early():
            self._drain()
        if self.transport.get_write_buffer_size():
            self._watch_unread()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread()

    def send_400_response(self, msg: str) -> None:
        self._refuse(invalid("this is not a valid HTTP request", code="invalid_http"))

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._seconds, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self._silent and not self._lingers:
            self._refuse(request_too_slow(self._seconds))
        else:  # nothing was asked
            self.transport.close()

    def _watch_unread(self) -> None:
        """From now on, as nothing is added: the reply is complete, or what makes it waits for the client."""
        self._stop_watching()
        self._unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self._stall_seconds, self._look)

    def _stop_watching(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _look(self) -> None:
        self._unread_timer = None
        unread = self.transport.get_write_buffer_size()
        if not unread or not (self.cycle.response_complete or self.flow.write_paused):
            return  # all was taken, or a stream goes on
        if unread < self._unread:
            self._watch_unread()
            return
        connection = self.transport.get_extra_info("socket")
        if connection is not None:  # reset: the system would go on holding the megabytes that it has taken
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
        self.transport.abort()

    def _answered_early(self) -> bool:
        """Nobody awaits the rest of the message."""
        return self._head_is_complete and bool(self.cycle.response_complete)

    def _drain(self) -> None:
        """Read on for a while, or close where that is done for many."""
        if self in self._drained or self.transport.is_closing():
            return
        if len(self._drained) >= _MOST_DRAINED:
            self.transport.close()
            return
        self._drained.add(self)
        self._left = self._most_left
        self._start_timer()

    def _close(self) -> None:
        """At the end of a reply that closes the connection."""
        if self._answered_early():
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close the writing side, and the other when the client does, or when it was drained."""
        self._lingers = True
        self._stop_timer()
        self._drain()
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.transport.write_eof()

    def _refuse(self, error: ApiError) -> None:
        """Answer and close; where an answer is under way, or was given already, only close."""
        if self.transport.is_closing():
            return
        if self._head_is_complete or (self.cycle is not None and not self.cycle.response_complete):
            self.transport.close()
            return
        body = msgspec.json.encode(error.body())
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)
        self._linger()


class _ReplyTransport:
    """What a reply writes to; its end is the protocol's to make."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close
