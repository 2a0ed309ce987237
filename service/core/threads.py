"""Threads for work that takes too long for the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


class Threads:
    """A pool of at most `number` threads, which start when they are needed."""

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
