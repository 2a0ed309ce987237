"""Models that come and go while the service runs: loads, unloads, evictions, and requests that wait for them.

One load runs at a time, beside serving; whoever needs the same model waits for the same load. A load goes on when those
who wait for it have gone. Nothing is unloaded for another model before it is known that this makes enough room, and
never a model that a request holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Literal

from model.api.messages import ModelSpec
from model.errors import ConfigError, EngineDeadError, EngineError, MemoryShortageError, ModelNotLoadedError
from service.core.engine_client import EngineClient
from service.core.errors import (
    ApiError,
    conflict,
    deadline_passed,
    internal,
    invalid,
    log_unexpected,
    not_found,
    scrub,
    unavailable,
)
from service.core.model_registry import Registry, ServedModel, Task
from service.core.model_source import ModelReader
from service.core.request_context import RequestContext
from service.lifecycle.model_slots import MAX_FAILED, Origin, Slot, State
from service.observability.metrics import Metrics
from service.settings.service_settings import ServiceSettings

_RETRY_SECONDS = 30.0  # before a model that failed is loaded again for a request
_SHORTAGE_RETRY_SECONDS = 5.0  # the same where memory was short: other models may be idle by then
_MAX_NAMES = 1_000  # of models that were loaded by request: each leaves counters in the metrics

logger = logging.getLogger("triptych.models")


class ModelManager:
    """Loads and unloads the models of one process, for requests that name them and for operators."""

    def __init__(
        self,
        client: EngineClient,
        registry: Registry,
        reader: ModelReader | None,
        settings: ServiceSettings,
        metrics: Metrics,
        version: str,
    ) -> None:
        """Without a `reader` only the models of `registry` are served, and none can be loaded."""
        self._client = client
        self._registry = registry
        self._reader = reader
        self._settings = settings.models
        self._drain_s = settings.drain_timeout_s
        self._max_waiting = settings.limits.max_waiting_for_load
        self._metrics = metrics
        self._version = version
        self._slots: dict[str, Slot] = {}
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._names: set[str] = set()
        self.find_new: Callable[[], Awaitable[None]] | None = None  # called when a request names an unknown model

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._slots.values()))

    def get(self, name: str) -> Slot | None:
        return self._slots.get(name)

    def form_of(self, name: str) -> str:
        """Return the form of a model that requests may name; empty for others."""
        found = self._registry.candidate(name)
        return "" if found is None else found.config.form

    def started(self) -> None:
        """Take over the models that the client has loaded at its start."""
        for served in self._registry:
            path = str(served.checkpoint.path)
            spec = ModelSpec(served.name, path, served.engine)
            self._slots[served.name] = Slot(spec, Origin.START, self._settings.pin, State.LOADED)
            self._announce(served)

    async def close(self) -> None:
        """Give up the loads in progress."""
        tasks = [slot.task for slot in self if slot.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- requests

    def hold_loaded(self, name: str | None, task: Task, context: RequestContext) -> bool:
        """Make the request hold the model that it names if that is loaded, and return whether it is."""
        if name is not None and self._registry.get(name) is None:
            return False
        slot = self._slots.get(self._registry.choose(name, task))
        if slot is None or slot.state is not State.LOADED:
            return False
        slot.hold(context)
        return True

    async def hold(self, name: str | None, task: Task, context: RequestContext, deadline: float) -> None:
        """Make the request hold the model that it names, or the only one for the task, and load it first if need be.

        Waits at most until `deadline`, by `time.monotonic()`. Raises `ApiError`: as `Registry.choose` does, 504 at the
        deadline, 429 where too many requests wait, 503 if the model cannot be loaded.
        """
        while True:
            slot = self._slots[await self._choose(name, task)]
            context.model = slot.name
            if slot.state is State.LOADED:
                slot.hold(context)
                return
            if slot.state is State.FAILED and time.monotonic() < slot.retry_at:
                raise slot.refusal()
            work = slot.task if slot.state in (State.LOADING, State.UNLOADING) else self.begin_load(slot)
            assert work is not None
            await self._wait(work, deadline)
            if slot.state is State.FAILED:
                raise slot.refusal()

    async def _choose(self, name: str | None, task: Task) -> str:
        loading = self._slots.get(name) if name is not None else None
        if loading is not None and loading.state is State.LOADING:
            return loading.name  # whether it can do the task is known later
        try:
            return self._registry.choose(name, task)
        except ApiError as error:
            if error.status != 404 or self.find_new is None:
                raise
        await self.find_new()
        return self._registry.choose(name, task)

    async def _wait(self, work: asyncio.Task[None], deadline: float) -> None:
        """Wait for a load or an unload, which goes on when this wait ends early."""
        if self._waiting >= self._max_waiting:
            raise ApiError(
                429,
                "too many requests wait for models to be loaded; try again after the time in Retry-After",
                type="overloaded_error",
                code="queue_full",
                headers={"Retry-After": "5"},
                reason="model_loading",
            )
        self._waiting += 1
        try:
            done, _ = await asyncio.wait({work}, timeout=max(0.0, deadline - time.monotonic()))
        finally:
            self._waiting -= 1
        if not done:
            raise deadline_passed()

    # -- loading

    def add(self, spec: ModelSpec, origin: Origin, *, pinned: bool) -> Slot:
        """Make a new model known, in place of one of its name that is not loaded; raises a 409 for too many names."""
        if origin is Origin.REQUEST:
            if spec.name not in self._names and len(self._names) >= _MAX_NAMES:
                raise conflict(f"{_MAX_NAMES} names have been used since the start; use one of them", "too_many_names")
            self._names.add(spec.name)
        slot = Slot(spec, origin, pinned, State.AVAILABLE)
        self._slots[spec.name] = slot
        return slot

    def forget(self, slot: Slot) -> None:
        """Remove a model that is not loaded."""
        if self._slots.get(slot.name) is slot:
            del self._slots[slot.name]
            self._registry.remove(slot.name)

    def begin_load(self, slot: Slot) -> asyncio.Task[None]:
        """Start loading a model; the task ends without an exception, and leaves it loaded or failed."""
        slot.state, slot.reason, slot.error = State.LOADING, "", None
        slot.task = asyncio.create_task(self._load(slot))
        return slot.task

    async def _load(self, slot: Slot) -> None:
        began = time.monotonic()
        outcome: Literal["loaded", "failed", "cancelled"] = "failed"
        try:
            async with self._turn, asyncio.timeout(self._settings.load_timeout_s):
                served = await self._load_now(slot)
        except asyncio.CancelledError:
            outcome = "cancelled"
            slot.failed(conflict(f"loading {slot.name} was given up", "load_cancelled"), 0.0)
        except TimeoutError:
            seconds = self._settings.load_timeout_s
            slot.failed(unavailable(f"loading takes longer than load_timeout, {seconds:g} s", "load_failed"), 30.0)
        except MemoryShortageError as error:
            slot.failed(unavailable(self._shortage(error), "model_memory"), _SHORTAGE_RETRY_SECONDS)
        except ConfigError as error:
            slot.failed(invalid(scrub(str(error)), None, "load_failed"), _RETRY_SECONDS)
        except EngineDeadError:
            slot.failed(unavailable("the engine failed meanwhile", "engine_dead"), _SHORTAGE_RETRY_SECONDS)
        except EngineError as error:
            slot.failed(internal(scrub(str(error)), "load_failed"), _RETRY_SECONDS)
        except Exception as error:
            log_unexpected(error)
            slot.failed(internal(f"{type(error).__name__} while loading", "load_failed"), _RETRY_SECONDS)
        else:
            outcome = "loaded"
            slot.state, slot.used_at = State.LOADED, time.monotonic()
            self._registry.add(served)
            self._announce(served)
        if slot.state is State.FAILED:
            logger.warning("%s could not be loaded: %s", slot.name, slot.reason)
            self._limit_failed()
        slot.task = None
        self._metrics.load_ended(slot.name, outcome, time.monotonic() - began)

    async def _load_now(self, slot: Slot) -> ServedModel:
        assert self._reader is not None
        logger.info("loading %s", slot.name)
        spec = await self._reader.locate(slot.spec)
        served = await self._reader.read(spec)
        while True:
            try:
                await self._client.load(replace(spec, memory=self._memory_left()), served.tokenizer)
                return served
            except MemoryShortageError as shortage:
                if not await self._evict(shortage.needed_bytes - shortage.available_bytes):
                    raise

    def _memory_left(self) -> int | None:
        budget = self._settings.memory
        return None if budget is None else max(0, budget - self.memory_used)

    @property
    def memory_used(self) -> int:
        """Bytes of all loaded models."""
        return sum(info.memory_bytes for info in self._client.models.values())

    def _shortage(self, error: MemoryShortageError) -> str:
        needed = f"it needs {error.needed_bytes / 1e6:.0f} MB, of {error.available_bytes / 1e6:.0f} MB that are left"
        if self._settings.memory is None:
            return f"{needed}; models that could be unloaded are in use or take too little"
        used = f"{self.memory_used / 1e6:.0f} MB are of models that are in use, pinned or too small"
        return f"{needed} by model_memory, {self._settings.memory / 1e6:.0f} MB; {used}"

    def _announce(self, served: ServedModel) -> None:
        tasks = [task for task in (Task.GENERATE, Task.ENCODE) if served.serves(task)]
        self._metrics.loaded(self._client.models[served.name], self._version, tasks, self._client.restarts)
        if not served.reads_text:
            self._metrics.transcribes(served.name)

    def _limit_failed(self) -> None:
        """Forget the oldest failed models that nothing but a request ever named."""
        failed = [slot for slot in self if slot.state is State.FAILED and slot.origin is Origin.REQUEST]
        for slot in failed[: max(0, len(failed) - MAX_FAILED)]:
            self.forget(slot)

    # -- unloading

    async def _evict(self, needed: int) -> bool:
        """Unload the least recently used models that free as many bytes together; none, and False, if they do not."""
        self.notice_lost()  # what the engine lost frees nothing
        chosen, freed = [], 0
        for slot in sorted((one for one in self if one.is_evictable), key=lambda one: one.used_at):
            if freed >= needed:
                break
            chosen.append(slot)
            freed += self._client.models[slot.name].memory_bytes
        if freed < needed or not chosen:
            return False
        for slot in chosen:
            if slot.is_evictable:  # a request may have come while another one was unloaded
                await asyncio.shield(self.begin_unload(slot, "evicted"))
        return True

    def notice_lost(self) -> None:
        """Notice models that the engine has lost; the next request for one loads it again."""
        if not self._client.health().ready:
            return
        served = self._client.models
        for slot in self:
            model = self._registry.get(slot.name)
            if slot.state is State.LOADED and slot.name not in served and model is not None:
                slot.failed(internal("it failed in the engine", "load_failed"), 0.0)
                self._registry.offer(slot.name, model.checkpoint)
                self._metrics.unloaded(slot.name, "lost")

    def unload_idle(self) -> None:
        """Begin to unload models that no request has held for `keep_alive`."""
        limit = time.monotonic() - self._settings.keep_alive_s
        for slot in self:
            if slot.is_evictable and slot.used_at < limit:
                self.begin_unload(slot, "idle")

    def unload(self, name: str, drain_s: float | None) -> asyncio.Task[None]:
        """Begin to unload a model, or give up loading it, for an operator; raises a 404 or 409."""
        slot = self._slots.get(name)
        if slot is None:
            raise self._registry.unknown(name)
        if slot.state is State.LOADING:
            assert slot.task is not None
            slot.task.cancel()
            return slot.task
        if slot.state is State.UNLOADING:
            assert slot.task is not None
            return slot.task
        if slot.state is not State.LOADED:
            raise conflict(f"model {name} is {slot.state}, not loaded", "model_not_loaded", "name")
        return self.begin_unload(slot, "request", self._drain_s if drain_s is None else drain_s)

    def begin_unload(self, slot: Slot, reason: str, drain_s: float = 0.0) -> asyncio.Task[None]:
        """Start unloading a loaded model: requests that hold it may go on for `drain_s`, and new ones are refused.

        Unless an operator asked for it, new requests wait, and load it again.
        """
        served = self._registry.get(slot.name)
        assert served is not None
        slot.state = State.UNLOADING
        if reason == "request":
            error = unavailable(f"model {slot.name} is being unloaded", "model_unloading")
            self._registry.refuse(slot.name, error)
        else:
            self._registry.offer(slot.name, served.checkpoint)
        slot.task = asyncio.create_task(self._unload(slot, served, reason, drain_s))
        return slot.task

    async def _unload(self, slot: Slot, served: ServedModel, reason: str, drain_s: float) -> None:
        try:
            async with asyncio.timeout(drain_s):
                await slot.unused.wait()
        except TimeoutError:
            logger.warning("%s is unloaded while %d requests use it: they end now", slot.name, slot.users)
        try:
            await self._client.unload(slot.name)
        except ModelNotLoadedError:
            pass  # the engine was lost, and the model with it
        except Exception as error:  # it takes no requests in any case
            log_unexpected(error)
        slot.task = None
        self._metrics.unloaded(slot.name, reason)
        logger.info("%s is unloaded: %s", slot.name, reason)
        if reason == "request" and slot.origin is Origin.REQUEST:
            self.forget(slot)
        elif reason == "request" and slot.origin is Origin.START:
            slot.state, slot.reason = State.UNLOADED, "unloaded by request"
            message = f"model {slot.name} was unloaded; POST /models/load loads it again"
            self._registry.refuse(slot.name, not_found(message, "model_not_found", "model"))
        else:
            slot.state = State.AVAILABLE
            self._registry.offer(slot.name, served.checkpoint)
