"""Loads and unloads models on all replicas of the service. The local runtime has one replica.

`service.runtimes.ray_serve.replicated_fleet` is the implementation for several.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from service.core.engine_client import EngineClient
from service.core.models import Model, Models, State
from service.lifecycle.model_loader import ModelLoader
from service.lifecycle.model_orders import LoadOrder, ModelOrders


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

    async def start(self) -> None:
        """Load what the fleet wants beside the models of the start, which are loaded."""

    def stop(self) -> None:
        """Load and unload nothing more of the fleet's own accord: the service drains."""


class Replicas(Protocol):
    """Reaches the other replicas of the application, in a runtime that has any."""

    def fleet(self, local: LocalFleet) -> Fleet:
        """Return what loads and unloads models on all replicas; `local` does it on this one."""

    async def cancel(self, request_id: str) -> int:
        """Cancel a request on the others, and return how many ended; `TimeoutError`: one may have missed it."""


class LocalFleet:
    """The models of this process alone."""

    def __init__(self, client: EngineClient, models: Models, loader: ModelLoader, orders: ModelOrders) -> None:
        self.models = models
        self.loader = loader
        self._client = client
        self._orders = orders
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Nothing is wanted beside the models of the start."""

    def stop(self) -> None:
        """Nothing is loaded of its own accord."""

    def check(self, order: LoadOrder) -> None:
        """Raise the `ApiError` with which `begin_load` would refuse the order."""
        self._orders.check(order)

    def begin_load(self, order: LoadOrder) -> asyncio.Task[None]:
        work = self._orders.load(order)
        return keep(self._tasks, self._finish_load(order.name, work))

    def begin_unload(self, name: str, drain_s: float | None) -> asyncio.Task[None]:
        work = self.loader.unload(name, drain_s)
        return keep(self._tasks, wait_for(work))

    async def entries(self) -> list[ModelEntry]:
        return merged([self.own_entries()])

    def own_entries(self) -> list[ModelEntry]:
        """Describe the models as this process has them."""
        return [self._entry(model) for model in self.models]

    def _entry(self, model: Model) -> ModelEntry:
        info = self._client.models.get(model.name)
        return ModelEntry(
            name=model.name,
            state=model.state.value,
            reason=model.reason,
            origin=model.origin.value,
            path=model.spec.path,
            pinned=model.pinned,
            form=model.form,
            memory_bytes=0 if info is None else info.memory_bytes,
            load_seconds=0.0 if info is None else round(info.load_seconds, 3),
            requests=model.users,
            idle_s=0.0 if model.users else round(time.monotonic() - model.used_at, 3),
        )

    async def _finish_load(self, name: str, work: asyncio.Task[None] | None) -> None:
        if work is not None:
            await wait_for(work)
        model = self.models.get(name)
        if model is not None and model.error is not None:
            raise model.error


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
