"""Loads and unloads models on all replicas of an application (`triptych.service.lifecycle.fleet.Fleet`). Imports no
Ray.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from triptych.model.checkpoint import hub, hub_names
from triptych.service.core.errors import ApiError, conflict, error_fields, log_unexpected
from triptych.service.core.models import Model, Origin, State
from triptych.service.lifecycle.fleet import LoadOrder, LocalFleet, ModelEntry, keep, merged, wait_for

# -- The set of models that operators want on all replicas. It is in the cluster's key-value store, so it survives every
# replica. Each replica reconciles its models with the set when it starts and every `POLL_SECONDS`. Changes are made
# under a lease in the same store. A model is loaded first on the replica that receives the order, then on the others,
# and is added to the set when all of them have it. If one fails, the replicas that have loaded the model unload it.
# Models of `--models-dir` are not in the set: each replica loads them on demand.

POLL_SECONDS = 2.0
_HEARTBEAT_SECONDS = 3.0  # between two renewals of the lease
_STALE_SECONDS = 15.0  # without a renewal, after which a killed replica loses the lease
_LOCK_SECONDS = 0.2  # between two attempts to get the lease


class Store(Protocol):
    """The key-value store of the cluster."""

    async def get(self, key: str) -> bytes | None: ...

    async def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        """Store a value. If there is one and `overwrite` is false, store nothing and return False."""

    async def delete(self, key: str) -> None: ...


@dataclass(frozen=True, slots=True)
class WantedModel:
    """A model of the set: a `LoadOrder` whose path is fixed to one revision."""

    path: str | None  # None: every replica knows the model
    settings: dict[str, str | int | float | bool] = field(default_factory=dict)
    pinned: bool = False
    adapter_of: str | None = None


@dataclass(slots=True)
class WantedModels:
    """The set: changes that operators have made to the models of the start."""

    models: dict[str, WantedModel] = field(default_factory=dict)  # additional models, by name
    unloaded: list[str] = field(default_factory=list)  # models of the start that are unloaded


class WantedStore:
    """Reads and writes the set, under a lease."""

    def __init__(self, store: Store, application: str) -> None:
        self._store = store
        self._set, self._lock = f"{application}/models", f"{application}/models-lock"
        self._seen: tuple[bytes | None, float] = (None, 0.0)  # the lease's value, and when it was first seen

    async def read(self) -> WantedModels:
        stored = await self._store.get(self._set)
        return WantedModels() if stored is None else msgspec.json.decode(stored, type=WantedModels)

    async def change(self, change: Callable[[WantedModels], None]) -> None:
        """Change the set; the caller holds the lease."""
        wanted = await self.read()
        change(wanted)
        await self._store.put(self._set, msgspec.json.encode(wanted))

    async def operation(self) -> str:
        """Return the token of the operation that holds the lease; empty if there is none, or its replica is dead."""
        value = await self._store.get(self._lock)
        if value != self._seen[0]:
            self._seen = (value, time.monotonic())
        return "" if value is None or self._is_stale else _token(value)

    @property
    def _is_stale(self) -> bool:
        """Whether the lease has not been renewed for too long."""
        return self._seen[0] is not None and time.monotonic() - self._seen[1] > _STALE_SECONDS

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[str]:
        """Wait for the lease, hold it inside the block, and yield the token of the operation."""
        token = secrets.token_hex(8)
        while not await self._store.put(self._lock, f"{token} 0".encode(), overwrite=False):
            if not await self.operation() and self._is_stale:
                logger.warning("a replica ended while it loaded or unloaded a model on all replicas: its lease is over")
                await self._store.delete(self._lock)
                continue
            await asyncio.sleep(_LOCK_SECONDS)
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
            value = await self._store.get(self._lock)
            if value is None or _token(value) != token:  # this process was paused for long, and taken for dead
                return
            await self._store.put(self._lock, f"{token} {count}".encode())


def _token(value: bytes) -> str:
    return value.decode().partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Command:
    """A command from one replica to the others."""

    kind: str  # load, take_back (undo a load), unload, give_up (cancel a load in progress), entries
    name: str = ""
    token: str = ""  # of the operation
    path: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    pinned: bool = False
    drain_s: float | None = None
    adapter_of: str | None = None


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command on one replica."""

    done: bool = False  # False: there was nothing to do
    error: dict[str, Any] | None = None  # fields of an `ApiError`
    entries: tuple[Any, ...] = ()


_RETRY_SECONDS = 30.0  # until a wanted model that could not be loaded is tried again

logger = logging.getLogger("triptych.models")

Broadcast = Callable[[Command], Awaitable[Sequence[CommandResult | None]]]


class ReplicatedFleet:
    """The fleet as one replica runs it: starts operations, follows those of others, and reconciles with the set."""

    def __init__(self, local: LocalFleet, store: WantedStore, others: Broadcast) -> None:
        """`others` sends a command to all other replicas and returns their results, None for one that has ended."""
        self._local = local
        self._models = local.models
        self._store = store
        self._others = others
        self._tasks: set[asyncio.Task[None]] = set()
        self._tentative: dict[str, str] = {}  # names of models that an operation loads, with its token
        self._stopped = False
        self._retry_at: dict[str, float] = {}  # when to try a wanted model again, by `time.monotonic()`

    # -- operators

    async def examine(self, order: LoadOrder) -> None:
        await self._local.examine(order)

    def begin_load(self, order: LoadOrder) -> asyncio.Task[None]:
        self._local.check(order)
        return keep(self._tasks, self._load(order))

    def begin_unload(self, name: str, drain_s: float | None) -> asyncio.Task[None]:
        return keep(self._tasks, self._unload(name, drain_s))

    async def entries(self) -> list[ModelEntry]:
        answers = await self._others(Command("entries"))
        found = merged([self._local.own_entries(), *(answer.entries for answer in answers if answer is not None)])
        missing = answers.count(None)
        if not missing:
            return found
        return [replace(entry, replicas=entry.replicas | {"unknown": missing}) for entry in found]

    async def _load(self, order: LoadOrder) -> None:
        async with self._store.locked() as token:
            had = self._is_loaded(order.name)
            self._tentative[order.name] = token
            try:
                await self._local.begin_load(order)  # if it fails, the other replicas are unchanged
                slot = self._models.get(order.name)
                assert slot is not None
                wanted = self._fixed(order, slot)
                load = Command(
                    *("load", order.name, token, wanted.path, dict(wanted.settings)),
                    pinned=wanted.pinned,
                    adapter_of=wanted.adapter_of,
                )
                answers = await self._others(load)
                failed = [answer.error for answer in answers if answer is not None and answer.error is not None]
                if failed:
                    await self._take_back(order.name, token, here=not had)
                    raise _failure(failed[0], len(failed), len(answers) + 1)
                await self._store.change(lambda all_wanted: _want(all_wanted, order.name, slot, wanted))
            finally:
                self._tentative.pop(order.name, None)

    async def _take_back(self, name: str, token: str, *, here: bool) -> None:
        """Unload the model on the replicas that the operation has loaded it on."""
        if here and self._is_loaded(name):
            await self._local.begin_unload(name, 0.0)
        await self._others(Command("take_back", name, token))

    async def _unload(self, name: str, drain_s: float | None) -> None:
        given_up = [await self._give_up(name), *(await self._others(Command("give_up", name)))]
        if any(answer is not None and answer.done for answer in given_up):
            return
        async with self._store.locked() as token:
            if not any(entry.name == name and _can_go(entry) for entry in await self.entries()):
                raise conflict(f"model {name} is not loaded", "model_not_loaded", "name")
            slot = self._models.get(name)
            from_start = slot is not None and slot.origin is Origin.START
            await self._store.change(lambda wanted: _want_no_more(wanted, name, from_start=from_start))
            command = Command("unload", name, token, drain_s=drain_s)
            await asyncio.gather(self.follow(command), self._others(command))

    # -- the other replicas' operations

    async def follow(self, command: Command) -> CommandResult:
        """Execute a command of another replica."""
        try:
            if command.kind == "entries":
                return CommandResult(True, entries=tuple(self._local.own_entries()))
            if command.kind == "give_up":
                return await self._give_up(command.name)
            if command.kind == "load":
                return await self._follow_load(command)
            if command.kind == "take_back":
                loaded_by_it = self._tentative.pop(command.name, None) == command.token
                if loaded_by_it and self._is_loaded(command.name):
                    await self._local.begin_unload(command.name, 0.0)
                return CommandResult(loaded_by_it)
            await self._local.begin_unload(command.name, command.drain_s)
            return CommandResult(True)
        except ApiError as error:
            return CommandResult(error=error_fields(error))

    async def _follow_load(self, command: Command) -> CommandResult:
        if self._is_loaded(command.name):
            return CommandResult()
        self._tentative[command.name] = command.token
        order = LoadOrder(command.name, command.path, command.settings, command.pinned, command.adapter_of)
        await self._local.begin_load(order)
        return CommandResult(True)

    async def _give_up(self, name: str) -> CommandResult:
        """Cancel a load in progress."""
        slot = self._models.get(name)
        if slot is None or slot.state is not State.LOADING:
            return CommandResult()
        await wait_for(self._local.loader.unload(name, 0.0))
        return CommandResult(True)

    # -- the wanted set

    async def start(self) -> None:
        """Reconcile with the set, now and every `POLL_SECONDS`."""
        self._stopped = False
        await self._try_reconcile()
        keep(self._tasks, self._reconcile_forever())

    def stop(self) -> None:
        self._stopped = True

    async def _reconcile_forever(self) -> None:
        while not self._stopped:
            await asyncio.sleep(POLL_SECONDS)
            await self._try_reconcile()

    async def _try_reconcile(self) -> None:
        try:
            await self.reconcile()
        except Exception as error:  # the store may be unavailable for a while; the next attempt follows soon
            log_unexpected(error)

    async def reconcile(self) -> None:
        """Load the wanted models and unload the others. Skip models that an operation is changing."""
        if self._stopped:
            return
        operation = await self._store.operation()  # read before the set, which then has the results of ended operations
        wanted = await self._store.read()
        for name in [name for name, token in self._tentative.items() if token != operation]:
            del self._tentative[name]
        for slot in self._models:
            if slot.name not in self._tentative and slot.state is State.LOADED and _is_unwanted(slot, wanted):
                logger.info("%s is unloaded: the other replicas do not have it", slot.name)
                await self._local.begin_unload(slot.name, None)
        for name, model in wanted.models.items():
            if name not in self._tentative and time.monotonic() >= self._retry_at.get(name, 0.0):
                await self._load_if_missing(name, model)

    async def _load_if_missing(self, name: str, model: WantedModel) -> None:
        """Load a wanted model, unless it is loaded, or it is not pinned and a request will load it."""
        slot = self._models.get(name)
        absent = slot is None or slot.state in (State.UNLOADED, State.FAILED)
        if not absent and not (model.pinned and slot is not None and slot.state is State.AVAILABLE):
            return
        try:
            await self._local.begin_load(LoadOrder(name, model.path, model.settings, model.pinned, model.adapter_of))
        except ApiError as error:
            self._retry_at[name] = time.monotonic() + _RETRY_SECONDS
            logger.error("%s, which the other replicas have, cannot be loaded here: %s", name, error.message)

    def _is_loaded(self, name: str) -> bool:
        slot = self._models.get(name)
        return slot is not None and slot.state is State.LOADED

    def _fixed(self, order: LoadOrder, slot: Model) -> WantedModel:
        """Return the model to load on the other replicas; a model of the Hub gets the commit that is loaded here."""
        path = slot.given_path
        served = self._models.served(order.name)
        if path is not None and hub_names.is_hub_name(path) and served is not None:
            path = hub.with_commit(path, Path(served.adapter_path) if served.adapter_of else served.checkpoint.path)
        return WantedModel(path, dict(order.settings), slot.pinned, slot.spec.adapter_of)


def _want(wanted: WantedModels, name: str, slot: Model, model: WantedModel) -> None:
    if slot.origin is not Origin.START:  # one of the start whose name it has stays unloaded
        wanted.models[name] = model
    elif name in wanted.unloaded:
        wanted.unloaded.remove(name)


def _want_no_more(wanted: WantedModels, name: str, *, from_start: bool) -> None:
    wanted.models.pop(name, None)
    if from_start and name not in wanted.unloaded:
        wanted.unloaded.append(name)


def _can_go(entry: ModelEntry) -> bool:
    """Return whether a model can be unloaded: a replica has loaded it, or would load it for a request."""
    evicted = State.AVAILABLE in entry.replicas and entry.origin != Origin.MODELS_DIR
    return State.LOADED in entry.replicas or evicted


def _is_unwanted(slot: Model, wanted: WantedModels) -> bool:
    if slot.origin is Origin.START:
        return slot.name in wanted.unloaded
    return slot.origin is Origin.REQUEST and slot.name not in wanted.models


def _failure(fields: dict[str, Any], failed: int, replicas: int) -> ApiError:
    message = f"{failed} of {replicas} replicas failed, and all are as before: {fields['message']}"
    return ApiError(**fields | {"message": message})
