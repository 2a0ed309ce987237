"""Loads and unloads models on all replicas of the service. The local runtime has one replica.

`triptych.service.runtimes.ray_serve.replicated_fleet` is the implementation for several.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from triptych.model.api.messages import ModelSpec
from triptych.model.checkpoint import hub_names
from triptych.model.errors import ConfigError
from triptych.model.gguf.paths import is_gguf
from triptych.service.core.engine_client import EngineClient
from triptych.service.core.errors import ApiError, conflict, forbidden, invalid, scrub
from triptych.service.core.models import Model, Models, Origin, State
from triptych.service.core.models_folder import ModelsFolder, valid_name
from triptych.service.core.response_store import StoredResponse
from triptych.service.lifecycle.model_loader import ModelLoader
from triptych.service.settings import sources
from triptych.service.settings.resolve import engine_config
from triptych.service.settings.service_settings import ModelSettings
from triptych.service.tenants.quotas import Leases
from triptych.service.tenants.usage import Found, Question

# -- Orders of operators to load models, checked against the settings. An order names a known model, or a new one with a
# path: a folder in `models_dir`, a model of the Hub, or, if `load_from` lists `any`, any folder of the machine.


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """An operator's order to load a model: a known one, or a new one from a path."""

    name: str
    path: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # engine settings, as in a configuration file
    pinned: bool = False
    adapter_of: str | None = None  # the model that the path has a LoRA adapter for
    replaces: bool = False  # an adapter that is loaded and is to be unloaded first


class ModelOrders:
    """Checks orders and starts their loads."""

    def __init__(
        self, models: Models, loader: ModelLoader, settings: ModelSettings, folder: ModelsFolder | None
    ) -> None:
        self._models = models
        self._loader = loader
        self._settings = settings
        self._folder = folder

    def check(self, order: LoadOrder) -> ModelSpec:
        """Return what `load` would load; raises the `ApiError` with which it would refuse the order."""
        return self._resolve(order)[1]

    def load(self, order: LoadOrder) -> asyncio.Task[None] | None:
        """Start loading the ordered model; return None if it is already loaded. Raises `ApiError`."""
        model, spec = self._resolve(order)
        if model is None:
            return self._loader.begin_load(self._loader.add(spec, order.path, pinned=order.pinned))
        if model.state in (State.LOADED, State.LOADING):
            model.pinned |= order.pinned
            return model.task
        model.spec, model.pinned = spec, order.pinned or (model.origin is Origin.START and self._settings.pins(spec))
        return self._loader.begin_load(model)

    def _resolve(self, order: LoadOrder) -> tuple[Model | None, ModelSpec]:
        """Return the known model, or None for a new one, and the specification to load."""
        if order.name in self._models.elsewhere:
            raise conflict(f"name: {order.name} is a model of another group", "model_exists", "name")
        model = self._models.get(order.name)
        if model is None or (order.path is not None and model.state is State.FAILED and model.origin is Origin.REQUEST):
            return None, self._new_spec(order)
        if self._is_new_adapter(order, model):
            return None, self._new_spec(replace(order, adapter_of=order.adapter_of or model.spec.adapter_of))
        spec = self._spec_of_known(order, model)
        if model.state is State.UNLOADING:
            raise conflict(f"model {order.name} is being unloaded; try again", "model_unloading", "name", passes=True)
        if model.state in (State.LOADED, State.LOADING) and spec != model.spec:
            message = f"model {order.name} is {model.state} with other settings; unload it, or take another name"
            raise conflict(message, "model_exists", "name")
        return model, spec

    def _is_new_adapter(self, order: LoadOrder, model: Model) -> bool:
        """Return whether an order gives the name of an adapter that is not loaded to another folder or base."""
        if order.path is None or model.spec.adapter_of is None:
            return False
        if model.state in (State.LOADED, State.LOADING, State.UNLOADING) and not order.replaces:
            return False
        other_base = order.adapter_of not in (None, model.spec.adapter_of)
        return other_base or (order.path != model.given_path and self._allowed(order.path) != model.spec.path)

    def _new_spec(self, order: LoadOrder) -> ModelSpec:
        if not valid_name(order.name):
            raise invalid("name: 1-64 letters, digits and ._-, starting with a letter or digit", "name")
        if order.path is None:
            raise invalid("path is required: no model of this name is known", "path", "missing_field")
        if order.adapter_of is None:
            return ModelSpec(order.name, self._allowed(order.path), self._engine(order, self._settings.engine))
        base = self._models.get(order.adapter_of)
        if base is None or base.spec.adapter_of is not None:
            raise invalid(f"adapter_of: no model is named {order.adapter_of}", "adapter_of", "model_not_found")
        if order.settings:
            raise invalid("settings: an adapter has those of its base model", "settings")
        return ModelSpec(order.name, self._allowed(order.path), base.spec.engine, adapter_of=base.name)

    def _spec_of_known(self, order: LoadOrder, model: Model) -> ModelSpec:
        """Return the specification of a known model: by default its last one."""
        if order.adapter_of not in (None, model.spec.adapter_of):
            message = f"name: {order.name} is known, and is no adapter of {order.adapter_of}; take another name"
            raise conflict(message, "model_exists", "name")
        if order.path not in (None, model.given_path) and self._allowed(order.path) != model.spec.path:
            message = f"name: {order.name} is known from another path; take another name"
            raise conflict(message, "model_exists", "name")
        if not order.settings or model.spec.adapter_of is not None:
            return model.spec
        return ModelSpec(order.name, model.spec.path, self._engine(order, self._settings.engine))

    def _engine(self, order: LoadOrder, shared: Any) -> Any:
        try:
            return engine_config(sources.requested_settings(order.settings, "settings"), shared)
        except ConfigError as error:
            raise invalid(scrub(str(error)), "settings") from None

    def _allowed(self, path: str) -> str:
        """Return the path to load from; raises a 403 if `load_from` does not allow it, a 400 if it is bad."""
        sources_allowed = self._settings.load_from
        if hub_names.is_hub_name(path) or hub_names.is_address(path):
            if "hub" not in sources_allowed and "any" not in sources_allowed:
                raise _not_allowed("models of the Hub")
            try:
                return str(hub_names.parse(path))
            except ConfigError as error:
                raise invalid(scrub(str(error)), "path") from None
        if "any" in sources_allowed and Path(path).is_absolute():
            return self._any_folder(path)
        if "models-dir" not in sources_allowed and "any" not in sources_allowed:
            raise _not_allowed("folders")
        if self._folder is None:
            raise _not_allowed("folders without --models-dir")
        if Path(path).is_absolute() and not Path(path).is_relative_to(self._folder.path):
            raise _not_allowed("folders outside models_dir")
        try:
            return str(self._folder.below(path))
        except ConfigError as error:
            raise invalid(str(error), "path") from None

    @staticmethod
    def _any_folder(path: str) -> str:
        try:
            found = Path(path).resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            raise invalid("path: no such folder", "path") from None
        if not found.is_dir() and not is_gguf(found):
            raise invalid("path: no such folder", "path")
        return str(found)


def _not_allowed(what: str) -> ApiError:
    return forbidden(f"path: {what} may not be loaded; the setting load_from says what may", "source_not_allowed")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model as operators see it, on one replica or on all of them together."""

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
    adapter_of: str = ""
    replicas: dict[str, int] = field(default_factory=dict)  # by state


class Fleet(Protocol):
    """Loads and unloads models on every replica."""

    async def examine(self, order: LoadOrder) -> None:
        """Read the folder of an order without its weights; raises `ApiError` if it cannot be loaded."""

    def begin_load(self, order: LoadOrder) -> asyncio.Task[None]:
        """Start loading a model on all replicas; raises `ApiError` if the order is refused.

        The task raises `ApiError` if loading fails. It goes on if the caller is cancelled.
        """

    def begin_unload(self, name: str, drain_s: float | None) -> asyncio.Task[None]:
        """Start unloading a model on all replicas, after `drain_s` for its requests; errors as in `begin_load`."""

    async def entries(self) -> list[ModelEntry]:
        """Describe all known models."""

    async def start(self) -> None:
        """Load the models that operators have ordered in addition to those of the start."""

    def stop(self) -> None:
        """Stop following the orders of other replicas, because the service drains."""


class Replicas(Protocol):
    """The other replicas of the application, in a runtime that has any."""

    def fleet(self, local: LocalFleet) -> Fleet:
        """Return the fleet of all replicas; `local` loads and unloads models on this one."""

    async def cancel(self, request_id: str) -> int:
        """Cancel a request on the other replicas, and return how many ended; `TimeoutError` if one did not answer."""

    async def stored(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response that another replica keeps; `TimeoutError` if none has it and one did not answer."""

    def leases(self) -> Leases | None:
        """Return what shares quotas with the other replicas; None: each has its own."""

    async def usage(self, question: Question) -> list[Found]:
        """Return what the other replicas know of usage; `TimeoutError` if one did not answer."""

    async def forget(self, tenant: str, response_id: str) -> int:
        """Drop a stored response on the other replicas, and return how many kept it; `TimeoutError` as `stored`."""


class LocalFleet:
    """A fleet of one replica: this process."""

    def __init__(self, client: EngineClient, models: Models, loader: ModelLoader, orders: ModelOrders) -> None:
        self.models = models
        self.loader = loader
        self._client = client
        self._orders = orders
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Do nothing: there are no other replicas to follow."""

    def stop(self) -> None:
        """Do nothing, as `start` does."""

    def check(self, order: LoadOrder) -> None:
        """Raise the `ApiError` with which `begin_load` would refuse the order."""
        self._orders.check(order)

    async def examine(self, order: LoadOrder) -> None:
        await self.loader.examine(self._orders.check(order))

    def begin_load(self, order: LoadOrder) -> asyncio.Task[None]:
        work = self._orders.load(order)
        return keep(self._tasks, self._finish_load(order.name, work))

    def begin_unload(self, name: str, drain_s: float | None) -> asyncio.Task[None]:
        work = self.loader.unload(name, drain_s)
        return keep(self._tasks, wait_for(work))

    async def entries(self) -> list[ModelEntry]:
        return merged([self.own_entries()])

    def own_entries(self) -> list[ModelEntry]:
        """Describe the models of this process."""
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
            adapter_of=model.spec.adapter_of or "",
        )

    async def _finish_load(self, name: str, work: asyncio.Task[None] | None) -> None:
        if work is not None:
            await wait_for(work)
        model = self.models.get(name)
        if model is not None and model.error is not None:
            raise model.error


async def wait_for(work: asyncio.Task[None]) -> None:
    """Wait until `work` has ended; cancelling the wait does not cancel it."""
    await asyncio.wait({work})


def keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task and keep it in `tasks` until it ends; an exception that is not awaited is not reported."""
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
    """Merge the replicas' descriptions of each model.

    A model is loaded if a replica has loaded it, else loading while a replica loads it; `replicas` counts the states.
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
