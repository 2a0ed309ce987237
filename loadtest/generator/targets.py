"""Requests and replies of the target APIs; the rest of the package uses only `body` and `Reply`.

The shapes of all replies overlap (choices with a text, a message or a delta; data; usage; error), so one set of types
reads them all; other fields are skipped.
"""

from __future__ import annotations

from typing import Any

import msgspec

from triptych.loadtest.settings import Settings
from triptych.loadtest.workload.items import Turn


class Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        return (self.reasoning_content or "") + (self.content or "")


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Message | None = None
    message: Message | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def said(self) -> str:
        return self.text or (self.delta or self.message or Message()).text


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached(self) -> int:
        details = self.prompt_tokens_details
        return self.cached_tokens or (details.cached_tokens if details else 0) or 0


class Timings(msgspec.Struct):
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None


class Failure(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


class Reply(msgspec.Struct):
    """Holds an unstreamed reply or one event of a stream."""

    model: str | None = None
    choices: list[Choice] = []
    usage: Usage | None = None
    timings: Timings | None = None
    error: Failure | str | None = None

    @property
    def said(self) -> str:
        return "".join(choice.said for choice in self.choices)

    @property
    def num_tokens(self) -> int | None:
        """The number of tokens in this event, if the server returns their ids."""
        told = [choice.token_ids for choice in self.choices if choice.token_ids is not None]
        return sum(map(len, told)) if told else None

    @property
    def finish_reason(self) -> str | None:
        return next((choice.finish_reason for choice in self.choices if choice.finish_reason), None)

    @property
    def failure(self) -> str:
        """The error code of a failure; empty: none."""
        if self.error is None:
            return ""
        if isinstance(self.error, str):
            return self.error[:80]
        return str(self.error.code or self.error.type or self.error.message[:80] or "error")


decode = msgspec.json.Decoder(Reply).decode


def body(settings: Settings, turn: Turn, history: list[str], *, stream: bool) -> bytes:
    """Return the JSON of a request; `history` has the earlier texts of both sides, in turn."""
    fields: dict[str, Any] = {"model": settings.model} if settings.model else {}
    if settings.embeds:
        fields["input"] = list(turn.texts) or [turn.text]
        return msgspec.json.encode(fields | settings.clients.extra)
    if settings.target == "openai-chat":
        roles = ("user", "assistant")
        said = [*history, turn.text]
        fields["messages"] = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    else:
        fields["prompt"] = " ".join([*history, turn.text])
    fields |= {"max_tokens": turn.output_tokens, "temperature": 0, "stream": stream}
    if settings.clients.ignore_eos:
        fields["ignore_eos"] = True
    if stream and settings.target.startswith("openai"):
        fields["stream_options"] = {"include_usage": True}
    elif stream:
        fields["return_token_ids"] = True  # to count the tokens of an event
    return msgspec.json.encode(fields | settings.clients.extra)
