"""A transcription that runs: its requests to the engine, its pieces for a reader, and how it ended.

It is one job: it is admitted or refused with its first window, and counts once. Each window is a request of its own to
the engine, so that a full queue can meet a later one: that waits for room instead, since what was accepted is not
refused any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from triptych.model.api.request import FinishReason, Request, TokenOutput
from triptych.model.errors import EngineError, ModelNotLoadedError, QueueFullError
from triptych.model.speech.driver import Piece, StoppedError, Take, Transcriber, Transcription
from triptych.service.core.engine_client import EngineClient, GenerationStream
from triptych.service.core.errors import REFUSALS, deadline_passed, draining, engine_refusal, log_unexpected
from triptych.service.core.request_context import RequestContext
from triptych.service.lifecycle.jobs import Job, Jobs
from triptych.service.settings.service_settings import Limits
from triptych.service.speech.metrics import SpeechMetrics
from triptych.service.speech.planner import SpeechPlan

_ROOM_SECONDS = 0.05  # between looks for room in the queue


class RunningTranscription:
    """Transcribes a plan's audio in a task of its own, from `start` until it ends or is closed.

    `outcome` is set once it has ended; `pieces` yields what is new until then.
    """

    def __init__(
        self,
        plan: SpeechPlan,
        client: EngineClient,
        jobs: Jobs,
        metrics: SpeechMetrics,
        limits: Limits,
    ) -> None:
        self.plan = plan
        self.outcome: FinishReason | None = None
        self.completion_tokens = 0
        self._client = client
        self._jobs = jobs
        self._metrics = metrics
        self._generated = metrics.generated(plan.served.name)
        self._streams: dict[str, GenerationStream] = {}  # open ones, by request
        self._job: Job | None = None
        self._refusal: QueueFullError | None = None  # of what would have been the first window
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._transcriber = Transcriber(
            maker=plan.maker,
            tokenizer=plan.tokenizer,
            log_mel=plan.log_mel,
            samples=plan.take_samples(),
            compute=self._compute,
            next_id=plan.next_id,
            emit=self._pieces.put_nowait if plan.streams else _not_shown,
            live=plan.streams,
            max_windows=limits.max_audio_windows,
            timestamps=plan.timestamps,
        )
        self._task: asyncio.Task[None] | None = None
        self._context: RequestContext | None = None

    async def start(self, context: RequestContext) -> Job:
        """Compute features and submit the first window; return the job, which the caller closes.

        Raises `ApiError` 429 or 503 if the engine refuses it; then nothing is left of it.
        """
        self._context = context
        context.model, context.tokens_in = self.plan.served.name, self.plan.num_positions
        context.audio_seconds = self.plan.seconds
        try:
            await self._jobs.reserve(context)
            self._task = asyncio.create_task(self._run())
            await asyncio.wait({self._task, self._accepted}, return_when=asyncio.FIRST_COMPLETED)
            if self._job is None:
                self._task.result()
                raise deadline_passed()
            return self._job
        except BaseException as error:
            await self.abandon()
            if isinstance(error, REFUSALS):
                raise engine_refusal(error) from None
            raise

    async def abandon(self) -> None:
        """Close the job, or the transcription that has none yet. Idempotent."""
        await (self.aclose() if self._job is None else self._job.aclose())

    @property
    def result(self) -> Transcription:
        """What has been transcribed by now."""
        return self._transcriber.result

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield what is new, until the transcription has ended."""
        while (piece := await self._pieces.get()) is not None:
            yield piece

    async def ended(self) -> None:
        """Return when the transcription has ended."""
        assert self._task is not None
        await asyncio.wait({self._task})

    async def aclose(self) -> None:
        """End the transcription and release what the engine has of it. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        began = time.monotonic()
        try:
            await self._transcriber.run()
            self._end(FinishReason.LENGTH if self.result.is_cut else FinishReason.STOP)
        except StoppedError as error:
            self._end(error.reason)
        except asyncio.CancelledError:
            self._end(FinishReason.CANCELLED)
            raise
        except Exception as error:
            if self._job is None:
                raise
            unloaded = isinstance(error, ModelNotLoadedError)
            self._end(FinishReason.CANCELLED if unloaded else FinishReason.ERROR)
            if not isinstance(error, EngineError):
                log_unexpected(error)
        finally:
            if self._job is not None:
                self._measure(time.monotonic() - began)
            self._pieces.put_nowait(None)

    def _measure(self, seconds: float) -> None:
        """Count the windows, and the audio unless its transcription was given up before its end."""
        result, model = self.result, self.plan.served.name
        spoken = result.num_windows - result.num_silent
        self._metrics.windows(model, spoken=spoken, silent=result.num_silent, repeated=result.num_fallbacks)
        if self.outcome not in (FinishReason.CANCELLED, FinishReason.ERROR):
            self._metrics.transcribed(model, self.plan.seconds, seconds)

    def _end(self, reason: FinishReason) -> None:
        self.outcome = self.outcome or reason
        if self._job is not None:
            self._job.end(reason)

    async def _compute(self, request: Request, take: Take) -> None:
        """Run one request on the engine."""
        stream = await self._submitted(request)
        self._streams[request.request_id] = stream
        self._follow()
        last: float | None = None
        try:
            async for output in stream:
                last = self._count(output, last)
                take(output)
        finally:
            await stream.aclose()
            del self._streams[request.request_id]
            self._follow()

    async def _submitted(self, request: Request) -> GenerationStream:
        """Submit a request; a later one than the first waits for room in the queue, or is refused as the first was."""
        while True:
            if self._refusal is not None:
                raise self._refusal
            if self._job is None and self._jobs.given_up:
                raise draining()
            if self._job is not None and self._job.is_cancelled:
                raise StoppedError(FinishReason.CANCELLED)
            if request.deadline is not None and time.monotonic() >= request.deadline:
                raise StoppedError(FinishReason.DEADLINE)
            try:
                stream = self._client.submit([request])
            except QueueFullError as error:
                if self._job is None:
                    self._refusal = error
                    raise
                await asyncio.sleep(_ROOM_SECONDS)
                continue
            if self._job is None:
                self._accept(request)
            return stream

    def _accept(self, request: Request) -> None:
        """Open the job, with the first request that the engine has taken."""
        assert self._context is not None
        self._job = self._jobs.open(self._context, (request.request_id,), self)
        self._job.goes_on = True
        self._jobs.accept(self._job)
        self._accepted.set_result(None)

    def _follow(self) -> None:
        if self._job is not None:
            self._job.engine_ids = tuple(self._streams)

    def _count(self, output: TokenOutput, last: float | None) -> float | None:
        """Count an output, `last` being the time of the tokens before in its request; return that of the newest."""
        tokens, now = len(output.token_ids), time.monotonic()
        if not tokens or self._job is None or self._context is None:
            return last
        self._job.observe(output.scheduled_time, now)
        self._generated(tokens, None if last is None else (now - last) / tokens)
        self.completion_tokens += tokens
        self._context.tokens_out = self.completion_tokens
        return now


def _not_shown(piece: Piece) -> None:
    """Show nothing: the reply is sent when all of it is there."""
