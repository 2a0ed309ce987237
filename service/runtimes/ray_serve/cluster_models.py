"""Models that operators load on all replicas: the set that they want, kept where it survives every replica.

The set lies in the cluster's key-value store, where new and restarted replicas find it: each compares its models with
the set when it starts and every `POLL_SECONDS`. Changes are made under a lock in the same store. A load is tried on the
replica that received it, then on the others, and enters the set when all of them have the model; if one fails, those
that have loaded it unload it again. Models of `--models-dir` are not in the set: each replica loads them when it needs
them. Imports no Ray.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

POLL_SECONDS = 2.0
_HEARTBEAT_SECONDS = 3.0  # between signs of life of the holder of the lock
_STALE_SECONDS = 15.0  # without one, after which the lock is taken from a replica that was killed
_RETRY_SECONDS = 0.2  # between attempts to get the lock

logger = logging.getLogger("triptych.models")


class Store(Protocol):
    """A key-value store of the whole cluster."""

    async def get(self, key: str) -> bytes | None: ...

    async def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        """Store a value; False, and nothing is stored, if there is one already and `overwrite` is false."""

    async def delete(self, key: str) -> None: ...


@dataclass(frozen=True, slots=True)
class WantedModel:
    """A model of the set: a `LoadOrder` of which the path is fixed to one revision."""

    path: str | None  # None: every replica knows the model
    settings: dict[str, str | int | float | bool] = field(default_factory=dict)
    pinned: bool = False


@dataclass(slots=True)
class WantedModels:
    """What operators want beside the models of the start."""

    models: dict[str, WantedModel] = field(default_factory=dict)
    unloaded: list[str] = field(default_factory=list)  # models of the start


class WantedStore:
    """Reads and writes the set, and holds the lock under which it is changed."""

    def __init__(self, store: Store, application: str) -> None:
        self._store = store
        self._set, self._lock = f"{application}/models", f"{application}/models-lock"
        self._seen: tuple[bytes | None, float] = (None, 0.0)  # the lock's value, and since when it has been that

    async def read(self) -> WantedModels:
        stored = await self._store.get(self._set)
        return WantedModels() if stored is None else msgspec.json.decode(stored, type=WantedModels)

    async def change(self, change: Callable[[WantedModels], None]) -> None:
        """Change the set; the caller holds the lock."""
        wanted = await self.read()
        change(wanted)
        await self._store.put(self._set, msgspec.json.encode(wanted))

    async def operation(self) -> str:
        """Return the token of the operation that holds the lock; empty if none does, or its replica is dead."""
        value = await self._store.get(self._lock)
        if value != self._seen[0]:
            self._seen = (value, time.monotonic())
        return "" if value is None or self._is_stale else _token(value)

    @property
    def _is_stale(self) -> bool:
        """Whether the lock has been seen without a sign of life for too long."""
        return self._seen[0] is not None and time.monotonic() - self._seen[1] > _STALE_SECONDS

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[str]:
        """Hold the lock inside the block, which gets the token of the operation. Waits for others to end."""
        token = secrets.token_hex(8)
        while not await self._store.put(self._lock, f"{token} 0".encode(), overwrite=False):
            if not await self.operation() and self._is_stale:
                logger.warning("a replica ended while it loaded or unloaded a model for all: its operation is over")
                await self._store.delete(self._lock)
                continue
            await asyncio.sleep(_RETRY_SECONDS)
        beating = asyncio.create_task(self._beat(token))
        try:
            yield token
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            value = await self._store.get(self._lock)
            if value is not None and _token(value) == token:
                await self._store.delete(self._lock)

    async def _beat(self, token: str) -> None:
        count = 0
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            count += 1
            await self._store.put(self._lock, f"{token} {count}".encode())


def _token(value: bytes) -> str:
    return value.decode().partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Command:
    """What one replica tells the others to do."""

    kind: str  # load, take_back, unload, give_up, entries
    name: str = ""
    token: str = ""  # of the operation
    path: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    pinned: bool = False
    drain_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended on one replica: done, nothing to do, or an error as `ApiError` has it."""

    done: bool = False
    error: dict[str, Any] | None = None
    entries: tuple[Any, ...] = ()
