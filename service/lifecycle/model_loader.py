"""Loads and unloads models while the service runs, and lets requests wait for them.

One load runs at a time, while other models serve. All requests for a model wait for the same load, which goes on even
if they are cancelled. A model is evicted for another one only if that frees enough memory and no request uses it. The
models themselves are in `triptych.service.core.models.Models`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

from triptych.model.api.messages import ModelSpec
from triptych.model.errors import ConfigError, EngineDeadError, EngineError, MemoryShortageError, ModelNotLoadedError
from triptych.service.core.engine_client import EngineClient, ModelReader
from triptych.service.core.errors import (
    ApiError,
    conflict,
    deadline_passed,
    forbidden,
    internal,
    invalid,
    log_unexpected,
    not_found,
    scrub,
    try_again,
    unavailable,
)
from triptych.service.core.models import Model, Models, Origin, ServedModel, State, Task
from triptych.service.core.request_context import RequestContext
from triptych.service.lifecycle.adapter_room import AdapterRoom
from triptych.service.lifecycle.folder_watch import SCAN_SECONDS, FolderWatch
from triptych.service.observability.metrics import Metrics
from triptych.service.settings.service_settings import ServiceSettings

_RETRY_SECONDS = 30.0  # until a request may load a failed model again
_SHORTAGE_RETRY_SECONDS = 5.0  # the same after a lack of memory: other models may be idle by then
_MAX_NAMES = 1_000  # of models that operators loaded: each name leaves counters in the metrics
_MISSED_SCANS = 2  # scans without a loaded model's folder, after which it is unloaded
_MAX_FAILED = 100  # failed models that operators named, kept in the list
_Outcome = Literal["loaded", "failed", "cancelled"]

logger = logging.getLogger("triptych.models")


class ModelLoader:
    """Loads and unloads the models of one process, for requests and for operators."""

    def __init__(
        self,
        client: EngineClient,
        models: Models,
        reader: ModelReader | None,
        settings: ServiceSettings,
        metrics: Metrics,
        version: str,
        watches: Sequence[FolderWatch] = (),
    ) -> None:
        """Without a `reader` only the given `models` are served. `watches` find more in folders."""
        self._client = client
        self._models = models
        self._reader = reader
        self._watches = watches
        self._settings = settings.models
        self._drain_s = settings.drain_timeout_s
        self._max_waiting = settings.limits.max_waiting_for_load
        self._metrics = metrics
        self._version = version
        self._turn = asyncio.Lock()
        self._adapters = AdapterRoom(models, settings.models.max_loras, self.begin_unload)
        self._waiting = 0
        self._names: set[str] = set()

    async def start(self) -> None:
        """Load the models given at the start, and find those of the folder; raises what `EngineClient.start` does."""
        await self._client.start()
        for served in self._models.loaded:
            model = self._models[served.name]
            model.pinned = self._settings.pins(model.spec)
            self._announce(served)
        for watch in self._watches:
            await watch.scan()

    async def close(self) -> None:
        """Cancel the loads in progress."""
        tasks = [task for model in self._models for task in (model.task, model.leaving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def look_after(self) -> None:
        """Notice new folders and lost models, and unload models that are idle or whose folder is gone."""
        self.notice_lost()
        self.unload_unneeded()
        for watch in self._watches:
            await watch.scan(SCAN_SECONDS)

    # -- requests

    async def hold(self, name: str | None, task: Task, context: RequestContext, deadline: float) -> None:
        """Reserve a model for a request: the named one, or the only one for the task. Load it first if necessary.

        Waits at most until `deadline`, by `time.monotonic()`. Raises `ApiError`: what `Models.choose` raises, 504 at
        the deadline, 429 if too many requests wait, or why the model cannot be loaded.
        """
        while True:
            model = self._models[await self._choose(name, task)]
            context.model = model.name
            if model.leaving is not None:
                await self._wait(model.leaving, deadline)
                continue
            if model.state is State.LOADED:
                self._models.hold(model, context)
                return
            if model.state is State.FAILED and time.monotonic() < model.retry_at:
                raise model.failure()
            work = model.task if model.state in (State.LOADING, State.UNLOADING) else self.begin_load(model)
            assert work is not None
            if model.state is State.LOADING:
                with model.in_use():  # so that it is not evicted before this request has it
                    await self._wait(work, deadline)
            else:
                await self._wait(work, deadline)
            if model.state is State.FAILED:
                raise model.failure()

    async def _choose(self, name: str | None, task: Task) -> str:
        loading = self._models.get(name) if name is not None else None
        if loading is not None and loading.state is State.LOADING:
            return loading.name  # its tasks are known once it is loaded
        try:
            return self._models.choose(name, task)
        except ApiError as error:
            if error.status != 404 or not self._watches:
                raise
        for watch in self._watches:
            await watch.find_new()
        return self._models.choose(name, task)

    async def _wait(self, work: asyncio.Task[None], deadline: float) -> None:
        """Wait for a load or an unload; it goes on if the wait ends early."""
        if self._waiting >= self._max_waiting:
            raise try_again("too many requests wait for models to be loaded", "model_loading", 5)
        self._waiting += 1
        try:
            done, _ = await asyncio.wait({work}, timeout=max(0.0, deadline - time.monotonic()))
        finally:
            self._waiting -= 1
        if not done:
            raise deadline_passed()

    # -- loading

    def add(self, spec: ModelSpec, given_path: str | None, *, pinned: bool) -> Model:
        """Add a model that an operator names, replacing one of the same name; raises a 409 for too many names."""
        if spec.name not in self._names and len(self._names) >= _MAX_NAMES:
            raise conflict(f"{_MAX_NAMES} names have been used since the start; use one of them", "too_many_names")
        self._names.add(spec.name)
        model = Model(spec, Origin.REQUEST, pinned, given_path=given_path)
        self._models.add(model)
        return model

    async def examine(self, spec: ModelSpec) -> None:
        """Read a folder without its weights, as a load does first; raises `ApiError`."""
        assert self._reader is not None
        base = None if spec.adapter_of is None else self._models[spec.adapter_of].served
        try:
            await self._reader.read(await self._reader.locate(spec), base)
        except ConfigError as error:
            raise invalid(scrub(str(error)), None, "load_failed") from None

    def begin_load(self, model: Model) -> asyncio.Task[None]:
        """Start loading a model; the task never raises, and leaves the model loaded or failed."""
        model.state, model.reason, model.error, model.keep_alive_s = State.LOADING, "", None, None
        if model.spec.adapter_of is not None:
            self._metrics.loading_adapters.add(model.name)
        task = model.task = asyncio.create_task(self._load(model))
        task.add_done_callback(partial(self._note_unbegun, model, time.monotonic()))
        return task

    def _note_unbegun(self, model: Model, began: float, task: asyncio.Task[None]) -> None:
        """End a load that was cancelled before its task had run: no line of `_load` was."""
        if task.cancelled():
            model.fail(_given_up(model), 0.0)
            self._ended(model, "cancelled", began)

    async def _load(self, model: Model) -> None:
        began = time.monotonic()
        outcome: _Outcome = "failed"
        try:
            # The limit is that of this load: waiting for a turn, or for the base's own load, does not count.
            async with (
                self._base_in_use(model.spec) as base,
                self._adapters.room_for(model),
                self._turn,
                asyncio.timeout(self._settings.load_timeout_s),
            ):
                served = await self._load_now(model, base)
        except asyncio.CancelledError:
            outcome = "cancelled"
            model.fail(_given_up(model), 0.0)
        except TimeoutError:
            seconds = self._settings.load_timeout_s
            model.fail(unavailable(f"loading takes longer than load_timeout, {seconds:g} s", "load_failed"), 30.0)
        except MemoryShortageError as error:
            model.fail(unavailable(self._shortage(error), "model_memory"), _SHORTAGE_RETRY_SECONDS)
        except ConfigError as error:
            model.fail(invalid(scrub(str(error)), None, "load_failed"), _RETRY_SECONDS)
        except EngineDeadError:
            model.fail(unavailable("the engine failed while loading", "engine_dead"), _SHORTAGE_RETRY_SECONDS)
        except EngineError as error:
            model.fail(internal(scrub(str(error)), "load_failed"), _RETRY_SECONDS)
        except Exception as error:
            log_unexpected(error)
            model.fail(internal(f"{type(error).__name__} while loading", "load_failed"), _RETRY_SECONDS)
        else:
            outcome = "loaded"
            model.serve(served)
            self._announce(served)
            self._bring_adapters(model)
        self._ended(model, outcome, began)

    def _bring_adapters(self, base: Model) -> None:
        """Load the adapters that went with their base model, which is loaded again."""
        assert base.served is not None
        for adapter in self._models.adapters_of(base):
            adapter.retry_at = 0.0  # what failed without the base may be tried again
            if adapter.with_base and adapter.state in (State.UNLOADED, State.FAILED):
                adapter.state = State.AVAILABLE
                adapter.offer(base.served.checkpoint)
                if self._settings.max_loras is None:  # else those that requests name are
                    self.begin_load(adapter)

    def _ended(self, model: Model, outcome: _Outcome, began: float) -> None:
        if model.state is State.FAILED:
            logger.warning("%s could not be loaded: %s", model.name, model.reason)
            self._limit_failed()
        model.task = None
        self._metrics.loading_adapters.discard(model.name)
        self._metrics.load_ended(model.name, outcome, time.monotonic() - began)

    @asynccontextmanager
    async def _base_in_use(self, spec: ModelSpec) -> AsyncIterator[Model | None]:
        """Load the model that an adapter is for, and keep it in the block; raises `ConfigError` if that fails."""
        if spec.adapter_of is None:
            yield None
            return
        base = self._models.get(spec.adapter_of)
        if base is None or base.spec.adapter_of is not None:
            raise ConfigError(f"the adapter's base model {spec.adapter_of} is not known")
        while base.state is not State.LOADED:
            if base.state is State.UNLOADED:
                raise ConfigError(f"the adapter's base model {base.name} was unloaded; load that first")
            work = base.task if base.state in (State.LOADING, State.UNLOADING) else self.begin_load(base)
            assert work is not None
            await asyncio.wait({work})
            if base.state is State.FAILED:
                raise ConfigError(f"the adapter's base model {base.name} could not be loaded: {base.reason}")
        with base.in_use():
            yield base

    async def _load_now(self, model: Model, base: Model | None) -> ServedModel:
        assert self._reader is not None
        logger.info("loading %s", model.name)
        spec = await self._reader.locate(model.spec)
        served = await (self._reader.read(spec) if base is None else self._reader.read(spec, base.served))
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
        """The bytes of all loaded models."""
        return sum(info.memory_bytes for info in self._client.models.values())

    def _shortage(self, error: MemoryShortageError) -> str:
        needed = f"it needs {error.needed_bytes / 1e6:.0f} MB, and {error.available_bytes / 1e6:.0f} MB are free"
        if self._settings.memory is None:
            return f"{needed}; models that could be unloaded are in use or take too little"
        used = f"loaded models take {self.memory_used / 1e6:.0f} MB, and are in use, pinned or too small"
        return f"{needed} below model_memory, {self._settings.memory / 1e6:.0f} MB; {used}"

    def _announce(self, served: ServedModel) -> None:
        tasks = [task for task in (Task.GENERATE, Task.ENCODE) if served.serves(task)]
        self._metrics.loaded(self._client.models[served.name], self._version, tasks, self._client.restarts)

    def _limit_failed(self) -> None:
        """Remove the oldest failed models that operators named."""
        failed = [model for model in self._models if model.state is State.FAILED and model.origin is Origin.REQUEST]
        for model in failed[: max(0, len(failed) - _MAX_FAILED)]:
            self._models.forget(model)

    # -- unloading

    async def _evict(self, needed: int) -> bool:
        """Unload the least recently used models until `needed` bytes are free.

        If all of them together do not free as much, unload none and return False.
        """
        self.notice_lost()  # a model that the engine has lost frees nothing
        chosen, freed = [], 0
        for model in sorted((one for one in self._models if one.is_evictable), key=lambda one: one.used_at):
            if freed >= needed:
                break
            chosen.append(model)
            freed += self._client.models[model.name].memory_bytes
        if freed < needed or not chosen:
            return False
        for model in chosen:
            if model.is_evictable:  # a request may have reserved it while another one was unloaded
                await asyncio.shield(self.begin_unload(model, "evicted"))
        return True

    def notice_lost(self) -> None:
        """Mark models that the engine has lost; the next request for one loads it again."""
        if not self._client.health().ready:
            return
        served = self._client.models
        for model in self._models:
            if model.state is State.LOADED and model.name not in served and model.served is not None:
                model.fail(internal("it failed in the engine", "load_failed"), 0.0)
                model.offer(model.served.checkpoint)
                self._metrics.unloaded(model.name, "lost")

    def unload_unneeded(self) -> None:
        """Start unloading models that no request has used for `keep_alive`, and those whose folder is gone."""
        now = time.monotonic()
        for model in self._models:
            if model.state is State.LOADED and model.missed >= _MISSED_SCANS:
                self.begin_unload(model, "gone", self._drain_s)
            elif model.state is State.LOADED and model.changed:
                self.begin_unload(model, "changed", self._drain_s)
            elif model.is_evictable and model.used_at + self.keep_alive(model) < now:
                self.begin_unload(model, "idle")

    def keep_alive(self, model: Model) -> float:
        """Return the idle seconds after which a model is unloaded; infinite for a pinned one."""
        if model.pinned:
            return math.inf
        return self._settings.keep_alive_s if model.keep_alive_s is None else model.keep_alive_s

    def release(self, name: str) -> None:
        """Unload a model as soon as no request uses it, for a client; raises a 403 for a pinned one, and a 404."""
        model = self._models.get(name)
        if model is None or model.served is None:
            raise self._models.unknown(name)
        if model.pinned:
            raise forbidden(
                f"model {name} is pinned and stays loaded; with --no-pin, models given at the start can be unloaded",
                "model_pinned",
            )
        model.keep_alive_s = 0.0
        if model.is_evictable:
            self.begin_unload(model, "idle")

    def unload(self, name: str, drain_s: float | None) -> asyncio.Task[None]:
        """Start unloading a model, or cancel its load, for an operator; raises a 404 or 409."""
        model = self._models.get(name)
        if model is None:
            raise self._models.unknown(name)
        if model.state is State.LOADING:
            assert model.task is not None
            model.task.cancel()
            return model.task
        if model.state is State.UNLOADING:
            assert model.task is not None
            return model.task
        if model.state is State.AVAILABLE and model.origin is not Origin.MODELS_DIR:
            self._withdraw(model)  # now: a request could begin to load it before a task does
            return asyncio.create_task(asyncio.sleep(0))
        if model.state is not State.LOADED:
            raise conflict(f"model {name} is {model.state}, not loaded", "model_not_loaded", "name")
        return self.begin_unload(model, "request", self._drain_s if drain_s is None else drain_s)

    def begin_unload(self, model: Model, reason: str, drain_s: float = 0.0) -> asyncio.Task[None]:
        """Start unloading a loaded model; requests that use it may go on for `drain_s`.

        If an operator asked for it (`reason` "request"), new requests are refused. Else they wait, and load it again.
        """
        served = model.served
        assert served is not None
        for adapter in self._models.adapters_of(model):
            if adapter.state in (State.LOADED, State.AVAILABLE):
                adapter.with_base = reason == "request" and model.origin is not Origin.REQUEST
            if adapter.state is State.LOADED:
                self.begin_unload(adapter, reason, drain_s)
        going = [one.task for one in self._models.adapters_of(model) if one.state is State.UNLOADING and one.task]
        model.state = State.UNLOADING
        if reason == "request":
            model.refuse(unavailable(f"model {model.name} is being unloaded", "model_unloading"))
        else:
            model.offer(served.checkpoint)
        model.task = asyncio.create_task(self._unload(model, served, reason, drain_s, going))
        return model.task

    async def _unload(
        self, model: Model, served: ServedModel, reason: str, drain_s: float, adapters: Sequence[asyncio.Task[None]]
    ) -> None:
        """Unload a model, whose `adapters` are being unloaded."""
        if adapters:
            await asyncio.wait(adapters)
        try:
            async with asyncio.timeout(drain_s):
                await model.unused.wait()
        except TimeoutError:
            logger.warning("%s is unloaded while %d requests use it: they end now", model.name, model.users)
        try:
            self._metrics.update_engines(self._client)  # what the engine has counted goes with the model
            await self._client.unload(model.name)
        except ModelNotLoadedError:
            pass  # the engine was lost, and the model with it
        except Exception as error:  # the model takes no requests in any case
            log_unexpected(error)
        for adapter in self._models.adapters_of(model):
            if adapter.state is State.LOADED:  # its load had begun before
                await asyncio.wait({self.begin_unload(adapter, reason)})
            elif reason == "request" and adapter.state is State.AVAILABLE and adapter.origin is not Origin.MODELS_DIR:
                self._withdraw(adapter)
        model.task = None
        self._metrics.unloaded(model.name, reason)
        logger.info("%s is unloaded: %s", model.name, reason)
        if reason == "request" and model.origin is not Origin.MODELS_DIR:
            self._withdraw(model)
        else:
            model.state = State.AVAILABLE
            model.offer(served.checkpoint)

    def _withdraw(self, model: Model) -> None:
        """Offer a model that is not loaded no more, until an operator loads it."""
        if model.origin is Origin.REQUEST and not model.with_base:
            self._models.forget(model)
            return
        model.state, model.reason = State.UNLOADED, "unloaded by request"
        message = f"model {model.name} was unloaded; POST /models/load loads it again"
        model.refuse(not_found(message, "model_not_found", "model"))


def _given_up(model: Model) -> ApiError:
    return conflict(f"loading {model.name} was given up", "load_cancelled")
