"""uvicorn's HTTP protocol with strict framing and with limits on slow, endless and unread connections.

The end of a message follows from its header fields only. Offers to upgrade are ignored, and trailers are not headers.
Invalid input gets an error after the replies to the requests before it; then the connection is closed.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from triptych.service.core.errors import ApiError, headers_too_large, invalid, request_too_slow
from triptych.service.http.connections import LOSS, ConnectionLoss, HalfClosed, IdleConnections
from triptych.service.http.message_head import check_head, read_target
from triptych.service.http.reply_writing import ReplyTransport, last_if_unread, without_chunks
from triptych.service.settings.service_settings import Limits

# Times `max_header_bytes`. Up to here the application refuses headers, with a request id. HAProxy has the same factor.
_HEADER_FACTOR = 4
_DRAIN_FACTOR = 8  # times `max_body_bytes`: bytes that are read and discarded after a reply
# The routes with larger bodies and their limits, as in the table of routes, which a proxy under Ray does not import.
_LARGE_BODIES = {
    "/v1/audio/transcriptions": "max_audio_bytes",
    "/v1/audio/translations": "max_audio_bytes",
    "/pipeline/automatic-speech-recognition": "max_audio_bytes",
    "/v1/files": "max_file_bytes",
}
_MAX_DRAINED = 64  # connections of a server that are drained at a time
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})  # fields that determine where a message ends
_MAX_PIPELINED = 16  # requests of a connection that are read while an earlier one is answered
_PIECE = 1024  # bytes of requests that are parsed between checks of the room for more
_BODY_PIECE = 16_384  # the same within a body
_MAX_BODY_PARTS = 4096  # parts that one turn of the event loop parses: a chunk may have one byte
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: on, 0 seconds


def bounded_protocol(limits: Limits) -> Callable[..., BoundedProtocol]:
    """Return a factory of protocols for one server, for uvicorn's option `http`."""
    return partial(BoundedProtocol, limits, set(), IdleConnections(limits.max_idle_connections))


class _Flow(FlowControl):
    """Flow control that pauses reading while there is unparsed data."""

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()

    def hold(self) -> None:
        self.pause_reading()
        self.is_held = True

    def release(self) -> None:
        self.is_held = False
        self.resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """An HTTP protocol that limits headers in bytes (431) and seconds (408), and closes unread connections.

    A connection whose client reads no byte of a reply for `stream_stall_s` is reset. A body that continues after its
    reply is complete is drained, that is, read and discarded: many clients read the reply only after writing the whole
    body, and closing the connection earlier would reset it and lose the reply (RFC 9112, 9.6). Draining is limited to
    `receive_s`, `_DRAIN_FACTOR` and `_MAX_DRAINED` connections of a server at a time; others are closed at once. If the
    connection is to be closed, its writing side is closed before draining.
    """

    def __init__(
        self,
        limits: Limits,
        drained: set[BoundedProtocol],
        idle: IdleConnections,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Start with a new parser; `drained` (connections being drained) and `idle` are shared by the server."""
        super().__init__(*args, **kwargs)
        self.parser = self._new_parser()
        self._parsing = False
        self._rest = b""  # data to parse later
        self._body_parts = 0  # body parts parsed in this turn
        self._is_replayed = False  # the parser is given a head again, without its offer to upgrade
        self._fault: ApiError | None = None  # of the head that is being parsed
        self._half_closed: HalfClosed | None = None  # once the client has closed its writing side
        self._refusal: ApiError | None = None  # the last reply of the connection
        self._refuses_head = False  # the refused request is a HEAD, whose reply has no body
        self._unstarted: tuple[RequestResponseCycle, ASGI3Application] | None = None  # until parsing ends
        self._newest_reply: ReplyTransport | None = None
        self._drained = drained
        self._idle = idle
        self._is_known = False  # a request was accepted
        self._limits = limits
        self._drain_left = 0  # bytes, while the connection is drained
        self._discards_input = False  # no further request will be read
        self._has_closed_writing = False
        self._max_header_bytes = _HEADER_FACTOR * limits.max_header_bytes
        self._seconds = limits.receive_s
        self._stall_seconds = limits.stream_stall_s
        self._unparsed = 0  # bytes since the last complete headers, part of a body, or message
        self._progressed = False
        self._in_head = False  # a message has begun and its headers are not complete
        self._in_body = False  # headers are complete and the message is not
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes of replies at the last check
        self._unread_timer: asyncio.TimerHandle | None = None
        self._newest = ConnectionLoss()  # of the request that is being received or was received last
        # Requests without a complete reply, the oldest first.
        self._unanswered: deque[tuple[RequestResponseCycle, ConnectionLoss]] = deque()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        self._become_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest = b""
        self._stop_timer()
        self._stop_watching()
        if self._half_closed is not None:
            self._half_closed.stop()
        self._drained.discard(self)
        self._idle.remove(self)
        super().connection_lost(exc)
        for cycle, loss in self._unanswered:
            _abandon(cycle, loss)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection for replies to complete requests: the client may have closed only its writing side."""
        if self._in_body or not self._unanswered or self.transport.is_closing():
            return None
        self._discards_input = True
        if self._refusal is None:
            self.cycle.keep_alive = False
        self._half_closed = HalfClosed(self.transport, self.loop, self._has_begun_reply)
        return True

    def _has_begun_reply(self) -> bool | None:
        cycle, _ = self._unanswered[0]
        return cycle.response_started or (None if cycle.scope["http_version"] == "1.0" else False)

    def data_received(self, data: bytes) -> None:
        if self in self._drained:
            self._drain_left -= len(data)
            if self._drain_left < 0:
                self.transport.close()
                return
        self._take(self._rest + data)

    def _take(self, data: bytes) -> None:
        """Parse data and act on it; the unparsed rest is kept."""
        self._rest = b""
        if self._discards_input or self._refusal is not None:
            return
        if self._newest_reply is not None:
            self._newest_reply.send_head()  # first, because a refusal is written at once
        self._progressed = False
        self._parsing = True
        try:
            self._unset_keepalive_if_required()
            self._parse(data)
        finally:
            self._parsing = False
            self._start_unstarted()
        has_request = self._progressed or self._in_body or bool(self._unanswered)
        if self._rest:
            self._stop_timer()
        elif self._in_head or not (has_request or self.transport.is_closing()):
            self._start_timer()  # for the rest of the head
        self._unparsed = 0 if self._progressed else self._unparsed + len(data) - len(self._rest)
        if self._unparsed > self._max_header_bytes:
            self._refuse(headers_too_large(f"the headers exceed {self._max_header_bytes} bytes"))

    def _parse(self, data: bytes) -> None:
        """Parse data piece by piece until there is no room for more requests, or the turn takes too long."""
        at = self._body_parts = 0
        while at < len(data) and self._refusal is None:
            piece = data[at : at + (_BODY_PIECE if self._in_body else _PIECE)]
            at += len(piece)
            self._feed(piece)
            if at < len(data) and not (self._has_room() and self._body_parts < _MAX_BODY_PARTS):
                self._rest = data[at:]
                self.flow.hold()
                self.loop.call_soon(self._go_on)
                return

    def _go_on(self) -> None:
        """Parse the rest of the data if there is room for more requests; otherwise the end of a reply makes room."""
        if self._rest and not self.transport.is_closing() and self._has_room():
            self.flow.release()
            self._take(self._rest)

    def _feed(self, data: bytes) -> None:
        """Feed the parser, which stops at the end of a head that offers an upgrade."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                data = self._head_without_offer() + data[stop.args[0] :]
            except httptools.HttpParserError:
                fault, self._fault = self._fault, None
                self._refuse(fault or invalid("this is not a valid HTTP request", code="invalid_http"))
                return

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_keep_alive=True)  # a trailer `Connection: close` would end the parser
        return parser

    def _head_without_offer(self) -> bytes:
        """Return a head for a new parser that frames the message like the one that was parsed."""
        self.parser = self._new_parser()
        self._is_replayed = True
        lines = [b"%b: %b\r\n" % field for field in self.headers if field[0] in _FRAMING]
        return b"".join((b"POST / HTTP/1.1\r\n", *lines, b"\r\n"))

    def _should_upgrade(self) -> bool:
        return False

    def on_message_begin(self) -> None:
        if self._is_replayed:
            return
        super().on_message_begin()
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        if not self._is_replayed:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a field after the body is a trailer, not a header
            super().on_header(name, value.rstrip(b" \t"))  # white space after a value is not part of it

    def on_headers_complete(self) -> None:
        if self._is_replayed:
            self._is_replayed = False
            return
        version = self.parser.get_http_version()
        if self.cycle is not None and not self.cycle.keep_alive:
            raise ConnectionError("a request after the last one")
        method = self.parser.get_method()
        try:
            check_head(method, version, self.headers)
            self.url, host = read_target(method, self.url)
        except ApiError as error:
            self._fault, self._refuses_head = error, method == b"HEAD"
            raise
        if host is not None:  # it overrides the field Host (RFC 9112, 3.2.2)
            self.headers[:] = [*(field for field in self.headers if field[0] != b"host"), (b"host", host)]
        if version == "1.0":
            self.expect_100_continue = False
        self._stop_timer()
        self._idle.remove(self)
        self._in_head = False
        self._progressed = self._in_body = True
        self._newest = ConnectionLoss()
        self.scope[LOSS] = self._newest  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self._newest_reply = ReplyTransport(self.transport, self._close, self.loop)
        self.cycle.transport = self._newest_reply  # type: ignore[assignment]
        self._unanswered.append((self.cycle, self._newest))
        if self.pipeline and self._has_room():
            self.flow.resume_reading()  # only reading reveals that a connection was lost

    def _has_room(self) -> bool:
        """Whether more requests may be read while an earlier one is answered."""
        if len(self.pipeline) > _MAX_PIPELINED:
            return False
        return sum(len(cycle.body) for cycle, _ in self.pipeline) <= HIGH_WATER_LIMIT

    def on_body(self, body: bytes) -> None:
        self._progressed = True
        self._body_parts += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # its body follows
        self._stop_timer()
        self._progressed = True
        self._in_body = False
        self._newest.has_whole_request = True
        self._drained.discard(self)
        self.cycle.waiting_for_100_continue = False  # the body is complete; HAProxy loses the reply after a 100
        super().on_message_complete()
        if self._has_room():  # a long body has paused reading, which alone reveals that the client has gone
            self.flow.resume_reading()
        if not self._unanswered:  # its reply came before
            self._become_idle()

    def on_response_complete(self) -> None:
        cycle, loss = self._unanswered.popleft()
        self._is_known |= loss.is_known
        super().on_response_complete()
        if self._refusal is not None and not self._unanswered:
            if isinstance(cycle.transport, ReplyTransport):
                cycle.transport.send_head()
            self._send_refusal(self._refusal)
            return
        if not self._unanswered and not self._in_body and not self.transport.is_closing():
            self._become_idle()
        if self._answered_early():
            self._drain()
        if self._rest:
            self.loop.call_soon(self._go_on)
        if self.transport.get_write_buffer_size():
            self._watch_unread()

    def _become_idle(self) -> None:
        """Wait for the next request until the keep-alive timeout."""
        self._idle.add(self, is_known=self._is_known)
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def close_idle(self) -> None:
        """Close the connection, which has no request."""
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Call the application for a request; during parsing, only afterwards: the request may still be refused."""
        if self._parsing:
            self._unstarted = cycle, app
        else:
            self._start(cycle, app)

    def _start(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = without_chunks(app, cycle)  # type: ignore[arg-type, assignment]
        if cycle.more_body and any(name == b"expect" for name, _ in cycle.scope["headers"]):
            app = last_if_unread(app, cycle)  # type: ignore[arg-type, assignment]
        super()._start_asgi_task(cycle, app)

    def _start_unstarted(self) -> None:
        """Call the application for the request that has just been parsed."""
        if self._unstarted is not None:
            (cycle, app), self._unstarted = self._unstarted, None
            self._start(cycle, app)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._seconds, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self._unparsed and not self._discards_input:
            self._refuse(request_too_slow(self._seconds))
        else:  # an idle connection gets no reply
            self.transport.close()

    def _watch_unread(self) -> None:
        """Start checking that the client reads; for a complete reply, or while writing is paused."""
        self._stop_watching()
        self._unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self._stall_seconds, self._check_unread)

    def _stop_watching(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _check_unread(self) -> None:
        self._unread_timer = None
        unread = self.transport.get_write_buffer_size()
        if not unread or not (self.cycle.response_complete or self.flow.write_paused):
            return  # the client has read everything, or the stream continues
        if unread < self._unread:
            self._watch_unread()
            return
        connection = self.transport.get_extra_info("socket")
        if connection is not None:  # reset the connection: otherwise the kernel keeps megabytes of the send buffer
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()

    def _answered_early(self) -> bool:
        """Whether the reply is complete and the request's body is not."""
        return self._in_body and bool(self.cycle.response_complete)

    def _drain(self) -> None:
        """Start to discard the rest of the body, or close the connection if too many are being drained."""
        if self in self._drained or self.transport.is_closing():
            return
        if len(self._drained) >= _MAX_DRAINED:
            self.transport.close()
            return
        self._drained.add(self)
        self._drain_left = self._most_drained()
        self._start_timer()

    def _most_drained(self) -> int:
        """Return how many bytes are discarded: a whole body on routes with larger ones, under any prefix."""
        path = self.scope["path"] if self._in_body else ""
        large = [getattr(self._limits, limit) for end, limit in _LARGE_BODIES.items() if path.endswith(end)]
        return max((_DRAIN_FACTOR * self._limits.max_body_bytes, *large))

    def _close(self) -> None:
        """Close the connection at the end of a reply."""
        if self._answered_early():
            self._close_writing()
        else:
            self.transport.close()

    def _close_writing(self) -> None:
        """Close the writing side, and close the connection when the client has closed it or the body is drained."""
        self._discards_input = self._has_closed_writing = True
        self._stop_timer()
        self._drain()
        self._rest = b""
        if not self.transport.is_closing():
            self.flow.release()
            self.transport.write_eof()

    def _refuse(self, error: ApiError) -> None:
        """Stop reading, send an error after the replies to the requests before, and close.

        A request with an invalid body gets the error as its reply; if its reply has begun, the connection is closed.
        """
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._in_body:
            if self.cycle.response_started:
                self.transport.close()
                return
            self._in_body = False
            self._refuses_head = self.cycle.scope["method"] == "HEAD"
            self._give_up(self.cycle)
        self._stop_timer()
        self._refusal = error
        if not self._unanswered:
            self._send_refusal(error)

    def _give_up(self, cycle: RequestResponseCycle) -> None:
        """Abandon the newest request: the application will not reply to it."""
        _abandon(*self._unanswered.pop())
        if self._unstarted is not None and self._unstarted[0] is cycle:
            self._unstarted = None
        elif self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()

    def _send_refusal(self, error: ApiError) -> None:
        if self.transport.is_closing() or self._has_closed_writing:
            return
        body = msgspec.json.encode(error.body())
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + (b"" if self._refuses_head else body))
        self._close_writing()


def _abandon(cycle: RequestResponseCycle, loss: ConnectionLoss) -> None:
    """Tell a request that its client has gone."""
    cycle.disconnected = True
    cycle.message_event.set()
    loss.lost()
