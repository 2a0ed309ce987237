"""Places for the lines that run at a time; owners who wait for one take turns, however many batches each has."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """A number of places. The next free one is for the owner whose last turn is longest ago."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by owner, the next one first

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        await self._acquire(owner)
        try:
            yield
        finally:
            self._release()

    def resize(self, places: int) -> None:
        """Change the number of places; of fewer, those that are held stay until they are given back."""
        self._places = places
        self._pass_on()

    async def _acquire(self, owner: str) -> None:
        if self._taken < self._places:
            self._taken += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it has the place already
                self._release()
            raise

    def _release(self) -> None:
        self._taken -= 1
        self._pass_on()

    def _pass_on(self) -> None:
        """Give free places to those who wait."""
        while self._taken < self._places and (turn := self._next()) is not None:
            self._taken += 1
            turn.set_result(None)

    def _next(self) -> asyncio.Future[None] | None:
        """Remove and return the next one who waits, or None."""
        for owner in list(self._waiting):
            turns = self._waiting.pop(owner)
            while turns:
                turn = turns.popleft()
                if turn.cancelled():
                    continue
                if turns:
                    self._waiting[owner] = turns  # after the others
                return turn
        return None
