"""Jobs: requests that an engine has accepted. Each ends exactly once, and can be cancelled by id.

A `Job` is opened when the engine accepts a request, and closed in one `finally`. It then has one outcome, and its
resources in the engine are released. A drain waits for all jobs, and for requests that are still being planned.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from model.api.request import FinishReason, Timings
from service.core.engine_client import EngineClient
from service.core.request_context import RequestContext
from service.observability.metrics import Metrics
from service.observability.tracing import Tracer

_BY_SEVERITY = (
    FinishReason.ERROR,
    FinishReason.CANCELLED,
    FinishReason.DEADLINE,
    FinishReason.LENGTH,
    FinishReason.STOP,
)


class Closable(Protocol):
    """What a job has of the engine."""

    async def aclose(self) -> None: ...


def combined_outcome(reasons: list[FinishReason]) -> FinishReason:
    """Return the outcome of a request whose sequences ended for different reasons."""
    return next((reason for reason in _BY_SEVERITY if reason in reasons), FinishReason.CANCELLED)


class Job:
    """Follows one accepted HTTP request. Times are of `time.monotonic()`."""

    def __init__(
        self,
        context: RequestContext,
        engine_ids: tuple[str, ...],
        on_close: Callable[[Job], None],
        stream: Closable | None,
    ) -> None:
        self.request_id = context.request_id
        self.engine_ids = engine_ids
        self.created = int(time.time())
        self.outcome: FinishReason | None = None
        self.goes_on = False  # with further requests to the engine, until it has an outcome
        self.is_cancelled = False  # no further ones then
        self.context = context
        self._on_close = on_close
        self._stream = stream
        self._closed = False
        self._scheduled: float | None = None
        self._first: float | None = None
        self._ended: float | None = None
        self._timings: Timings | None = None  # once it has ended

    def observe(self, scheduled: float | None, now: float) -> None:
        """Record an output; the first ones determine when computation began and when its first result came."""
        if scheduled is not None:
            self._scheduled = scheduled if self._scheduled is None else min(self._scheduled, scheduled)
        if self._first is None:
            self._first = now

    def end(self, outcome: FinishReason) -> None:
        """Set the outcome; only the first call counts."""
        if self.outcome is None:
            self.outcome = outcome
            self._ended = time.monotonic()

    async def aclose(self) -> None:
        """Release the engine's resources and count the request; one without an outcome is cancelled. Idempotent."""
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
        """Divide the time until now, or until the end, into queue, prefill and decode; no part is negative."""
        if self._timings is not None:
            return self._timings
        arrival, now = self.context.started, self._ended or time.monotonic()
        first = now if self._first is None else self._first
        scheduled = first if self._scheduled is None else min(max(self._scheduled, arrival), first)
        found = Timings(
            queue_ms=_milliseconds(scheduled - arrival),
            prefill_ms=_milliseconds(first - scheduled),
            decode_ms=_milliseconds(now - first),
            ttft_ms=_milliseconds(first - arrival),
            total_ms=_milliseconds(now - arrival),
        )
        if self._ended is not None:
            self._timings = found
        return found

    @property
    def has_output(self) -> bool:
        return self._first is not None


class Jobs:
    """Holds all accepted requests that have not ended, and counts those that are being planned."""

    def __init__(self, client: EngineClient, metrics: Metrics, tracer: Tracer | None = None) -> None:
        self._client = client
        self._metrics = metrics
        self._tracer = tracer
        self._running: dict[Job, None] = {}
        self._in_progress = 0  # requests being handled, with a job or not yet
        self._given_up = False
        self._idle = asyncio.Event()
        self._idle.set()

    def in_progress(self) -> AbstractContextManager[None]:
        """Handle a request inside the block: `wait_idle` waits for it, since planning may take seconds."""
        return _InProgress(self)

    def begin(self) -> None:
        """Count a request that is being handled; see `in_progress`."""
        self._in_progress += 1
        self._idle.clear()

    def finish(self) -> None:
        """Count it no longer."""
        self._in_progress -= 1
        self._set_idle_if_done()

    @property
    def given_up(self) -> bool:
        """Whether `give_up` was called; no new job may be opened then."""
        return self._given_up

    def open(self, context: RequestContext, engine_ids: tuple[str, ...], stream: Closable | None = None) -> Job:
        """Open a job for a request that an engine has, or is about to get. The caller closes it."""
        job = Job(context, engine_ids, self._close, stream)
        self._running[job] = None
        self._idle.clear()
        return job

    def accept(self, job: Job) -> None:
        """Record that the engine has accepted the request, which can no longer be rejected."""
        job.context.accepted = True
        self._metrics.accepted(job.context)

    def cancel(self, request_id: str) -> int:
        """Cancel the running requests with this public id and return how many there were."""
        found = [job for job in self._running if job.request_id == request_id]
        return sum(self._cancel(job) for job in found)

    def give_up(self) -> None:
        """Cancel all jobs, and stop waiting for requests that have no job yet."""
        self._given_up = True
        for job in list(self._running):
            self._cancel(job)
        self._set_idle_if_done()

    def _cancel(self, job: Job) -> bool:
        """Cancel a job in the engine; return whether it goes on there, or would have."""
        ended = any([self._client.cancel(engine) for engine in job.engine_ids])
        if job.goes_on and job.outcome is None:
            ended = job.is_cancelled = True
        return ended

    async def wait_idle(self) -> None:
        """Wait until no request is in progress; after `give_up`, until no job is left."""
        await self._idle.wait()

    def __len__(self) -> int:
        return len(self._running)

    def _close(self, job: Job) -> None:
        self._running.pop(job, None)
        if job.context.accepted and job.outcome is not None:
            job.context.outcome = job.outcome.value
            timings = job.timings()
            self._metrics.ended(job.context, job.outcome, timings, job.has_output)
            if self._tracer is not None:
                self._tracer.ended(job.context, job.outcome, timings, job.has_output)
        self._set_idle_if_done()

    def _set_idle_if_done(self) -> None:
        if not self._running and (self._given_up or not self._in_progress):
            self._idle.set()


class _InProgress(AbstractContextManager[None]):
    """A request that is being handled; no generator, through which the exceptions of refusals would have to pass."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def __enter__(self) -> None:
        self._jobs.begin()

    def __exit__(self, *_: object) -> None:
        self._jobs.finish()


def _milliseconds(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)
