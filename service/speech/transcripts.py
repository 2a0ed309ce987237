"""Transcriptions as replies and as streams: each renders pieces of one in the shape of its API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

from starlette.responses import Response

from triptych.model.api.request import FinishReason, TokenLogprob
from triptych.model.speech.driver import Piece, Written
from triptych.service.core.errors import ApiError, cancelled, engine_failed
from triptych.service.http.bodies import json_response
from triptych.service.http.json_replies import DataEvents, Json, timings_of, token_logprob, usage_of
from triptych.service.http.sse import Chunk
from triptych.service.lifecycle.jobs import Job
from triptych.service.speech.running import RunningTranscription


class TranscriptRendering(Protocol):
    """Converts one transcription for a dialect, as events or as one reply."""

    @property
    def done(self) -> bytes: ...

    @property
    def keepalive(self) -> bytes: ...

    def frame(self, event: Json) -> bytes: ...

    def failed(self, error: ApiError) -> Iterable[Json]: ...

    def piece(self, piece: Piece) -> Iterable[Json]:
        """Return the events for what is new."""

    def last(self) -> Iterable[Json]:
        """Return the last events of a transcription that has ended; raises `ApiError` for one that has no result."""

    def reply(self) -> Response:
        """Return the reply of a transcription that has ended; raises `ApiError` for one that has no result."""


RenderTranscript = Callable[[RunningTranscription, Job], TranscriptRendering]


class TranscriptEvents:
    """Turns the pieces of a transcription into frames; the end of the stream comes with the last ones."""

    def __init__(
        self,
        running: RunningTranscription,
        rendering: TranscriptRendering,
        shown_error: Callable[[ApiError], ApiError],
    ) -> None:
        self._running = running
        self._rendering = rendering
        self._shown_error = shown_error

    @property
    def keepalive(self) -> bytes:
        return self._rendering.keepalive

    def opening(self) -> bytes:
        return b""

    async def each(self) -> AsyncIterator[Chunk]:
        async for piece in self._running.pieces():
            if shown := self._framed(self._rendering.piece(piece)):
                yield shown, True
        try:
            last = self._framed(self._rendering.last())
        except ApiError as error:
            last = self._framed(self._rendering.failed(self._shown_error(error)))
        yield last + self._rendering.done, False

    def _framed(self, events: Iterable[Json]) -> bytes:
        return b"".join(map(self._rendering.frame, events))


def check_complete(running: RunningTranscription) -> None:
    """Raise the error of a transcription that did not come to its end: what there is of it would pass for all."""
    if running.outcome is FinishReason.CANCELLED:
        raise cancelled()
    if running.outcome is FinishReason.DEADLINE:
        message = "the deadline passed before the audio was transcribed"
        raise ApiError(504, message, type="timeout_error", param="timeout_s", code="deadline")
    if running.outcome not in (FinishReason.STOP, FinishReason.LENGTH):
        raise engine_failed()


class NativeTranscript(DataEvents):
    """Shows transcriptions as /generate has them (`triptych.service.speech.bodies`)."""

    def __init__(self, running: RunningTranscription, job: Job, *, segments: bool, token_ids: bool) -> None:
        self._running = running
        self._job = job
        self._segments = segments
        self._token_ids = token_ids
        self._num_segments = 0

    def piece(self, piece: Piece) -> Iterable[Json]:
        first = self._num_segments
        self._num_segments += len(piece.segments)
        return (self._event(piece.text, piece.token_ids, piece.logprobs, piece.segments, first, None),)

    def last(self) -> Iterable[Json]:
        self._check()
        event = self._event("", [], [], [], self._num_segments, self._running.outcome)
        return (event | self._tail(),)

    def reply(self) -> Response:
        result = self._running.result
        self._check()
        if self._running.outcome is FinishReason.DEADLINE and not result.text:
            check_complete(self._running)
        found = self._event(result.text, result.token_ids, result.logprobs, result.segments, 0, self._running.outcome)
        return json_response(found | self._tail())

    def _check(self) -> None:
        if self._running.outcome is FinishReason.ERROR:
            raise engine_failed()

    def _event(
        self,
        text: str,
        ids: list[int],
        logprobs: list[TokenLogprob],
        segments: Sequence[Written],
        first: int,
        reason: FinishReason | None,
    ) -> Json:
        plan, result = self._running.plan, self._running.result
        choice: Json = {"index": 0, "prompt_index": 0, "text": text}
        if self._token_ids:
            choice["token_ids"] = ids
        if plan.options.logprobs is not None:
            choice["logprobs"] = [token_logprob(plan.tokenizer, one) for one in logprobs]
        if self._segments:
            choice["segments"] = [segment_of(first + at, one) for at, one in enumerate(segments)]
        choice |= {"language": result.language, "finish_reason": reason}
        return {
            "id": self._job.request_id,
            "model": plan.served.name,
            "created": self._job.created,
            "choices": [choice],
        }

    def _tail(self) -> Json:
        plan = self._running.plan
        usage = usage_of(plan.num_positions, self._running.completion_tokens, 0)
        return {
            "usage": usage | {"audio_seconds": round(plan.seconds, 3)},
            "timings": timings_of(self._job.timings()),
        }


def segment_of(number: int, one: Written) -> Json:
    """Return a segment as /generate shows it."""
    found: Json = {
        "id": number,
        "start": one.start,
        "end": one.end,
        "text": one.text,
        "token_ids": list(one.token_ids),
        "seek": one.seek,
        "temperature": one.temperature,
        "avg_logprob": one.mean_logprob,
        "compression_ratio": one.compression_ratio,
        "no_speech_prob": one.no_speech_prob,
    }
    if one.words:
        found["words"] = [{"text": word.text, "start": word.start, "end": word.end} for word in one.words]
    return found
