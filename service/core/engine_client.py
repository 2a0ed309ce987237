"""The interfaces of the HTTP application to the engines, and to the folders that models are read from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from model.api.messages import ModelSpec
from model.api.request import EncodeOutput, EncodeRequest, Request, TokenOutput
from model.api.stats import Demand, EngineStats, Health, ModelInfo, StepStats
from model.text.tokenizer import Tokenizer
from service.core.models import ServedModel

# -- The interface between the HTTP application and the engines. `model.client.async_engine.AsyncEngine` implements it,
# with engines in a child process or a thread; `service.core.fake_engine.FakeEngineClient` is a scripted implementation
# for tests of HTTP semantics.


class GenerationStream(Protocol):
    """Iterates over the outputs of the requests of one `submit`, in any order, until all their sequences have ended.

    Every output has its `text` filled (a delta); each of the `params.n` sequences of each request gets one output
    with a `finish_reason`, its last. Raises `EngineDeadError` from `__anext__` at any time.
    """

    def __aiter__(self) -> GenerationStream: ...

    async def __anext__(self) -> TokenOutput: ...

    async def aclose(self) -> None:
        """Abort what has not ended, within one step. Idempotent; nothing may be iterated at the time."""


@runtime_checkable
class ListenableStream(Protocol):
    """A `GenerationStream` that may also be read in callbacks."""

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` on the event loop whenever there is something to take, until the stream is closed."""

    def take(self) -> Sequence[TokenOutput]:
        """Return all outputs that can be read now. Raises `EngineDeadError`."""


class EngineClient(Protocol):
    """Runs requests on the engines of one or more models. Request ids are unique among running requests."""

    @property
    def models(self) -> dict[str, ModelInfo]:
        """The models that take requests, by name; empty until `start` has returned."""

    @property
    def restarts(self) -> int:
        """The number of times that failed engines were restarted, over all models."""

    async def start(self) -> None:
        """Load the models that are served from the start, if any; raises `ConfigError` or `EngineDeadError`."""

    async def load(self, spec: ModelSpec, tokenizer: Tokenizer | None) -> ModelInfo:
        """Load a model beside those that are served; it takes requests once this returns.

        Models are loaded one after the other, in the order of the calls; one whose name is being unloaded, or was given
        up while it was loaded, once that is done. After any exception nothing has changed. Raises `ConfigError` for
        what cannot be served or a name that is in use, also while it is being loaded; `MemoryShortageError` where the
        model does not fit by its plan; `LoadFailedError` for whatever else prevents it; `EngineGoneError` where no
        engine runs, `EngineDeadError` if it is lost meanwhile. Cancelling gives the model up.
        """

    async def unload(self, name: str, *, drain_seconds: float = 0.0) -> None:
        """Unload a model; return when its memory is given back.

        It takes no requests from now on. Running ones get `drain_seconds` to end; then they end with
        `FinishReason.CANCELLED`. Raises `ModelNotLoadedError`. Cancelling this call does not stop the unloading. If the
        engine is lost meanwhile, the model is unloaded with it.
        """

    async def close(self) -> None:
        """Fail whatever still runs and release the engines. Idempotent."""

    def check_room(self, model: str, sequences: int = 1) -> None:
        """Raise what `submit` and `encode` would raise for so many sequences, before any preparation.

        That is `ModelNotLoadedError`, `QueueFullError` or `EngineGoneError`.
        """

    def submit(self, requests: Sequence[Request]) -> GenerationStream:
        """Queue all of `requests` (of one model) at once, or raise as `check_room` does with none queued."""

    async def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeOutput]:
        """One output for each request, in order. Raises as `submit` does before any work, `EngineDeadError` later;
        cancelling aborts all."""

    def cancel(self, request_id: str) -> bool:
        """End a running request of either kind with `FinishReason.CANCELLED`; False if there is none of that id."""

    def health(self) -> Health:
        """Return whether the engines are alive and ready, with a reason if not."""

    def stats(self) -> dict[str, EngineStats]:
        """Return the latest state of each model's engine."""

    def demand(self) -> dict[str, Demand]:
        """Return the current load of each model."""

    def on_step(self, observe: Callable[[StepStats], None]) -> None:
        """Call `observe` for every step of every engine, from any thread (metrics)."""


# -- What a model can be loaded from: the interface between the service and the reading of folders and downloads.
# `service.runtimes.model_reader` implements it; tests of HTTP semantics have one that reads nothing.


class ModelReader(Protocol):
    """Reads models, except their weights, which the engine reads."""

    async def locate(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec with a folder of this machine as its path, after a download if there has to be one.

        Raises `ConfigError`. Cancelling ends the download.
        """

    async def read(self, spec: ModelSpec) -> ServedModel:
        """Read the checkpoint's description, tokenizer and chat template from its folder; raises `ConfigError`."""
