"""Bounds the connections that have no request, so that they do not use up the file descriptors of the process.

A connection without a request costs its client nothing. Those whose client has not shown that it may send requests are
closed first, the oldest of them before the others: a client that means to send a request sends it at once.
"""

from __future__ import annotations

import logging
import resource
import time
from typing import Protocol

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
    """Holds the idle connections of a server, the oldest first, and closes those that are too many."""

    def __init__(self, most_unknown: int) -> None:
        """`most_unknown`: of clients that have had no request accepted."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else max(1, soft // _SHARE)
        self._most_unknown = min(most_unknown, self._most)
        self._unknown: dict[Connection, None] = {}
        self._known: dict[Connection, None] = {}
        self._logged = -_LOG_SECONDS

    def add(self, connection: Connection, *, is_known: bool) -> None:
        """Take in a connection, and close the oldest ones that are too many."""
        (self._known if is_known else self._unknown)[connection] = None
        while len(self._unknown) > self._most_unknown:
            self._close_oldest(self._unknown)
        while len(self._unknown) + len(self._known) > self._most:
            self._close_oldest(self._unknown or self._known)

    def remove(self, connection: Connection) -> None:
        """Let go of a connection that has a request or is closed. Idempotent."""
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
