"""The interface between the HTTP application and the engines.

`model.client.async_engine.AsyncEngine` implements it, with engines in a child process or a thread;
`service.core.fake_engine.FakeEngineClient` is a scripted implementation for tests of HTTP semantics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from model.api.request import EncodeOutput, EncodeRequest, Request, TokenOutput
from model.api.stats import Demand, EngineStats, Health, ModelInfo, StepStats


class GenerationStream(Protocol):
    """Iterates over the outputs of the requests of one `submit`, in any order, until all their sequences have ended.

    Every output has its `text` filled (a delta); each of the `params.n` sequences of each request gets one output
    with a `finish_reason`, its last. Raises `EngineDeadError` from `__anext__` at any time.
    """

    def __aiter__(self) -> GenerationStream: ...

    async def __anext__(self) -> TokenOutput: ...

    async def aclose(self) -> None:
        """Abort what has not ended, within one step. Idempotent; nothing may be iterated at the time."""


class EngineClient(Protocol):
    """Runs requests on the engines of one or more models. Request ids are unique among running requests."""

    @property
    def models(self) -> dict[str, ModelInfo]:
        """The loaded models by name; empty until `start` has returned."""

    @property
    def restarts(self) -> int:
        """The number of times that failed engines were restarted, over all models."""

    async def start(self) -> None:
        """Load every model; raises `ConfigError` or `EngineDeadError`."""

    async def close(self) -> None:
        """Fail whatever still runs and release the engines. Idempotent."""

    def check_room(self, model: str, sequences: int = 1) -> None:
        """Raise what `submit` and `encode` would raise for so many sequences, before any preparation."""

    def submit(self, requests: Sequence[Request]) -> GenerationStream:
        """Queue all of `requests` at once, or raise `QueueFullError` or `EngineGoneError` with none queued."""

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
