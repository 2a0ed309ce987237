"""Conversion of engine outputs to JSON replies and events.

A `Generation` turns each `TokenOutput` into a delta. A stream sends the deltas, an unstreamed reply joins them, so both
have the same content. Replies are plain dictionaries of the shapes in `triptych.service.schemas.replies`; a `Rendering`
converts them for a dialect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import msgspec

from triptych.model.api.request import FinishReason, Timings, TokenLogprob, TokenOutput
from triptych.model.text.token_bytes import part_bytes
from triptych.model.text.tokenizer import REPLACEMENT, Tokenizer
from triptych.service.core.errors import ApiError
from triptych.service.lifecycle.jobs import Job, combined_outcome
from triptych.service.observability.metrics import Metrics
from triptych.service.planning.encode import EncodePlan
from triptych.service.planning.generate import GeneratePlan
from triptych.service.planning.response_format import invalid_grammar

Json = dict[str, Any]

_MIN_LOGPROB = -9999.0  # JSON has no -inf


class Generation:
    """The token counts, times and finish reasons of all sequences of one HTTP request."""

    def __init__(self, plan: GeneratePlan, job: Job, metrics: Metrics) -> None:
        self._plan = plan
        self._job = job
        self._generated = metrics.generated(plan.served.name)
        self._prompt_index = {request.request_id: at for at, request in enumerate(plan.requests)}
        self._last_seen: dict[int, float] = {}
        self._reasons: dict[int, FinishReason] = {}
        self._cached: dict[str, int] = {}
        self.completion_tokens = 0
        self._drafted_tokens = self._accepted_tokens = 0
        self.failure: ApiError | None = None  # the reason if an output could not match its constraint

    @property
    def plan(self) -> GeneratePlan:
        return self._plan

    @property
    def reasons(self) -> list[FinishReason]:
        return list(self._reasons.values())

    def add(self, output: TokenOutput) -> Json:
        """Count an output and return its delta; ends the job with the last sequence."""
        first = not self.has_begun(output)
        self.count(output)
        delta = self.delta(output)
        if first and self._plan.echo:
            self._echo(delta, delta["prompt_index"])
        return delta

    def has_begun(self, output: TokenOutput) -> bool:
        """Return whether an earlier output of its sequence was counted."""
        return self._index(output) in self._last_seen

    def delta(self, output: TokenOutput) -> Json:
        """Return the delta of an output, without the prompt that `echo` puts before the first one."""
        prompt_index = self._prompt_index[output.request_id]
        delta: Json = {"index": self._index(output), "prompt_index": prompt_index, "text": output.text}
        if self._plan.return_token_ids:
            delta["token_ids"] = output.token_ids
        delta["finish_reason"] = output.finish_reason
        if output.stop_reason is not None:
            delta["stop_reason"] = output.stop_reason
        if output.score is not None:
            delta["score"] = output.score
        if output.logprobs is not None:
            delta["logprobs"] = [self._logprob(one) for one in output.logprobs]
        if output.prompt_logprobs is not None:
            delta["prompt_logprobs"] = [one and self._logprob(one) for one in output.prompt_logprobs]
        return delta

    def _index(self, output: TokenOutput) -> int:
        """Return the index of the choice that the output belongs to."""
        return self._prompt_index[output.request_id] * self._plan.n + output.index

    @property
    def ended(self) -> bool:
        """Whether every sequence has its finish_reason."""
        return len(self._reasons) == len(self._plan.requests) * self._plan.n

    def head(self) -> Json:
        """Return the first fields of the reply and of every event."""
        return {"id": self._job.request_id, "model": self._plan.served.name, "created": self._job.created}

    def cached_tokens(self, prompt_index: int) -> int:
        """Return the number of tokens of one prompt that came from the prefix cache."""
        return self._cached.get(self._plan.requests[prompt_index].request_id, 0)

    def echoed(self, index: int) -> str:
        """Return the text before the output of choice `index`; empty without `echo`."""
        return self._plan.echo[index // self._plan.n] if self._plan.echo else ""

    def tail(self) -> Json:
        """Return usage and timings for the reply or the last event of a stream."""
        usage = usage_of(self._plan.prompt_tokens, self.completion_tokens, sum(self._cached.values()))
        if self._drafted_tokens:
            usage["accepted_prediction_tokens"] = self._accepted_tokens
            usage["rejected_prediction_tokens"] = self._drafted_tokens - self._accepted_tokens
        return {"usage": usage, "timings": timings_of(self._job.timings())}

    def joined(self, deltas: Sequence[Json]) -> list[Json]:
        """Join deltas into choices, in order."""
        if len(self._plan.requests) * self._plan.n == 1 and deltas:
            return [_join(deltas)]
        groups: dict[int, list[Json]] = {}
        for delta in deltas:
            groups.setdefault(delta["index"], []).append(delta)
        return [_join(groups[index]) for index in sorted(groups)]

    def count(self, output: TokenOutput) -> None:
        """Count the tokens of an output, and record the end of its sequence."""
        index, now, tokens = self._index(output), time.monotonic(), len(output.token_ids)
        if tokens:
            before = self._last_seen.get(index)
            self._generated(tokens, None if before is None else (now - before) / tokens)
            self._job.observe(output.scheduled_time, now)
        self._last_seen[index] = now
        self.completion_tokens += tokens
        self._drafted_tokens += output.drafted_tokens
        self._accepted_tokens += output.accepted_tokens
        self._job.context.tokens_out = self.completion_tokens
        if output.scheduled_time is not None:  # the first of its sequence; the first sequence computes for its siblings
            least = min(output.cached_tokens, self._cached.get(output.request_id, output.cached_tokens))
            self._cached[output.request_id] = least
            self._job.context.cached_tokens = sum(self._cached.values())
        if output.error is not None and self._plan.constraint is not None:
            self.failure = invalid_grammar(self._plan.constraint.param, output.error)
        if output.finish_reason is not None:
            self._reasons[index] = output.finish_reason
            if self.ended:
                self._job.end(combined_outcome(self.reasons))

    def _echo(self, delta: Json, prompt_index: int) -> None:
        """Put the prompt (encoder-decoder: the decoder prompt) before the output."""
        request = self._plan.requests[prompt_index]
        ids = request.prompt_token_ids[request.source is not None :]
        delta["text"] = self._plan.echo[prompt_index] + delta["text"]
        if "token_ids" in delta:
            delta["token_ids"] = [*ids, *delta["token_ids"]]

    def _logprob(self, one: TokenLogprob) -> Json:
        return token_logprob(self._plan.served.tokenizer, one)


class Rendering(Protocol):
    """A converter of one generation for a dialect, to events or to one reply; one object for each HTTP request."""

    @property
    def media_type(self) -> str:
        """The content type of a stream."""

    @property
    def done(self) -> bytes:
        """The bytes that end a stream, after its last event."""

    @property
    def keepalive(self) -> bytes:
        """The bytes that are sent after a time without events."""

    def opening(self) -> Iterable[Json]:
        """Return the events that begin a stream, before any output."""

    def events(self, event: Json) -> Iterable[Json]:
        """Return the dialect's events for a `GenerateEvent` of /generate."""

    def repeated(self, event: Json) -> Json | None:
        """Return the event of a choice in progress if all its further events have the same shape, else None.

        The call changes nothing. The text and token ids of `event` are placeholders.
        """

    def failed(self, error: ApiError) -> Iterable[Json]:
        """Return the last events of a stream that failed."""

    def frame(self, event: Json) -> bytes:
        """Return the bytes of one event."""

    def reply(self, reply: Json) -> object:
        """Return the dialect's reply for a `GenerateReply` of /generate."""


Render = Callable[[Generation], Rendering]


class DataEvents:
    """Framing of events without names, which most dialects have; the JSON has no line breaks."""

    media_type = "text/event-stream"
    done = b"data: [DONE]\n\n"
    keepalive = b": keep-alive\n\n"

    def opening(self) -> Iterable[Json]:
        return ()

    def repeated(self, event: Json) -> Json | None:
        return None

    def failed(self, error: ApiError) -> Iterable[Json]:
        return (error.body(),)

    def frame(self, event: Json) -> bytes:
        return b"data: %b\n\n" % msgspec.json.encode(event)


class NamedEvents(DataEvents):
    """Framing of events named by their `type`; the last event ends the stream, without a mark."""

    done = b""

    def frame(self, event: Json) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


class JsonLines(DataEvents):
    """Framing of a stream of lines, each a JSON object; a subclass has an object for `keepalive`."""

    media_type = "application/x-ndjson"
    done = b""

    def frame(self, event: Json) -> bytes:
        return msgspec.json.encode(event) + b"\n"


class NativeRendering(DataEvents):
    """The rendering of /generate, which leaves events and replies unchanged."""

    def __init__(self, generation: Generation) -> None:
        pass

    def events(self, event: Json) -> Iterable[Json]:
        return (event,)

    def repeated(self, event: Json) -> Json | None:
        return event

    def reply(self, reply: Json) -> object:
        return reply


def token_logprob(tokenizer: Tokenizer | None, one: TokenLogprob) -> Json:
    """Return a token's log-probability with its alternatives; without a tokenizer tokens have no text."""

    def shown(token_id: int, logprob: float) -> Json:
        found: Json = {"id": token_id, "text": "", "logprob": max(logprob, _MIN_LOGPROB)}
        if tokenizer is not None:
            found["text"] = text = tokenizer.token_text(token_id)
            if REPLACEMENT in text and (part := part_bytes(tokenizer, token_id)) is not None:
                found["bytes"] = list(part)
        return found

    return {**shown(one.token_id, one.logprob), "top": [shown(*alternative) for alternative in one.top]}


def _join(deltas: Sequence[Json]) -> Json:
    """Join the deltas of one choice: texts and lists are concatenated, of other fields the last value is kept.

    A choice may have 65,536 deltas, so only those are merged that have more or fewer fields than the first, and the
    last: between these, fields are the same.
    """
    choice: Json = dict(deltas[0])
    size = len(choice)
    for delta in [one for one in deltas if len(one) != size]:
        choice |= delta
    choice |= deltas[-1]
    choice["text"] = "".join([delta["text"] for delta in deltas])
    for name in ("token_ids", "logprobs"):
        if name in choice:
            choice[name] = [*chain.from_iterable([delta[name] for delta in deltas if name in delta])]
    return choice


def encode_reply(plan: EncodePlan, items: Sequence[Json], job: Job) -> Json:
    """Return the reply of /encode, with the plan's items."""
    classifier = plan.served.config.classifier
    labels = {"labels": list(classifier.labels)} if classifier and plan.output.labelled else {}
    return {
        "id": job.request_id,
        "model": plan.served.name,
        "created": job.created,
        "data": items,
        **labels,
        "usage": usage_of(plan.prompt_tokens, 0, 0),
        "timings": timings_of(job.timings()),
    }


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "cached_tokens": cached_tokens,
    }


def timings_of(found: Timings) -> Json:
    return {
        "queue_ms": found.queue_ms,
        "prefill_ms": found.prefill_ms,
        "decode_ms": found.decode_ms,
        "ttft_ms": found.ttft_ms,
        "total_ms": found.total_ms,
    }
