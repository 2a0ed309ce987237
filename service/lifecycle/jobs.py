"""The requests that engines have accepted: each ends exactly once, can be cancelled by id, and is waited for in a
drain, as is what was taken and is still being planned.

A `Job` is opened when the engine took the work and closed from one `finally`; whatever happened in between, it then
has one outcome, and what it held of the engine is released.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from model.api.request import FinishReason, Timings
from service.core.engine_client import EngineClient, GenerationStream
from service.core.request_context import RequestContext
from service.observability.metrics import Metrics
from service.observability.tracing import Tracer

_WORST_FIRST = (
    FinishReason.ERROR,
    FinishReason.CANCELLED,
    FinishReason.DEADLINE,
    FinishReason.LENGTH,
    FinishReason.STOP,
)


def worst(reasons: list[FinishReason]) -> FinishReason:
    """The one outcome of a request whose sequences ended in several ways."""
    return next((reason for reason in _WORST_FIRST if reason in reasons), FinishReason.CANCELLED)


class Job:
    """One accepted HTTP request. Times are of `time.monotonic()`."""

    def __init__(
        self,
        context: RequestContext,
        engine_ids: tuple[str, ...],
        on_close: Callable[[Job], None],
        stream: GenerationStream | None,
    ) -> None:
        self.request_id = context.request_id
        self.engine_ids = engine_ids
        self.created = int(time.time())
        self.outcome: FinishReason | None = None
        self.context = context
        self._on_close = on_close
        self._stream = stream
        self._closed = False
        self._scheduled: float | None = None
        self._first: float | None = None
        self._ended: float | None = None

    def observe(self, scheduled: float | None, now: float) -> None:
        """An output came: the first ones fix when computing began and when it first showed."""
        if scheduled is not None:
            self._scheduled = scheduled if self._scheduled is None else min(self._scheduled, scheduled)
        if self._first is None:
            self._first = now

    def end(self, outcome: FinishReason) -> None:
        """Say how it ended; the first call counts."""
        if self.outcome is None:
            self.outcome = outcome
            self._ended = time.monotonic()

    async def aclose(self) -> None:
        """Release the engine and account for the request; not ended by now, it was cancelled. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._stream is not None:
                await self._stream.aclose()
        finally:
            self.end(FinishReason.CANCELLED)
            self._on_close(self)

    def timings(self) -> Timings:
        """Where the time went until now, or until its end; no part is negative."""
        arrival, now = self.context.started, self._ended or time.monotonic()
        first = now if self._first is None else self._first
        scheduled = first if self._scheduled is None else min(max(self._scheduled, arrival), first)
        return Timings(
            queue_ms=_milliseconds(scheduled - arrival),
            prefill_ms=_milliseconds(first - scheduled),
            decode_ms=_milliseconds(now - first),
            ttft_ms=_milliseconds(first - arrival),
            total_ms=_milliseconds(now - arrival),
        )

    @property
    def has_output(self) -> bool:
        return self._first is not None


class Jobs:
    """All accepted requests that have not ended, and how many are on their way to be some."""

    def __init__(self, client: EngineClient, metrics: Metrics, tracer: Tracer | None = None) -> None:
        self._client = client
        self._metrics = metrics
        self._tracer = tracer
        self._running: dict[Job, None] = {}
        self._taken = 0  # requests that are being worked on, with a job or without one yet
        self._given_up = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Work on a request that is not refused any more: planning it may take seconds, and until the block ends
        `wait_idle` waits for it as for a job.
        """
        self._taken += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._taken -= 1
            self._rest()

    @property
    def given_up(self) -> bool:
        """What is no job yet must not become one."""
        return self._given_up

    def open(self, context: RequestContext, engine_ids: tuple[str, ...], stream: GenerationStream | None = None) -> Job:
        """Work that an engine has (`accept` it then) or is about to get. The caller closes the job."""
        job = Job(context, engine_ids, self._close, stream)
        self._running[job] = None
        self._idle.clear()
        return job

    def accept(self, job: Job) -> None:
        """The engine took the work: it can no longer be rejected."""
        job.context.accepted = True
        self._metrics.accepted(job.context)

    def cancel(self, request_id: str) -> int:
        """End the running requests of this public id; how many there were."""
        found = [job for job in self._running if job.request_id == request_id]
        return sum(any([self._client.cancel(engine) for engine in job.engine_ids]) for job in found)

    def give_up(self) -> None:
        """Cancel all jobs; for what is none yet nobody waits any more."""
        self._given_up = True
        for job in list(self._running):
            for engine in job.engine_ids:
                self._client.cancel(engine)
        self._rest()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def __len__(self) -> int:
        return len(self._running)

    def _close(self, job: Job) -> None:
        self._running.pop(job, None)
        if job.context.accepted and job.outcome is not None:
            job.context.outcome = job.outcome.value
            self._metrics.ended(job.context, job.outcome, job.timings(), job.has_output)
            if self._tracer is not None:
                self._tracer.ended(job.context, job.outcome, job.timings(), job.has_output)
        self._rest()

    def _rest(self) -> None:
        if not self._running and (self._given_up or not self._taken):
            self._idle.set()


def _milliseconds(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)
