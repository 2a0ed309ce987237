"""The front's record of one engine's models: served, being loaded or being unloaded. No torch.

A name is in use from the call that loads it until the engine reports that its memory is free. `served` has the models
that accept requests; an engine process that is started again loads these.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from triptych.model.api.messages import Commands, FailureKind, LoadFailure, ModelSpec
from triptych.model.api.stats import EngineStats, ModelInfo, StepStats
from triptych.model.client.admission import Admission
from triptych.model.errors import (
    ConfigError,
    EngineDeadError,
    LoadFailedError,
    MemoryShortageError,
    ModelNotLoadedError,
)
from triptych.model.text.tokenizer import Tokenizer

_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class FrontModel:
    """One model and its unfinished requests."""

    spec: ModelSpec
    tokenizer: Tokenizer | None
    admission: Admission
    background: Admission  # of background work, for which no other request waits
    stats: EngineStats
    optional: bool = False  # loaded after the start, so an engine may restart without it
    info: ModelInfo | None = None  # once it is loaded
    requests: set[str] = field(default_factory=set)  # ids of unfinished ones
    drained: asyncio.Event = field(default_factory=asyncio.Event)  # set, while it is unloaded, once it has no requests

    @property
    def is_adapter(self) -> bool:
        return self.spec.adapter_of is not None

    @property
    def current_stats(self) -> EngineStats:
        """The latest statistics of its engine; of an adapter, which has no engine, those of its own requests."""
        base = self.spec.adapter_of
        if base is None:
            return self.stats
        waiting = sum(admission.num_waiting(self.requests) for admission in self.admissions)
        return EngineStats(self.spec.name, len(self.requests) - waiting, waiting, adapter_of=base)

    def admission_of(self, *, is_background: bool) -> Admission:
        return self.background if is_background else self.admission

    @property
    def admissions(self) -> tuple[Admission, Admission]:
        return self.admission, self.background

    def has_loaded(self, info: ModelInfo) -> None:
        self.info = info
        if not self.is_adapter:  # else the limits are its base's
            for admission in self.admissions:
                admission.loaded(info)
        logger.info("loaded %s in %.1f s", info.name, info.load_seconds)


class ModelTable:
    """The models by name, with the futures of loads and unloads in progress."""

    def __init__(self, specs: Sequence[ModelSpec], tokenizers: Mapping[str, Tokenizer | None]) -> None:
        self.served: dict[str, FrontModel] = {}  # also while the engine is being started
        for spec in specs:
            self.served[spec.name] = self._model(spec, tokenizers.get(spec.name), optional=False)
        self._loading: dict[str, tuple[FrontModel, asyncio.Future[ModelInfo]]] = {}
        self._unloading: dict[str, tuple[FrontModel, asyncio.Future[None]]] = {}
        self._started_with: set[str] = set()

    def _model(self, spec: ModelSpec, tokenizer: Tokenizer | None, *, optional: bool) -> FrontModel:
        """Return a model that is not loaded yet; an adapter's requests wait in the queue of its base."""
        base = None if spec.adapter_of is None else self.served.get(spec.adapter_of)
        admissions = (Admission(spec.engine), Admission(spec.engine)) if base is None else base.admissions
        return FrontModel(spec, tokenizer, *admissions, EngineStats(spec.name), optional)

    def __getitem__(self, name: str) -> FrontModel:
        """Return a model that accepts requests; raises `ModelNotLoadedError`."""
        found = self.served.get(name)
        if found is None:
            raise ModelNotLoadedError(f"no model named {name} is loaded")
        return found

    def release(self, name: str, request_id: str) -> None:
        """Stop counting a request of a model that has ended."""
        going = self._unloading.get(name)
        for model in filter(None, (self.served.get(name), going[0] if going else None)):
            for admission in model.admissions:
                admission.release(request_id)
            model.requests.discard(request_id)
        if going and not going[0].requests:
            going[0].drained.set()

    def mark_started(self, name: str, request_id: str, cached_tokens: int) -> None:
        """Note that a request has an output."""
        if name in self.served:
            for admission in self.served[name].admissions:
                admission.mark_started(request_id, cached_tokens)

    def observe(self, step: StepStats) -> None:
        """Let admission control learn from a step."""
        if step.model in self.served:
            for admission in self.served[step.model].admissions:
                admission.observe(step)

    def running(self, name: str) -> int:
        """Return the number of sequences that run in a model's engine; an adapter's engine is its base's."""
        model = self.served.get(name)
        if model is not None and model.spec.adapter_of is not None:
            model = self.served.get(model.spec.adapter_of)
        return 0 if model is None else model.stats.running

    def set_stats(self, stats: EngineStats) -> None:
        if stats.model in self.served:
            self.served[stats.model].stats = stats
            for admission in self.served[stats.model].admissions:
                admission.set_stats(stats)

    def begin_load(self, spec: ModelSpec, tokenizer: Tokenizer | None) -> asyncio.Future[ModelInfo]:
        """Reserve a model's name; the future ends as the load does. Raises `ConfigError` if the name is in use."""
        for names, state in ((self.served, "served"), (self._loading, "being loaded")):
            if spec.name in names:
                raise ConfigError(f"a model named {spec.name} is {state} already")
        if spec.adapter_of is not None and (base := self[spec.adapter_of].spec.adapter_of) is not None:
            raise ConfigError(f"{spec.adapter_of} is an adapter itself; name its base model, {base}")
        future = asyncio.get_running_loop().create_future()
        self._loading[spec.name] = (self._model(spec, tokenizer, optional=True), future)
        return future

    async def wait_unloaded(self, name: str) -> None:
        """Wait until no model of this name is being unloaded, so that it can be loaded."""
        while name in self._unloading:
            await asyncio.shield(self._unloading[name][1])

    def begin_unload(self, name: str) -> tuple[FrontModel, asyncio.Future[None]]:
        """Refuse new requests for a model; the future ends once it is unloaded. Raises `ModelNotLoadedError`."""
        model = self[name]
        return model, self._leave(self.served.pop(name))

    def adapters_of(self, name: str) -> list[str]:
        """Return the served adapters of a model."""
        return [one.spec.name for one in self.served.values() if one.spec.adapter_of == name]

    def give_up(self, name: str) -> bool:
        """Turn the load of a model into an unload; returns False if it is not being loaded."""
        if name not in self._loading:
            return False
        self._leave(self._loading.pop(name)[0])
        return True

    def _leave(self, model: FrontModel) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().create_future()
        self._unloading[model.spec.name] = (model, future)
        if not model.requests:
            model.drained.set()
        return future

    def loaded(self, info: ModelInfo) -> None:
        """Record that the engine has loaded a model, at the start or later."""
        if info.name in self._loading:
            model, future = self._loading.pop(info.name)
            self.served[info.name] = model
            _resolve(future, info)
        if info.name in self.served:
            self.served[info.name].has_loaded(info)

    def load_failed(self, failure: LoadFailure) -> None:
        """Record that the engine failed to load a model, or lost it while it was served."""
        if failure.model in self._loading:
            _, future = self._loading.pop(failure.model)
            if not future.done():
                future.set_exception(_error(failure))
        elif failure.model in self.served:
            for name in (failure.model, *self.adapters_of(failure.model)):
                del self.served[name]
                logger.error("%s is served no more: %s", name, failure.message)

    def unloaded(self, name: str) -> None:
        """Record that the engine has freed a model."""
        if name in self._unloading:
            logger.info("unloaded %s", name)
            _resolve(self._unloading.pop(name)[1], None)

    def lost(self, error: EngineDeadError) -> None:
        """End all loads in progress with `error`, and all unloads as done, because the engine is gone."""
        for _, loading in self._loading.values():
            if not loading.done():
                loading.set_exception(error)
        for _, unloading in self._unloading.values():
            _resolve(unloading, None)
        self._loading.clear()
        self._unloading.clear()
        for model in self.served.values():
            model.stats = EngineStats(model.spec.name)

    def start_commands(self) -> Commands:
        """Return the command that starts an engine with the models that are served."""
        self._started_with = set(self.served)
        optional = [name for name, model in self.served.items() if model.optional]
        return Commands(start=[model.spec for model in self.served.values()], optional=optional)

    def left_while_started(self) -> list[str]:
        """Return the models that were unloaded while the engine was starting with them."""
        return sorted(self._started_with - self.served.keys())


def _resolve(future: asyncio.Future[_Result], result: _Result) -> None:
    if not future.done():
        future.set_result(result)


def _error(failure: LoadFailure) -> Exception:
    if failure.kind is FailureKind.MEMORY:
        return MemoryShortageError(failure.message, failure.needed_bytes, failure.available_bytes)
    return ConfigError(failure.message) if failure.kind is FailureKind.CONFIG else LoadFailedError(failure.message)
