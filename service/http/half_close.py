"""Tells a client that has sent all it will send (a half-closed connection) from one that has gone.

Both send the same end. Only a write tells: the system of a client that has gone answers it with a reset. Where no reply
has begun, an interim reply (102) is written, which HTTP/1.1 lets clients skip.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

_FIRST_SECONDS = 1.0  # most replies are there before
_AFTER_PROBE_SECONDS = 0.2
_PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"
_TCP_CLOSE = 7  # of Linux's tcp_info: the state after a reset


class HalfClosed:
    """Watches a connection whose client has closed its writing side, until `stop`."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, has_begun: Callable[[], bool | None]
    ) -> None:
        """`has_begun`: whether a reply has begun; None where no interim reply can be written."""
        self._transport = transport
        self._loop = loop
        self._has_begun = has_begun
        self._is_probed = False
        self._timer = loop.call_later(_FIRST_SECONDS, self._check)

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        if _is_reset(self._transport):
            self._transport.abort()
            return
        wait = _FIRST_SECONDS
        has_begun = self._has_begun()
        if has_begun is None:
            self._transport.abort()
            return
        if not has_begun and not self._is_probed:
            self._is_probed = True
            self._transport.write(_PROBE)
            wait = _AFTER_PROBE_SECONDS
        self._timer = self._loop.call_later(wait, self._check)


def _is_reset(transport: asyncio.Transport) -> bool:
    """Whether the client's system has reset the connection; true where that cannot be known."""
    connection = transport.get_extra_info("socket")
    if connection is None or not hasattr(socket, "TCP_INFO"):
        return True
    try:
        state: bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:
        return True
    return state[0] == _TCP_CLOSE
