"""Loading and unloading on all replicas of the service, of which the local runtime has one.

`service.runtimes.ray_serve.replicated_models` is the implementation for several.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from service.core.engine_client import EngineClient
from service.lifecycle.model_manager import ModelManager
from service.lifecycle.model_orders import LoadOrder, ModelOrders
from service.lifecycle.model_slots import Slot, State


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """Describes a model to operators, as one replica sees it or all of them together."""

    name: str
    state: str
    reason: str
    origin: str
    path: str
    pinned: bool
    form: str
    memory_bytes: int
    load_seconds: float
    requests: int
    idle_s: float
    replicas: dict[str, int] = field(default_factory=dict)  # by state


class Fleet(Protocol):
    """Does on every replica what an operator asks for."""

    def begin_load(self, order: LoadOrder) -> asyncio.Task[None]:
        """Start loading a model everywhere; raises `ApiError` for what is refused, as the task does if it fails.

        The task goes on if nobody waits for it.
        """

    def begin_unload(self, name: str, drain_s: float | None) -> asyncio.Task[None]:
        """Start unloading a model everywhere, with `drain_s` seconds for its requests; raises as `begin_load` does."""

    async def entries(self) -> list[ModelEntry]:
        """Describe all known models."""


class LocalFleet:
    """The models of this process alone."""

    def __init__(self, client: EngineClient, manager: ModelManager, orders: ModelOrders) -> None:
        self._client = client
        self._manager = manager
        self._orders = orders
        self._tasks: set[asyncio.Task[None]] = set()

    def begin_load(self, order: LoadOrder) -> asyncio.Task[None]:
        work = self._orders.load(order)
        return keep(self._tasks, self._finish_load(order.name, work))

    def begin_unload(self, name: str, drain_s: float | None) -> asyncio.Task[None]:
        work = self._manager.unload(name, drain_s)
        return keep(self._tasks, wait_for(work))

    async def entries(self) -> list[ModelEntry]:
        return merged([self.own_entries()])

    def own_entries(self) -> list[ModelEntry]:
        """Describe the models as this process has them."""
        return [self._entry(slot) for slot in self._manager]

    def _entry(self, slot: Slot) -> ModelEntry:
        info = self._client.models.get(slot.name)
        return ModelEntry(
            name=slot.name,
            state=slot.state.value,
            reason=slot.reason,
            origin=slot.origin.value,
            path=slot.spec.path,
            pinned=slot.pinned,
            form=self._manager.form_of(slot.name),
            memory_bytes=0 if info is None else info.memory_bytes,
            load_seconds=0.0 if info is None else round(info.load_seconds, 3),
            requests=slot.users,
            idle_s=0.0 if slot.users else round(time.monotonic() - slot.used_at, 3),
        )

    async def _finish_load(self, name: str, work: asyncio.Task[None] | None) -> None:
        if work is not None:
            await wait_for(work)
        slot = self._manager.get(name)
        if slot is not None and slot.error is not None:
            raise slot.error


async def wait_for(work: asyncio.Task[None]) -> None:
    """Return when `work` has ended; it goes on if this is cancelled."""
    await asyncio.wait({work})


def keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task that goes on if nobody waits for it; its exception is then not reported."""
    task = asyncio.create_task(work)
    tasks.add(task)

    def ended(done: asyncio.Task[None]) -> None:
        tasks.discard(done)
        if not done.cancelled():
            done.exception()

    task.add_done_callback(ended)
    return task


_ORDER = (State.LOADED, State.UNLOADING, State.LOADING, State.AVAILABLE, State.UNLOADED, State.FAILED)


def merged(replicas: Sequence[Iterable[ModelEntry]]) -> list[ModelEntry]:
    """Describe each model by what the replicas say together.

    It is loading while a replica loads it, and loaded if a replica has it; `replicas` tells how many.
    """
    by_name: dict[str, list[ModelEntry]] = {}
    for entries in replicas:
        for entry in entries:
            by_name.setdefault(entry.name, []).append(entry)
    return [_merge(entries) for entries in by_name.values()]


def _merge(entries: list[ModelEntry]) -> ModelEntry:
    first = min(entries, key=lambda entry: _ORDER.index(State(entry.state)))
    return replace(
        first,
        reason=next((entry.reason for entry in entries if entry.reason), ""),
        requests=sum(entry.requests for entry in entries),
        idle_s=min(entry.idle_s for entry in entries),
        replicas=dict(Counter(entry.state for entry in entries)),
    )
