"""Renders generations as OpenAI's completions and chat completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from triptych.model.text.detokenizer import Detokenizer
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.chat.parts import Arguments, Call, Content, Part, Reasoning, WholeReply
from triptych.service.chat.reply_parser import ReplyFormat, ReplyParser
from triptych.service.chat.usage import reasoning_tokens
from triptych.service.dialects.openai import prompt_only
from triptych.service.dialects.openai_bodies import ChatBody, CompletionBody, Sampling
from triptych.service.http.json_replies import DataEvents, Generation, Json

_FINISH = {"stop": "stop", "length": "length", "deadline": "abort", "cancelled": "abort", "error": "error"}

_PREDICTED = ("accepted_prediction_tokens", "rejected_prediction_tokens")


class _Rendering(DataEvents):
    """The common part of completions and chat completions: ids, usage, the order of events."""

    prefix: str
    kind: str  # `object` of a reply
    chunk_kind: str  # `object` of an event

    def __init__(self, generation: Generation, body: Sampling) -> None:
        self._generation = generation
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)

    def events(self, event: Json) -> Iterable[Json]:
        head = self._chunk_head(event)
        for delta in event["choices"]:
            for choice in self._deltas(delta):
                yield {**head, "choices": [choice]}
        if self._with_usage and "usage" in event:
            yield {**head, "choices": [], "usage": self._usage(event)}

    def repeated(self, event: Json) -> Json | None:
        [delta] = event["choices"]
        choice = self._repeated(delta)
        return None if choice is None else {**self._chunk_head(event), "choices": [choice]}

    def reply(self, reply: Json) -> object:
        choices = [self._choice(choice) for choice in reply["choices"]]
        return {**self._head(reply, self.kind), "choices": choices, "usage": self._usage(reply)}

    def _head(self, native: Json, kind: str) -> Json:
        return {
            "id": self.prefix + native["id"],
            "object": kind,
            "created": native["created"],
            "model": native["model"],
        }

    def _chunk_head(self, native: Json) -> Json:
        return self._head(native, self.chunk_kind) | ({"usage": None} if self._with_usage else {})

    def _usage(self, native: Json) -> Json:
        usage = dict(native["usage"])
        predicted = {name: usage.pop(name) for name in _PREDICTED if name in usage}
        details: Json = {"prompt_tokens_details": {"cached_tokens": usage.pop("cached_tokens")}}
        return usage | details | ({"completion_tokens_details": predicted} if predicted else {})

    def _deltas(self, delta: Json) -> Iterable[Json]:
        raise NotImplementedError

    def _repeated(self, delta: Json) -> Json | None:
        """Return the choice of an event of `repeated`; None if it cannot be one."""
        raise NotImplementedError

    def _choice(self, choice: Json) -> Json:
        raise NotImplementedError


class Completions(_Rendering):
    """Renders text completions.

    `text_offset` is where a token begins in the choice's text. Tokens that are not in the text, such as special tokens,
    have no length; tokens that share a character begin at the same offset.
    """

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, generation: Generation, body: CompletionBody) -> None:
        super().__init__(generation, body)
        self._logprobs = body.logprobs
        self._echo = bool(body.echo)
        self._prompt_only = prompt_only(body)
        self._tokenizer = generation.plan.served.tokenizer
        self._offsets: dict[int, _Offsets] = {}  # by choice, of its output

    def _deltas(self, delta: Json) -> Iterable[Json]:
        return (self._choice(delta),)

    def _repeated(self, delta: Json) -> Json | None:
        shows_text = self._logprobs is None and not self._prompt_only
        return _completion_choice(delta["index"], delta["text"]) if shows_text else None

    def _choice(self, choice: Json) -> Json:
        index = choice["index"]
        text = self._generation.echoed(index) if self._prompt_only else choice["text"]
        return _completion_choice(index, text, self._shown_logprobs(choice), _finish(choice))

    def _usage(self, native: Json) -> Json:
        usage = super()._usage(native)
        if self._prompt_only:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _shown_logprobs(self, choice: Json) -> Json | None:
        if self._logprobs is None:
            return None
        entries: list[Json] = []
        offsets: list[int] = []
        if self._echo and choice.get("prompt_logprobs") and not self._generation.plan.served.is_encoder_decoder:
            first, *others = choice["prompt_logprobs"]
            entries = [first or self._first_token(choice["prompt_index"]), *others]
            offsets = _Offsets.of_prompt(self._tokenizer, self._generation.echoed(choice["index"])).of(entries)
        if not self._prompt_only:
            output = choice.get("logprobs") or ()
            entries += output
            offsets += self._offsets_of(choice["index"]).of(output)
        return {
            "text_offset": offsets,
            "token_logprobs": [entry["logprob"] for entry in entries],
            "tokens": [entry["text"] for entry in entries],
            "top_logprobs": [_alternatives(entry) for entry in entries] if self._logprobs else None,
        }

    def _first_token(self, prompt_index: int) -> Json:
        """Return the prompt's first token, which has no log-probability."""
        plan = self._generation.plan
        token_id = plan.requests[prompt_index].prompt_token_ids[0]
        text = self._tokenizer.token_text(token_id) if self._tokenizer is not None else ""
        return {"id": token_id, "text": text, "logprob": None, "top": []}

    def _offsets_of(self, index: int) -> _Offsets:
        """Return the offsets of the output of choice `index`, which follows the echoed prompt."""
        if index not in self._offsets:
            skip, at = self._generation.plan.skip_special_tokens, len(self._generation.echoed(index))
            self._offsets[index] = _Offsets(self._tokenizer, skip_special_tokens=skip, at=at)
        return self._offsets[index]


class _Offsets:
    """Computes where the tokens of a growing text begin, in characters; always 0 without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool, at: int) -> None:
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens) if tokenizer is not None else None
        self._at = at
        self._shown: str | None = None  # the whole text, if it is known

    @classmethod
    def of_prompt(cls, tokenizer: Tokenizer | None, shown: str) -> _Offsets:
        """Return the offsets in an echoed prompt, which has the client's special tokens but not the tokenizer's."""
        found = cls(tokenizer, skip_special_tokens=False, at=0)
        found._shown = shown
        return found

    def of(self, entries: Iterable[Json]) -> list[int]:
        """Return the offsets of the next tokens."""
        return [self._next(entry["id"]) for entry in entries]

    def _next(self, token_id: int) -> int:
        at = self._at
        if self._text is not None and not self._left_out(token_id):
            self._at += len(self._text.push([token_id]))
        return at

    def _left_out(self, token_id: int) -> bool:
        if self._shown is None or self._tokenizer is None or token_id not in self._tokenizer.special_ids:
            return False
        return not self._shown.startswith(self._tokenizer.token_text(token_id), self._at)


class ChatCompletions(_Rendering):
    """Renders chat completions; the first event of a choice contains the role."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, generation: Generation, body: ChatBody, format: ReplyFormat) -> None:
        super().__init__(generation, body)
        self._begun: set[int] = set()
        self._format = format
        self._shows_reasoning = body.include_reasoning is not False
        self._parsers: dict[int, ReplyParser] = {}  # by choice; empty if the format is plain
        self._ids: dict[int, list[int]] = {}  # by choice: its token ids, at least up to the end of the reasoning
        self._reasoned: set[int] = set()  # choices with reasoning

    def _deltas(self, delta: Json) -> Iterable[Json]:
        index = delta["index"]
        if index not in self._begun:
            self._begun.add(index)
            role = {"role": "assistant", "content": ""}
            yield _chat_delta(index, role)
        logprobs, finish_reason = _content_logprobs(delta), self._finish(delta)
        if self._format.is_plain:
            shown = [{"content": delta["text"]}] if delta["text"] else []
        else:
            parts = self._parser(index).push(delta["text"], end=finish_reason is not None)
            self._count(delta, reasons=any(isinstance(part, Reasoning) for part in parts))
            shown = [_shown(part) for part in parts if self._shows_reasoning or not isinstance(part, Reasoning)]
            finish_reason = self._finish(delta)
        if not shown and (logprobs or finish_reason):
            shown = [{}]
        for at, one in enumerate(shown, 1):
            end = finish_reason if at == len(shown) else None
            yield _chat_delta(index, one, logprobs if at == 1 else None, end)

    def _repeated(self, delta: Json) -> Json | None:
        index = delta["index"]
        parser = self._parsers.get(index)
        is_content = self._format.is_plain or (parser is not None and parser.passes)
        return _chat_delta(index, _shown(Content(delta["text"]))) if is_content and index in self._begun else None

    def _choice(self, choice: Json) -> Json:
        if self._format.is_plain:
            message: Json = {"content": choice["text"]}
        else:
            reply = self._parser(choice["index"]).whole(choice["text"])
            self._count(choice, reasons=bool(reply.reasoning))
            reply.reasoning = reply.reasoning if self._shows_reasoning else ""
            message = _message(reply)
        return {
            "index": choice["index"],
            "message": {"role": "assistant", "refusal": None, **message},
            "logprobs": _content_logprobs(choice),
            "finish_reason": self._finish(choice),
        }

    def _parser(self, index: int) -> ReplyParser:
        if index not in self._parsers:
            self._parsers[index], self._ids[index] = ReplyParser(self._format), []
        return self._parsers[index]

    def _count(self, choice: Json, *, reasons: bool) -> None:
        """Record the token ids of a choice, and whether it contains reasoning."""
        index = choice["index"]
        self._ids[index] += choice.get("token_ids", ())
        if reasons:
            self._reasoned.add(index)

    def _usage(self, native: Json) -> Json:
        usage, tokenizer = super()._usage(native), self._generation.plan.served.tokenizer
        if self._format.reasoning is None or tokenizer is None:
            return usage
        counts = [
            reasoning_tokens(self._format, self._ids[index], tokenizer, has_calls=self._parsers[index].has_calls)
            for index in self._reasoned
        ]
        details = usage.get("completion_tokens_details", {}) | {"reasoning_tokens": sum(counts)}
        return usage | {"completion_tokens_details": details}

    def _finish(self, choice: Json) -> str | None:
        reason = _finish(choice)
        parser = self._parsers.get(choice["index"])
        if reason != "stop" or parser is None or not parser.has_calls:
            return reason
        is_cut = isinstance(choice.get("stop_reason"), str) and parser.is_within_call  # a stop text ended the call
        return "stop" if is_cut else "tool_calls"


def _completion_choice(index: int, text: str, logprobs: Json | None = None, reason: str | None = None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _chat_delta(index: int, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _shown(part: Part) -> Json:
    """Return the delta of a part."""
    match part:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case Call(index, id, name):
            return {"tool_calls": [{"index": index, **_call(id, name, "")}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(reply: WholeReply) -> Json:
    """Return the fields of a message."""
    message: Json = {"content": reply.content if reply.content or not reply.calls else None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in reply.calls]
    return message


def _call(id: str, name: str, arguments: str) -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _finish(choice: Json) -> str | None:
    reason = choice["finish_reason"]
    return None if reason is None else _FINISH[reason]


def _alternatives(entry: Json) -> dict[str, float] | None:
    """Return the log-probabilities of the alternatives and the chosen token, by text; of equal texts the highest."""
    if entry["logprob"] is None:
        return None
    found: dict[str, float] = {}
    for one in (*entry["top"], entry):
        found[one["text"]] = max(one["logprob"], found.get(one["text"], one["logprob"]))
    return found


def _content_logprobs(choice: Json) -> Json | None:
    entries = choice.get("logprobs")
    if entries is None:
        return None
    content = [{**shown_token(entry), "top_logprobs": [shown_token(one) for one in entry["top"]]} for entry in entries]
    return {"content": content, "refusal": None}


def shown_token(entry: Json) -> dict[str, Any]:
    """Return a token with its log-probability, and its bytes where they are known."""
    text = entry["text"]
    known = "\ufffd" not in text  # else the token is part of a character
    return {"token": text, "logprob": entry["logprob"], "bytes": list(text.encode()) if known else entry.get("bytes")}
