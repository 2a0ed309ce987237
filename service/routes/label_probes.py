"""Asks a generating model how likely tokens are after prompts: a prefill for each, in slices that leave others room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from triptych.model.api.request import FinishReason, Request
from triptych.model.api.sampling_params import Probe
from triptych.model.errors import EngineError, QueueFullError
from triptych.service.core.engine_client import EngineClient, GenerationStream
from triptych.service.core.errors import REFUSALS, ApiError, cancelled, deadline_passed, engine_failed, engine_refusal
from triptych.service.core.request_context import RequestContext
from triptych.service.lifecycle.jobs import Job, Jobs, combined_outcome
from triptych.service.planning.requests import engine_id

_ROOM_SECONDS = 0.05  # between looks for room in the queue
_SHARE = 2  # a slice has at most 1 / 2 of the sequences that the engine runs at once


def probing(request: Request, path: tuple[int, ...], token_ids: tuple[int, ...]) -> Request:
    """Return the request that asks how likely `token_ids` are after the prompt and `path`."""
    prompt = request.prompt_token_ids + path
    probe = Probe(len(prompt) - 1, token_ids)
    params = replace(request.params, max_tokens=1, min_tokens=0, num_beams=1, probe=probe)
    name = engine_id(request.request_id.rpartition("#")[0])
    return replace(request, request_id=name, prompt_token_ids=prompt, params=params)


class LabelProbes:
    """The probes of one HTTP request, which are one job; the engine gets a slice of them at a time.

    A full queue refuses the first slice. Later ones wait for room, since what was accepted is not refused any more.
    """

    def __init__(self, client: EngineClient, jobs: Jobs, context: RequestContext, max_num_seqs: int) -> None:
        self.cached_tokens = 0
        self._client, self._jobs, self._context = client, jobs, context
        self._slice = max(1, max_num_seqs // _SHARE)
        self._stream: GenerationStream | None = None
        self._job: Job | None = None

    async def run(self, requests: Sequence[Request]) -> list[list[float]]:
        """Return the log-probabilities that each request asks for; raises `ApiError`."""
        found: dict[str, list[float]] = {}
        try:
            for at in range(0, len(requests), self._slice):
                await self._run_slice(requests[at : at + self._slice], found)
            if self._job is not None:
                self._job.end(FinishReason.STOP)
        except EngineError:
            if self._job is not None:
                self._job.end(FinishReason.ERROR)
            raise engine_failed() from None
        except Exception as error:
            if self._job is not None and not isinstance(error, ApiError):
                self._job.fail()
            raise
        finally:
            if self._job is not None:
                await self._job.aclose()
        return [found[one.request_id] for one in requests]

    async def aclose(self) -> None:
        """Abort the slice that runs. Idempotent."""
        if self._stream is not None:
            await self._stream.aclose()

    async def _run_slice(self, requests: Sequence[Request], found: dict[str, list[float]]) -> None:
        stream, job = await self._submitted(requests)
        reasons: list[FinishReason] = []
        cached: dict[str, int] = {}
        try:
            async for output in stream:
                job.observe(output.scheduled_time, time.monotonic())
                if output.probe_logprobs is not None:
                    found[output.request_id] = output.probe_logprobs
                cached[output.request_id] = max(cached.get(output.request_id, 0), output.cached_tokens)
                if output.finish_reason is not None:
                    reasons.append(output.finish_reason)
        finally:
            await stream.aclose()
        self.cached_tokens += sum(cached.values())
        if all(one.request_id in found for one in requests):
            return
        outcome = combined_outcome(reasons)
        job.end(outcome)
        if outcome is FinishReason.CANCELLED:
            raise cancelled()
        raise deadline_passed() if outcome is FinishReason.DEADLINE else engine_failed()

    async def _submitted(self, requests: Sequence[Request]) -> tuple[GenerationStream, Job]:
        while True:
            job = self._job
            if job is not None and job.is_cancelled:
                job.end(FinishReason.CANCELLED)
                raise cancelled()
            try:
                stream = self._stream = self._client.submit(requests)
                break
            except REFUSALS as error:
                if job is None or not isinstance(error, QueueFullError):
                    raise engine_refusal(error) from None
            deadline = requests[0].deadline
            if deadline is not None and time.monotonic() >= deadline:
                job.end(FinishReason.DEADLINE)
                raise deadline_passed()
            await asyncio.sleep(_ROOM_SECONDS)
        if job is None:
            job = self._job = self._jobs.open(self._context, (), self)
            job.goes_on = True
            self._jobs.accept(job)
        job.engine_ids = tuple(one.request_id for one in requests)
        return stream, job
