"""Keeps the number of LoRA adapters in memory below `--max-loras`: the least recently used goes for another one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from triptych.model.errors import ConfigError
from triptych.service.core.errors import listed
from triptych.service.core.models import Model, Models, State

_SECONDS = 1.0  # for which an adapter waits until another one has no requests


class AdapterRoom:
    """Makes room for adapters, one at a time."""

    def __init__(self, models: Models, most: int | None, unload: Callable[[Model, str], asyncio.Task[None]]) -> None:
        """At most `most` adapters are in memory, None: any number; `unload` starts unloading one for a reason."""
        self._models = models
        self._most = most
        self._unload = unload
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def room_for(self, model: Model) -> AsyncIterator[None]:
        """Wait until another adapter may be in memory; none but this one is loaded in the block.

        Raises `ConfigError` if all others are pinned. A model that is no adapter needs no room.
        """
        if self._most is None or model.spec.adapter_of is None:
            yield
            return
        async with self._turn:
            while len(found := self._in_memory()) >= self._most:
                await self._take_one(found)
            yield

    def _in_memory(self) -> list[Model]:
        states = (State.LOADED, State.UNLOADING)
        return [one for one in self._models if one.spec.adapter_of is not None and one.state in states]

    async def _take_one(self, adapters: Sequence[Model]) -> None:
        """Unload the least recently used adapter.

        If requests use all of them for a moment, one takes no new requests, and is unloaded when it has none left.
        """
        going = [one.task for one in adapters if one.state is State.UNLOADING and one.task is not None]
        if going:
            await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
            return
        movable = [one for one in adapters if not one.pinned]
        if not movable:
            names = listed([one.name for one in adapters])
            raise ConfigError(f"max_loras is {self._most}, and as many adapters are pinned: {names}; unload one")
        await _wait_for_one(movable)
        if any(one.state is not State.LOADED for one in movable):
            return  # one goes for another reason
        chosen = min(movable, key=lambda one: (not one.is_evictable, one.used_at))
        if chosen.leaving is None:
            chosen.leaving = asyncio.create_task(self._leave(chosen))
        await asyncio.shield(chosen.leaving)

    async def _leave(self, model: Model) -> None:
        """Unload a loaded model once no request uses it; requests that come meanwhile wait, and load it again."""
        try:
            while model.users and model.state is State.LOADED:
                await model.unused.wait()
            if model.state is State.LOADED:
                await asyncio.shield(self._unload(model, "evicted"))
        finally:
            model.leaving = None


async def _wait_for_one(adapters: Sequence[Model]) -> None:
    """Wait a moment until no request uses one of the adapters."""
    end = time.monotonic() + _SECONDS
    while all(one.users for one in adapters) and (left := end - time.monotonic()) > 0:
        waits = [asyncio.create_task(one.unused.wait()) for one in adapters]
        try:
            await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:  # the load may be given up
            for wait in waits:
                wait.cancel()
