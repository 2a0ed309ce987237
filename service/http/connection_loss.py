"""Tells a request that its connection was lost, by a callback: a task that waits for it would cost 50 us a request.

`BoundedProtocol` puts a `ConnectionLoss` into the scope of each request. Other servers do not; then the ASGI message
`http.disconnect` tells it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from service.core.errors import client_gone

T = TypeVar("T")

LOSS: Final = "triptych.loss"  # key of a scope: its `ConnectionLoss`


class ConnectionLoss:
    """Whether the connection of one request has been lost, and the work to cancel then."""

    __slots__ = ("_is_lost", "_working", "has_whole_request", "is_known")

    def __init__(self) -> None:
        self.is_known = False  # the client may send requests
        self.has_whole_request = False  # then the next message is there at once
        self._is_lost = False
        self._working: asyncio.Task[Any] | None = None

    def lost(self) -> None:
        """Cancel the work; the protocol calls this at most once."""
        self._is_lost = True
        if self._working is not None:
            self._working.cancel()

    async def cancels(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which runs in the current task; `ApiError` 499 if the connection is lost."""
        if self._is_lost:
            work.close()
            raise client_gone()
        task = self._working = asyncio.current_task()
        assert task is not None
        try:
            return await work
        except asyncio.CancelledError:
            if not self._is_lost or task.uncancel():  # somebody else has cancelled it too
                raise
            raise client_gone() from None
        finally:
            self._working = None
