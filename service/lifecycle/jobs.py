"""Jobs: requests that an engine has accepted. Each ends exactly once, and can be cancelled by id.

A `Job` is opened when the engine accepts a request, and closed in one `finally`. Closing it sets its outcome and
releases its resources in the engine. A drain waits for all jobs, and for requests that are still being planned.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

from triptych.model.api.request import FinishReason, Timings
from triptych.service.core.engine_client import EngineClient
from triptych.service.core.errors import ApiError
from triptych.service.core.request_context import RequestContext
from triptych.service.observability.metrics import Metrics
from triptych.service.observability.telemetry import Telemetry
from triptych.service.tenants.tenancy import Tenancy

_BY_SEVERITY = (
    FinishReason.ERROR,
    FinishReason.CANCELLED,
    FinishReason.DEADLINE,
    FinishReason.LENGTH,
    FinishReason.STOP,
)


class Closable(Protocol):
    """A stream of an engine, which the job closes."""

    async def aclose(self) -> None: ...


def combined_outcome(reasons: list[FinishReason]) -> FinishReason:
    """Return the outcome of a request whose sequences ended for different reasons."""
    return next((reason for reason in _BY_SEVERITY if reason in reasons), FinishReason.CANCELLED)


class Job:
    """One accepted HTTP request. Times are of `time.monotonic()`."""

    def __init__(
        self,
        context: RequestContext,
        engine_ids: tuple[str, ...],
        owner: Jobs,
        stream: Closable | None,
    ) -> None:
        self.request_id = context.request_id
        self.engine_ids = engine_ids
        self.created = int(time.time())
        self.outcome: FinishReason | None = None
        self.goes_on = False  # whether more requests to the engine follow, until there is an outcome
        self.is_cancelled = False  # whether no more requests may follow
        self.context = context
        self._owner = owner
        self._stream = stream
        self._closed = False
        self._scheduled: float | None = None
        self._first: float | None = None
        self._ended: float | None = None
        self._timings: Timings | None = None  # None until the job has ended

    def observe(self, scheduled: float | None, now: float) -> None:
        """Record an output. Prefill lasts from the earliest time in `scheduled` to the first output."""
        if scheduled is not None:
            self._scheduled = scheduled if self._scheduled is None else min(self._scheduled, scheduled)
        if self._first is None:
            self._first = now
            self.context.running = self._owner.running(self.context.model)

    def end(self, outcome: FinishReason) -> None:
        """Set the outcome; only the first call counts."""
        if self.outcome is None:
            self.outcome = outcome
            self._ended = time.monotonic()

    def fail(self) -> None:
        """Count the request as an error, also if its outputs are complete: its client gets no reply."""
        self.end(FinishReason.ERROR)
        self.outcome = FinishReason.ERROR

    async def __aenter__(self) -> Job:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the job; an exception that is no `ApiError` is a fault of ours."""
        if isinstance(error, Exception) and not isinstance(error, ApiError):
            self.fail()
        await self.aclose()

    async def aclose(self) -> None:
        """Release the engine's resources and count the request; without an outcome it is cancelled. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._stream is not None:
                await self._stream.aclose()
        finally:
            self.end(FinishReason.CANCELLED)
            self._owner.close(self)

    def timings(self) -> Timings:
        """Divide the time until the end, or until now, into queue, prefill and decode; no part is negative."""
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
    """All accepted requests that have not ended, and the number of requests in progress."""

    def __init__(
        self, client: EngineClient, metrics: Metrics, telemetry: Telemetry | None = None, tenants: Tenancy | None = None
    ) -> None:
        self._client = client
        self._tenants = tenants
        self._metrics = metrics
        self._telemetry = telemetry
        self._running: dict[Job, None] = {}
        self._in_progress = 0  # requests being handled, with or without a job
        self._given_up = False
        self._idle = asyncio.Event()
        self._idle.set()

    def in_progress(self) -> AbstractContextManager[None]:
        """Return a block in which a request is handled: `wait_idle` waits for its end."""
        return _InProgress(self)

    def begin(self) -> None:
        """Count a request that is being handled; see `in_progress`."""
        self._in_progress += 1
        self._idle.clear()

    def finish(self) -> None:
        """Count a request that is no longer being handled."""
        self._in_progress -= 1
        self._set_idle_if_done()

    @property
    def given_up(self) -> bool:
        """Whether `give_up` was called; no new job may be opened then."""
        return self._given_up

    async def reserve(self, context: RequestContext, output_tokens: int = 0) -> None:
        """Reserve the tokens of a request in its key's quota, before it is submitted; raises an `ApiError` 429."""
        if self._tenants is not None and context.tenant.tokens_per_minute is not None:
            await self._tenants.quotas.reserve(context, output_tokens)

    def open(self, context: RequestContext, engine_ids: tuple[str, ...], stream: Closable | None = None) -> Job:
        """Open a job for a request that an engine has or will get. The caller closes it."""
        job = Job(context, engine_ids, self, stream)
        self._running[job] = None
        self._idle.clear()
        return job

    def accept(self, job: Job) -> None:
        """Record that the engine has accepted the request, so that it can no longer be rejected."""
        job.context.accepted = True
        self._metrics.accepted(job.context)

    def cancel(self, request_id: str) -> int:
        """Cancel the running requests with this public id and return their number."""
        found = [job for job in self._running if job.request_id == request_id]
        return sum(self._cancel(job) for job in found)

    def give_up(self) -> None:
        """Cancel all jobs, and stop waiting for requests that have no job yet."""
        self._given_up = True
        for job in list(self._running):
            self._cancel(job)
        self._set_idle_if_done()

    def _cancel(self, job: Job) -> bool:
        """Cancel a job in the engine; return whether it was running, or would have gone on."""
        ended = any([self._client.cancel(engine) for engine in job.engine_ids])
        if job.goes_on and job.outcome is None:
            ended = job.is_cancelled = True
        return ended

    async def wait_idle(self) -> None:
        """Wait until no request is in progress; after `give_up`, until no job is left."""
        await self._idle.wait()

    def __len__(self) -> int:
        return len(self._running)

    def running(self, model: str) -> int:
        """Return the number of sequences of a model that its engine computes."""
        return self._client.num_running(model)

    def close(self, job: Job) -> None:
        """Count a job that has ended; only the job calls this."""
        self._running.pop(job, None)
        if job.context.accepted and job.outcome is not None:
            job.context.outcome = job.outcome.value
            timings = job.timings()
            if self._tenants is not None:
                seconds = (timings.prefill_ms + timings.decode_ms) / 1000 if job.has_output else 0.0
                self._tenants.ended(job.context, job.outcome.value, seconds)
            if job.has_output:
                job.context.phases_ms = (timings.queue_ms, timings.prefill_ms, timings.decode_ms)
            self._metrics.ended(job.context, job.outcome, timings, job.has_output)
            if self._telemetry is not None:
                self._telemetry.ended(job.context, job.outcome, timings, job.has_output)
        self._set_idle_if_done()

    def _set_idle_if_done(self) -> None:
        if not self._running and (self._given_up or not self._in_progress):
            self._idle.set()


class _InProgress(AbstractContextManager[None]):
    """A block in which a request is handled. As a class it passes exceptions faster than a generator does."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def __enter__(self) -> None:
        self._jobs.begin()

    def __exit__(self, *_: object) -> None:
        self._jobs.finish()


def _milliseconds(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)
