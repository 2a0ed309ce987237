"""A batch of writes to the connections of several streams, one after the other.

A write that wakes a reader on the same machine costs more than twice as much as one while readers are awake. So the
writes of all streams of one callback are collected, and then made one after the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

Write = Callable[[bytes], None]

logger = logging.getLogger(__name__)


class WriteBatch:
    """Writes of one event loop, collected until its due callbacks have run."""

    def __init__(self) -> None:
        self._writes: list[tuple[Write, bytes]] = []

    def add(self, write: Write, data: bytes) -> None:
        """Call `write(data)` soon, in the order of the calls; what it raises is logged."""
        if not self._writes:
            asyncio.get_running_loop().call_soon(self._flush)
        self._writes.append((write, data))

    def _flush(self) -> None:
        writes, self._writes = self._writes, []
        for write, data in writes:
            try:
                write(data)
            except Exception:  # the other writes are of other streams
                logger.exception("a piece of a stream could not be written")
