"""Results of /encode that are kept, and computed once for all who ask for them at the same time.

`CachingClient` stands in front of another engine client. A result is found by everything that it depends on: the model,
the input's tokens or pixels, and every field of the `EncodeRequest` but its id and times. API keys share nothing, as
in the prefix cache: whether an answer comes at once would tell one what another has sent.

    kept        answered at once
    in flight   whoever asks waits for the same computation, each until its own deadline or cancellation; it is
                aborted when nobody waits any more
    neither     computed by the engine, with admission control as without a cache

What failed is not kept, and all who waited get the error. Nothing is kept over an unload, a load or a restart of the
engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Protocol

from model.api.messages import ModelSpec
from model.api.request import EncodeOutput, EncodeRequest, FinishReason, Request
from model.api.stats import Demand, EngineStats, Health, ModelInfo, StepStats
from model.errors import EngineDeadError
from model.text.tokenizer import Tokenizer
from service.core.engine_client import EngineClient, GenerationStream
from service.core.request_context import current

ENTRY_BYTES = 1_024  # of an entry beside its numbers: key, digest, links
_FIELDS = tuple(
    one.name for one in fields(EncodeRequest) if one.name not in ("request_id", "source", "arrival_time", "deadline")
)

Key = tuple[Hashable, ...]


class CacheObserver(Protocol):
    """Counts what the cache does (`service.observability.metrics.Metrics`)."""

    def cache_lookups(self, model: str, *, kept: int, in_flight: int, computed: int) -> None: ...

    def cache_size(self, model: str, size: int) -> None: ...


class ResultStore:
    """Keeps results within a number of bytes, all models' together; the least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.sizes: dict[str, int] = defaultdict(int)  # bytes, by model
        self._entries: OrderedDict[Key, tuple[str, EncodeOutput]] = OrderedDict()
        self._size = 0

    def get(self, key: Key) -> EncodeOutput | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[1]

    def put(self, key: Key, model: str, output: EncodeOutput) -> None:
        """Keep a result, unless it is larger than all the room."""
        if key in self._entries or _size(output) > self.max_bytes:
            return
        self._entries[key] = (model, output)
        self._add(model, _size(output))
        while self._size > self.max_bytes:
            _, (oldest_model, oldest) = self._entries.popitem(last=False)
            self._add(oldest_model, -_size(oldest))

    def forget(self, model: str) -> None:
        """Drop the results of one model."""
        for key in [key for key, (owner, _) in self._entries.items() if owner == model]:
            del self._entries[key]
        self._add(model, -self.sizes[model])

    def _add(self, model: str, size: int) -> None:
        self.sizes[model] += size
        self._size += size

    @property
    def size(self) -> int:
        """The bytes of everything that is kept."""
        return self._size

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(eq=False, slots=True)
class _Computation:
    """What the engine computes for everybody who waits for it; its request has the id of the first and no deadline."""

    key: Key
    request: EncodeRequest
    waiters: set[_Waiter] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _Waiter:
    """One input of one request that waits for a computation."""

    request_id: str
    result: asyncio.Future[EncodeOutput]
    computation: _Computation

    def end(self, reason: FinishReason) -> None:
        if not self.result.done():
            self.result.set_result(EncodeOutput(self.request_id, finish_reason=reason))


class CachingClient:
    """An `EngineClient` that answers `encode` from a cache where it can; everything else is the other client's."""

    def __init__(self, client: EngineClient, max_bytes: int, observer: CacheObserver) -> None:
        self._client = client
        self.store = ResultStore(max_bytes)
        self._observer = observer
        self._in_flight: dict[Key, _Computation] = {}
        self._waiters: dict[str, _Waiter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._restarts = client.restarts

    async def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeOutput]:
        """As `EngineClient.encode`; also raises what a computation fails with that it waits for."""
        self._notice_restart()
        found: list[EncodeOutput | _Waiter] = []
        begun: list[_Computation] = []
        context = current()
        tenant = "" if context is None else context.tenant
        for request in requests:
            key = _key(tenant, request)
            kept = self.store.get(key)
            if kept is not None:
                found.append(replace(kept, request_id=request.request_id, scheduled_time=None))
                continue
            computation = self._in_flight.get(key)
            if computation is None:
                computation = self._in_flight[key] = _Computation(key, replace(request, deadline=None))
                begun.append(computation)
            found.append(self._wait_for(computation, request))
        waiters = [one for one in found if isinstance(one, _Waiter)]
        self._count(requests[0].model, len(requests), len(waiters), len(begun))
        if begun:
            task = asyncio.create_task(self._compute(begun))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        timers = self._deadlines(requests)
        try:
            return [await one.result if isinstance(one, _Waiter) else one for one in found]
        finally:
            for timer in timers:
                timer.cancel()
            for waiter in waiters:
                self._leave(waiter)

    def cancel(self, request_id: str) -> bool:
        """End the waiting of this request alone, or as the other client does."""
        waiter = self._waiters.get(request_id)
        if waiter is None:
            return self._client.cancel(request_id)
        self._end(waiter, FinishReason.CANCELLED)
        return True

    async def load(self, spec: ModelSpec, tokenizer: Tokenizer | None) -> ModelInfo:
        self.forget(spec.name)
        return await self._client.load(spec, tokenizer)

    async def unload(self, name: str, *, drain_seconds: float = 0.0) -> None:
        try:
            await self._client.unload(name, drain_seconds=drain_seconds)
        finally:
            self.forget(name)

    # -- waiting

    def _wait_for(self, computation: _Computation, request: EncodeRequest) -> _Waiter:
        waiter = _Waiter(request.request_id, asyncio.get_running_loop().create_future(), computation)
        computation.waiters.add(waiter)
        self._waiters[request.request_id] = waiter
        return waiter

    def _deadlines(self, requests: Sequence[EncodeRequest]) -> list[asyncio.TimerHandle]:
        """End the waiting of each request at its deadline."""
        ids: dict[float, list[str]] = defaultdict(list)
        for request in requests:
            if request.deadline is not None and request.request_id in self._waiters:
                ids[request.deadline].append(request.request_id)
        loop, now = asyncio.get_running_loop(), time.monotonic()
        return [loop.call_later(deadline - now, self._expire, late) for deadline, late in ids.items()]

    def _expire(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            waiter = self._waiters.get(request_id)
            if waiter is not None:
                self._end(waiter, FinishReason.DEADLINE)

    def _end(self, waiter: _Waiter, reason: FinishReason) -> None:
        waiter.end(reason)
        self._leave(waiter)

    def _leave(self, waiter: _Waiter) -> None:
        """Wait no longer; a computation that nobody waits for is aborted, and nobody joins it. Idempotent."""
        self._waiters.pop(waiter.request_id, None)
        if waiter.result.done() and not waiter.result.cancelled():
            waiter.result.exception()  # another one's is raised, so this one's need not be
        computation = waiter.computation
        if waiter in computation.waiters:
            computation.waiters.discard(waiter)
            if not computation.waiters and self._remove(computation):
                self._client.cancel(computation.request.request_id)

    def _remove(self, computation: _Computation) -> bool:
        """Let nobody else join a computation; False if another one is in its place."""
        if self._in_flight.get(computation.key) is not computation:
            return False
        del self._in_flight[computation.key]
        return True

    # -- computing

    async def _compute(self, computations: Sequence[_Computation]) -> None:
        """Run computations as one request to the engine, and give everybody who waits the result or the error."""
        wanted = [one for one in computations if one.waiters]
        if not wanted:
            return
        try:
            outputs = await self._client.encode([one.request for one in wanted])
        except asyncio.CancelledError:
            self._fail(wanted, EngineDeadError("the engine is shut down"))
            raise
        except Exception as error:
            self._fail(wanted, error)
            return
        for one, output in zip(wanted, outputs, strict=True):
            if self._remove(one) and output.finish_reason is FinishReason.STOP:
                self.store.put(one.key, one.request.model, output)
            for waiter in one.waiters:
                if not waiter.result.done():
                    waiter.result.set_result(replace(output, request_id=waiter.request_id))
            one.waiters.clear()
        self._show_sizes()

    def _fail(self, computations: Sequence[_Computation], error: Exception) -> None:
        for one in computations:
            self._remove(one)
            for waiter in one.waiters:
                if not waiter.result.done():
                    waiter.result.set_exception(error)
            one.waiters.clear()

    def forget(self, model: str) -> None:
        """Drop what is known of a model; what is being computed reaches who waits for it, and is not kept."""
        self.store.forget(model)
        for computation in [one for one in self._in_flight.values() if one.request.model == model]:
            self._remove(computation)
        self._show_sizes()

    def _notice_restart(self) -> None:
        """Drop everything after a restart of the engine, which has read all weights again."""
        if self._restarts != self._client.restarts:
            self._restarts = self._client.restarts
            for model in list(self.store.sizes):
                self.forget(model)

    def _count(self, model: str, inputs: int, waiting: int, computed: int) -> None:
        self._observer.cache_lookups(model, kept=inputs - waiting, in_flight=waiting - computed, computed=computed)

    def _show_sizes(self) -> None:
        for model, size in self.store.sizes.items():
            self._observer.cache_size(model, size)

    # -- the other client's

    @property
    def models(self) -> dict[str, ModelInfo]:
        return self._client.models

    @property
    def restarts(self) -> int:
        return self._client.restarts

    async def start(self) -> None:
        await self._client.start()

    async def close(self) -> None:
        await self._client.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check_room(self, model: str, sequences: int = 1) -> None:
        self._client.check_room(model, sequences)

    def submit(self, requests: Sequence[Request]) -> GenerationStream:
        return self._client.submit(requests)

    def health(self) -> Health:
        return self._client.health()

    def stats(self) -> dict[str, EngineStats]:
        return self._client.stats()

    def demand(self) -> dict[str, Demand]:
        return self._client.demand()

    def on_step(self, observe: Callable[[StepStats], None]) -> None:
        self._client.on_step(observe)


def _key(tenant: str, request: EncodeRequest) -> Key:
    """Return everything that the result depends on, and whose it is: of what may be long, a digest."""
    return (tenant, request.source.digest, *(_short(getattr(request, name)) for name in _FIELDS))


def _short(value: Hashable) -> Hashable:
    """Return a digest of a list's values, which a client may make long, and anything else as it is."""
    if not isinstance(value, tuple) or not value:
        return value
    return blake2b(repr(value).encode(), digest_size=32).digest()


def _size(output: EncodeOutput) -> int:
    return len(output.data) + len(output.indices) + ENTRY_BYTES
