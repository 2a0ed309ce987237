"""A cache of results of /encode, which also merges equal computations in flight.

`CachingClient` wraps another engine client. The key of a result is everything that it depends on: the model, the
input's tokens or pixels, and every field of the `EncodeRequest` except its id and times. API keys share nothing, as in
the prefix cache: the time of an answer would reveal what another key has sent.

    kept        answered at once
    in flight   requests wait for the same computation, each until its own deadline or cancellation; the computation
                is aborted when no request waits for it
    neither     computed by the engine, with admission control as without a cache

A failure is not kept; all requests that waited get the error. Results are dropped at an unload, a load or a restart of
the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Protocol

from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import EncodeOutput, EncodeRequest, FinishReason, Request
from triptych.model.api.stats import Demand, EngineStats, Health, ModelInfo, StepStats
from triptych.model.errors import EngineDeadError
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.core.engine_client import EngineClient, GenerationStream
from triptych.service.core.request_context import tenant_id

ENTRY_BYTES = 1_024  # of an entry in addition to its numbers: key, digest, links
_FIELDS = tuple(
    one.name for one in fields(EncodeRequest) if one.name not in ("request_id", "source", "arrival_time", "deadline")
)

Key = tuple[Hashable, ...]


class CacheObserver(Protocol):
    """A counter of lookups and sizes of the cache (`triptych.service.observability.metrics.Metrics`)."""

    def cache_lookups(self, model: str, *, kept: int, in_flight: int, computed: int) -> None: ...

    def cache_size(self, model: str, size: int) -> None: ...


class ResultStore:
    """The kept results of all models, within a number of bytes; the least recently used are evicted first."""

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
        """Keep a result unless it is larger than the whole store."""
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
        """The bytes of all results."""
        return self._size

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(eq=False, slots=True)
class _Computation:
    """A computation of the engine and its waiters; the request has the id of the first waiter and no deadline."""

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
    """An `EngineClient` that answers `encode` from a cache if it can, and else passes calls on to another client."""

    def __init__(self, client: EngineClient, max_bytes: int, observer: CacheObserver) -> None:
        self._client = client
        self.store = ResultStore(max_bytes)
        self._observer = observer
        self._in_flight: dict[Key, _Computation] = {}
        self._waiters: dict[str, _Waiter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._restarts = client.restarts

    async def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeOutput]:
        """Encode as `EngineClient.encode` does; also raises the error of a computation that it waits for."""
        self._notice_restart()
        found: list[EncodeOutput | _Waiter] = []
        begun: list[_Computation] = []
        tenant = tenant_id()
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
        """End the wait of this request only; a request that does not wait is cancelled by the other client."""
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
        """Start timers that end the wait of each request at its deadline."""
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
        """Stop waiting; a computation without waiters is aborted, and no request joins it. Idempotent."""
        self._waiters.pop(waiter.request_id, None)
        if waiter.result.done() and not waiter.result.cancelled():
            waiter.result.exception()  # mark it as seen: another waiter's error is raised
        computation = waiter.computation
        if waiter in computation.waiters:
            computation.waiters.discard(waiter)
            if not computation.waiters and self._remove(computation):
                self._client.cancel(computation.request.request_id)

    def _remove(self, computation: _Computation) -> bool:
        """Let no further request join a computation; False if another one has its place."""
        if self._in_flight.get(computation.key) is not computation:
            return False
        del self._in_flight[computation.key]
        return True

    # -- computing

    async def _compute(self, computations: Sequence[_Computation]) -> None:
        """Run computations as one request to the engine, and give all waiters the result or the error."""
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
        """Drop the results of a model; computations in flight still reach their waiters, but are not kept."""
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

    # -- passed on to the other client

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

    def check_room(self, model: str, sequences: int = 1, tenant: str = "") -> None:
        self._client.check_room(model, sequences, tenant)

    def submit(self, requests: Sequence[Request]) -> GenerationStream:
        return self._client.submit(requests)

    def health(self) -> Health:
        return self._client.health()

    def resident_memory(self) -> int:
        return self._client.resident_memory()

    def stats(self) -> dict[str, EngineStats]:
        return self._client.stats()

    def num_running(self, model: str) -> int:
        return self._client.num_running(model)

    def demand(self) -> dict[str, Demand]:
        return self._client.demand()

    def on_step(self, observe: Callable[[StepStats], None]) -> None:
        self._client.on_step(observe)


def _key(tenant: str, request: EncodeRequest) -> Key:
    """Return the tenant and everything that the result depends on, long values as digests."""
    return (tenant, request.source.digest, *(_short(getattr(request, name)) for name in _FIELDS))


def _short(value: Hashable) -> Hashable:
    """Return the digest of a tuple, which a client can make long, and any other value unchanged."""
    if not isinstance(value, tuple) or not value:
        return value
    return blake2b(repr(value).encode(), digest_size=32).digest()


def _size(output: EncodeOutput) -> int:
    return len(output.data) + len(output.indices) + ENTRY_BYTES
