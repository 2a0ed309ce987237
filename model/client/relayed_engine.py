"""The engine client of a worker: an `AsyncEngine` whose loop is at the other end of a relay (`model.client.relay`).

Streams, admission and deadlines are those of `AsyncEngine`. Models are loaded, unloaded and restarted by the hub, which
tells of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from model.api.messages import Commands, Events, ModelSpec
from model.api.request import EncodeOutput, FinishReason, TokenOutput
from model.api.stats import Demand, EngineStats, Health, ModelInfo
from model.client.async_engine import AsyncEngine
from model.client.counts import Counts
from model.errors import EngineGoneError
from model.text.tokenizer import Tokenizer


class RelayTransport:
    """Gives commands to the connection to the hub."""

    def __init__(self, send: Callable[[Commands], None]) -> None:
        self.send = send

    async def start(self, on_events: Callable[[Events], None], on_lost: Callable[[str], None]) -> None:
        """The connection is there before; what comes over it reaches the engine's methods."""

    def kill(self) -> bool:
        return False

    async def close(self) -> None:
        """The connection outlives the engine."""


class RelayedEngine(AsyncEngine):
    """Runs requests of this process on the engines of the hub."""

    def __init__(
        self,
        send: Callable[[Commands], None],
        ended: Callable[[str], None],
        counts: Callable[[str], Counts],
        max_unread_bytes: int = 1 << 20,
        stream_interval: float = 0.0,
        stall_seconds: float = 30.0,
    ) -> None:
        """`send` takes commands to the hub; `ended` is told each request that wants no more outputs.

        A hub that tells no health for `stall_seconds` counts as hung.
        """
        super().__init__(
            *((), lambda: RelayTransport(send), {}),
            max_unread_bytes=max_unread_bytes,
            stream_interval=stream_interval,
            stall_seconds=stall_seconds,
            counts=counts,
        )
        self._ended = ended
        self._health = Health(live=True, ready=False, reason="loading models")  # as the hub last told
        self._unready_reason = "loading models"

    async def start(self) -> None:
        """Watch deadlines from now on; models come by `adopt`."""
        self._transport = self._new_transport()
        self._spawn(self._watch())

    # -- what the hub tells

    def adopt(self, spec: ModelSpec, tokenizer: Tokenizer | None, info: ModelInfo | None) -> None:
        """Take requests for a model; `info` where it is loaded already."""
        self._table.adopt(spec, tokenizer, info)

    def drop(self, name: str) -> None:
        """Take no more requests for a model, which is being unloaded, and end those that it has as cancelled."""
        for stream in {stream for stream in self._streams.values() if stream.model == name}:
            stream.end(FinishReason.CANCELLED, abort_engine=True)
        for request, _ in list(self._encodes.values()):
            if request.model == name:
                self.cancel(request.request_id)
        self._table.served.pop(name, None)  # not before: it counts the requests that end

    def receive(
        self, tokens: Sequence[TokenOutput], encoded: Sequence[EncodeOutput], loaded: Sequence[ModelInfo]
    ) -> None:
        """Hand outputs to their streams, and note what models were loaded."""
        self._on_events(Events(tokens=list(tokens), encoded=list(encoded), loaded=list(loaded)))

    def ready(self) -> None:
        """Take requests."""
        self._unready_reason = ""

    def lost(self, reason: str) -> None:
        """Fail the requests of an engine that has gone, and refuse others until `ready`."""
        self._unready_reason = reason
        self._restarts += 1
        self._fail_all(reason)

    def set_health(self, health: Health) -> None:
        """Take the engine's health, which is told at least each second."""
        self._health = health
        self._last_events_time = time.monotonic()

    # -- as the service sees it

    async def load(self, spec: ModelSpec, tokenizer: Tokenizer | None) -> ModelInfo:
        raise EngineGoneError("models are loaded by the hub")

    async def unload(self, name: str, *, drain_seconds: float = 0.0) -> None:
        raise EngineGoneError("models are unloaded by the hub")

    def health(self) -> Health:
        silent = time.monotonic() - self._last_events_time
        if silent > self._stall_seconds:
            return Health(live=False, ready=False, reason=f"the hub has given no sign for {silent:.0f} s")
        reason = self._unready_reason
        if reason:
            return Health(self._health.live, ready=False, reason=self._health.reason or reason)
        return self._health

    def stats(self) -> dict[str, EngineStats]:
        """Nothing: the hub counts what the engines do."""
        return {}

    def demand(self) -> dict[str, Demand]:
        """Nothing: the hub counts the requests of all workers."""
        return {}

    def release(self, request_id: str) -> None:
        super().release(request_id)
        if self._pending.generate or self._pending.encode:
            self._flush()  # the relay would keep a request that it is told of after its end
        self._ended(request_id)

    def _hang_reason(self) -> str:
        return ""  # the hub watches the engine
