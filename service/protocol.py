"""uvicorn's HTTP protocol with bounds on what comes before the application is asked, which uvicorn has none for."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.config import Limits
from service.errors import ApiError, headers_too_large, invalid, request_too_slow

# Times `max_header_bytes`: what is no longer is refused by the application, which names the request. HAProxy's bound.
_MARGIN = 4


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a head, or what follows a body, that never ends, in bytes (431) and in seconds (408), and then closes."""

    def __init__(self, limits: Limits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most = _MARGIN * limits.max_header_bytes
        self._seconds = limits.receive_s
        self._silent = 0  # bytes since the last complete head or message, or piece of a body
        self._progressed = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
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
        self._progressed = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._progressed = True
        super().on_message_complete()

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
        if self._silent:
            self._refuse(request_too_slow(self._seconds))
        else:  # nothing was asked
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer and close; where another answer is under way, that is cut."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        body = msgspec.json.encode(error.body())
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
