"""The idle, lost and half-closed connections of a server."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

from triptych.service.core.errors import client_gone

# -- Lost connections, reported by a callback: a task that waits for the loss would cost 50 us per request.
# `BoundedProtocol` puts a `ConnectionLoss` into the scope of each request. Other servers do not; there the ASGI message
# `http.disconnect` reports the loss.

T = TypeVar("T")

LOSS: Final = "triptych.loss"  # key of a scope's `ConnectionLoss`


class ConnectionLoss:
    """The state of one request's connection, and the work to cancel when it is lost."""

    __slots__ = ("_is_lost", "_working", "has_whole_request", "is_known")

    def __init__(self) -> None:
        self.is_known = False  # the client may send requests
        self.has_whole_request = False  # the next message is available at once
        self._is_lost = False
        self._working: asyncio.Task[Any] | None = None

    def lost(self) -> None:
        """Cancel the work; the protocol calls this at most once."""
        self._is_lost = True
        if self._working is not None:
            self._working.cancel()

    async def cancels(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, run in the current task; raises `ApiError` 499 if the connection is lost."""
        if self._is_lost:
            work.close()
            raise client_gone()
        task = self._working = asyncio.current_task()
        assert task is not None
        try:
            return await work
        except asyncio.CancelledError:
            if not self._is_lost or task.uncancel():  # other code has cancelled it too
                raise
            raise client_gone() from None
        finally:
            self._working = None


# -- Half-closed connections: the client has closed its writing side and waits for replies, or it has gone. Both look
# the same until a write: the system of a client that has gone answers it with a reset. If no reply has begun, an
# interim reply (102) is written, which HTTP/1.1 lets clients skip.

_FIRST_SECONDS = 1.0  # most replies begin earlier
_AFTER_PROBE_SECONDS = 0.2
_PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"
_TCP_CLOSE = 7  # of Linux's tcp_info: the state after a reset


class HalfClosed:
    """A watch, until `stop`, on a connection whose client has closed its writing side."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, has_begun: Callable[[], bool | None]
    ) -> None:
        """Start the watch; `has_begun` returns whether a reply has begun, None if no interim reply can be written."""
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
    """Return whether the client's system has reset the connection; true if that cannot be known."""
    connection = transport.get_extra_info("socket")
    if connection is None or not hasattr(socket, "TCP_INFO"):
        return True
    try:
        state: bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:
        return True
    return state[0] == _TCP_CLOSE


# -- Idle connections, bounded so that they do not use up the process's file descriptors: a connection without a request
# costs its client nothing. Connections of clients without an accepted request are closed first, the oldest before the
# others: a client that wants to send a request sends it at once.

logger = logging.getLogger("triptych.connections")

_SHARE = 2  # idle connections may use 1 / _SHARE of the descriptors
_LOG_SECONDS = 60.0
_MOST_DESCRIPTORS = 1_048_576


class Connection(Protocol):
    def close_idle(self) -> None:
        """Close the connection, which has no request."""


def raise_descriptor_limit() -> None:
    """Raise the soft limit of file descriptors, often 1,024, to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class IdleConnections:
    """The idle connections of a server, the oldest first; surplus ones are closed."""

    def __init__(self, most_unknown: int) -> None:
        """Set the limits; `most_unknown` is that of clients without an accepted request."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else max(1, soft // _SHARE)
        self._most_unknown = min(most_unknown, self._most)
        self._unknown: dict[Connection, None] = {}
        self._known: dict[Connection, None] = {}
        self._logged = -_LOG_SECONDS

    def add(self, connection: Connection, *, is_known: bool) -> None:
        """Add a connection, and close the oldest ones above the limits."""
        (self._known if is_known else self._unknown)[connection] = None
        while len(self._unknown) > self._most_unknown:
            self._close_oldest(self._unknown)
        while len(self._unknown) + len(self._known) > self._most:
            self._close_oldest(self._unknown or self._known)

    def remove(self, connection: Connection) -> None:
        """Remove a connection that has a request or is closed. Idempotent."""
        self._unknown.pop(connection, None)
        self._known.pop(connection, None)

    def __len__(self) -> int:
        return len(self._unknown) + len(self._known)

    def _close_oldest(self, among: dict[Connection, None]) -> None:
        oldest = next(iter(among))
        del among[oldest]
        oldest.close_idle()
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            logger.warning(
                "connections without a request are too many: the oldest are closed (at most %d, and %d of clients "
                "that have had no request accepted: max_idle_connections, and half of ulimit -n)",
                *(self._most, self._most_unknown),
            )
