"""Work that the event loop does not do at once: in threads, or, for writes to several streams, one after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

# -- Threads for work that takes too long for the event loop.

T = TypeVar("T")


class Threads:
    """Runs functions in at most `number` threads, which start when they are needed."""

    def __init__(self, number: int, name: str) -> None:
        self._number = number
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, run in a thread in the caller's context."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._number, thread_name_prefix=self._name)
        return await asyncio.get_running_loop().run_in_executor(self._pool, copy_context().run, work)

    def close(self) -> None:
        """Stop the threads without waiting; a later call starts new ones."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


# -- A batch of writes to the connections of several streams, one after the other. A write that wakes a reader on the
# same machine costs more than twice as much as one while readers are awake, so what streams have to send is collected
# in the callback that makes it, and then written in a row.

Write = Callable[[bytes], None]

logger = logging.getLogger(__name__)


class WriteBatch:
    """Collects writes until the callbacks that are due have run. For one event loop."""

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
            except Exception:  # the others are of other streams
                logger.exception("a piece of a stream could not be written")
