"""The interfaces of the HTTP application to the engines and to the reading of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import EncodeOutput, EncodeRequest, Request, TokenOutput
from triptych.model.api.stats import Demand, EngineStats, Health, ModelInfo, StepStats
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.core.models import ServedModel

# -- The interface to the engines. `triptych.model.client.async_engine.AsyncEngine` implements it with engines in a
# child process.


class GenerationStream(Protocol):
    """The outputs of the requests of one `submit`, in any order, until all their sequences have ended.

    The `text` of every output is set, as a delta. The last output of each of the `params.n` sequences of a request has
    a `finish_reason`. `__anext__` may raise `EngineDeadError` at any time.
    """

    def __aiter__(self) -> GenerationStream: ...

    async def __anext__(self) -> TokenOutput: ...

    async def aclose(self) -> None:
        """Abort all unfinished sequences within one step. Idempotent; must not be called during an iteration."""


@runtime_checkable
class ListenableStream(Protocol):
    """A `GenerationStream` that may also be read in callbacks."""

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` on the event loop whenever `take` has outputs, until the stream is closed."""

    def take(self) -> Sequence[TokenOutput]:
        """Return all outputs that are ready; raises `EngineDeadError`."""


class EngineClient(Protocol):
    """A client of the engines of one or more models; request ids are unique among running requests."""

    @property
    def models(self) -> dict[str, ModelInfo]:
        """The models that accept requests, by name; empty until `start` has returned."""

    @property
    def restarts(self) -> int:
        """The number of restarts of failed engines, of all models."""

    async def start(self) -> None:
        """Load the models that are served from the start, if any; raises `ConfigError` or `EngineDeadError`."""

    async def load(self, spec: ModelSpec, tokenizer: Tokenizer | None) -> ModelInfo:
        """Load a further model; it accepts requests once this returns.

        Models are loaded one at a time, in the order of the calls. A name that is being unloaded, or whose loading was
        cancelled, waits until that has ended. After an exception nothing has changed. Raises `ConfigError` for a model
        that cannot be served and for a name that is loaded or being loaded; `MemoryShortageError` if the model does not
        fit by its plan; `LoadFailedError` for any other cause; `EngineGoneError` if no engine runs; `EngineDeadError`
        if the engine is lost meanwhile. Cancelling this call stops the loading.
        """

    async def unload(self, name: str, *, drain_seconds: float = 0.0) -> None:
        """Unload a model; return when its memory is free.

        It accepts no further requests. Running ones have `drain_seconds` to end; then they end with
        `FinishReason.CANCELLED`. Raises `ModelNotLoadedError`. Cancelling this call does not stop the unloading. If the
        engine is lost meanwhile, the model is unloaded with it.
        """

    async def close(self) -> None:
        """Fail all running requests and release the engines. Idempotent."""

    def check_room(self, model: str, sequences: int = 1, tenant: str = "") -> None:
        """Raise the error that `submit` would raise for this number of sequences, or `encode` for an input (0).

        It is `ModelNotLoadedError`, `QueueFullError` or `EngineGoneError`.
        """

    def submit(self, requests: Sequence[Request]) -> GenerationStream:
        """Enqueue all `requests`, which are of one model, or enqueue none and raise as `check_room` does."""

    async def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeOutput]:
        """Return one output for each request, in order.

        Raises as `submit` does before any work, `EngineDeadError` later. Cancelling aborts all requests.
        """

    def cancel(self, request_id: str) -> bool:
        """End a running request of either kind with `FinishReason.CANCELLED`; False if no request has this id."""

    def health(self) -> Health:
        """Return whether the engines are alive and ready, and the reason if not."""

    def resident_memory(self) -> int:
        """Return the bytes that the engine process has in memory; 0 if none runs."""

    def stats(self) -> dict[str, EngineStats]:
        """Return the latest state of each model's engine."""

    def num_running(self, model: str) -> int:
        """Return the number of sequences that run in a model's engine, which computes those of its adapters too."""

    def demand(self) -> dict[str, Demand]:
        """Return the current load of each model."""

    def on_step(self, observe: Callable[[StepStats], None]) -> None:
        """Call `observe` for every step of every engine, from any thread (metrics)."""


# -- The interface to the reading and downloading of models. `triptych.service.runtimes.model_reader` implements it;
# tests of HTTP semantics use an implementation that reads nothing.


class ModelReader(Protocol):
    """A reader of models without their weights, which the engine reads."""

    async def locate(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec with a local folder as its path, and download the model first if necessary.

        Raises `ConfigError`. Cancelling stops the download.
        """

    async def read(self, spec: ModelSpec, base: ServedModel | None = None) -> ServedModel:
        """Read the checkpoint's description, tokenizer and chat template from its folder; raises `ConfigError`.

        The folder of an adapter is read with the model that it is for, `base`.
        """
