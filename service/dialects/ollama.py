"""Ollama's chats, prompts and embeddings: translates bodies to conversations and native bodies, and replies back.

A stream is lines of JSON; the last one has `done: true`, or an error. An output that ended at its deadline or was
cancelled has the done_reason `abort`, as in OpenAI's API here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from triptych.service.chat.conversation import Conversation
from triptych.service.chat.parts import Part
from triptych.service.chat.reply_parser import ReplyFormat
from triptych.service.core.errors import ApiError, invalid, ollama_error, shorten
from triptych.service.core.models import ServedModel
from triptych.service.dialects.blocks import Block, BlockRendering, arguments_of
from triptych.service.dialects.common import (
    PromptValue,
    fields_of,
    json_format,
    native_encode,
    native_generate,
    native_penalties,
)
from triptych.service.dialects.ollama_bodies import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaMessage,
    Options,
    WritingBody,
)
from triptych.service.dialects.openai import tool
from triptych.service.dialects.openai_replies import shown_token
from triptych.service.dialects.responses import chosen
from triptych.service.http.json_replies import Generation, Json, JsonLines
from triptych.service.images.pictures import Content, content_of, picture, text
from triptych.service.planning.encode import EncodePlan
from triptych.service.schemas.bodies import GenerateBody
from triptych.service.schemas.encode_bodies import EncodeBody
from triptych.service.schemas.parameters import OLLAMA

_COMMON = {**OLLAMA.names, "logprobs": "top_logprobs", "response_format": "format"}
_COMMON["response_format.json_schema.schema"] = "format"
CHAT_NAMES = _COMMON | {"prompt": "messages"}
GENERATE_NAMES = _COMMON
EMBEDDINGS_NAMES = {"input": "prompt"}

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # where the checkpoint has none
_DONE = {"stop": "stop", "length": "length"}
_NANOSECONDS = 1_000_000  # in a millisecond


def chat_conversation(body: OllamaChatBody, served: ServedModel) -> Conversation:
    """Return the messages, tools and template variables of a chat; raises `ApiError`."""
    messages = list(_messages(body.messages or ()))
    last = messages[-1]
    tools = tuple(tool(one, f"tools[{at}].function") for at, one in enumerate(body.tools or ()))
    return Conversation(
        messages,
        chosen(tools, body.tool_choice, parallel=True),
        _variables(body, served),
        continues=last["role"] == "assistant" and "tool_calls" not in last,
    )


def prompt_conversation(body: OllamaGenerateBody, served: ServedModel) -> Conversation:
    """Return a prompt as a conversation."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    content = _content(body.prompt or "", body.images, "images", "user")
    messages: list[Json] = [*system, {"role": "user", "content": content}]
    return Conversation(messages, variables=_variables(body, served), param="prompt")


def _messages(given: Iterable[OllamaMessage]) -> Iterator[Json]:
    """Yield the messages of a template. Calls without an id get one, and results take those of the calls in order."""
    count, open_calls = 0, list[tuple[str, str]]()  # ids and names of the calls that wait for a result
    for at, one in enumerate(given):
        role = one.role.lower()
        found: Json = {"role": role, "content": _content(one.content or "", one.images, f"messages[{at}].images", role)}
        if one.thinking:
            found["reasoning_content"] = one.thinking
        if one.tool_calls:
            open_calls.clear()
            calls = found["tool_calls"] = []
            for call in one.tool_calls:
                count += 1
                function = {"name": call.function.name, "arguments": call.function.arguments}
                calls.append({"id": call.id or f"call_{count}", "type": "function", "function": function})
                open_calls.append((calls[-1]["id"], call.function.name))
        if found["role"] == "tool":
            name = one.tool_name or one.name
            fitting = [call for call in open_calls if one.tool_call_id == call[0]]
            fitting = fitting or [call for call in open_calls if name in (None, call[1])] or open_calls
            if fitting:
                open_calls.remove(fitting[0])
            id, called = fitting[0] if fitting else (None, None)
            found |= {"tool_call_id": one.tool_call_id or id, "name": name or called}
            found = {key: value for key, value in found.items() if value is not None}
        elif one.name:
            found["name"] = one.name
        yield found


def _content(words: str, images: Sequence[str] | None, param: str, role: str) -> Content:
    """Return the content of a message, whose images come first, as in Ollama."""
    if not images:
        return words
    parts = [picture(one, f"{param}[{at}]") for at, one in enumerate(images)]
    return content_of([*parts, text(words)] if words else parts, role)


def _variables(body: WritingBody, served: ServedModel) -> Mapping[str, tuple[Any, str]]:
    """Return the variables of the template; without `think` a model reasons if it can, as in Ollama."""
    found: dict[str, tuple[Any, str]] = {}
    if served.chat is not None and served.chat.switch is not None:
        found[served.chat.switch] = (body.think is not False, "think")
    if served.chat is not None and isinstance(body.think, str) and served.chat.takes("reasoning_effort"):
        found["reasoning_effort"] = (body.think, "think")
    return found


def check_thinking(body: WritingBody, served: ServedModel, format: ReplyFormat) -> None:
    """Refuse reasoning if the model cannot reason."""
    if body.think and format.reasoning is None:
        raise invalid(f"{shorten(served.name)} does not support thinking", "think", "not_supported")


def check(body: WritingBody) -> None:
    """Raise `ApiError`, with the body's own field names, for fields that contradict each other."""
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if isinstance(body, OllamaGenerateBody) and body.images and (body.raw or body.suffix or body.context):
        excluded = "raw" if body.raw else "suffix" if body.suffix else "context"
        raise invalid(f"images and {excluded} exclude each other: the chat template gives images their place", "images")
    if isinstance(body, OllamaGenerateBody) and (body.system or body.context):
        if body.raw:
            raise invalid("raw mode does not support template, system, or context", "raw")
        if body.suffix:
            raise invalid("suffix excludes system and context: the model reads marks around the texts", "suffix")


def is_held(body: WritingBody) -> bool:
    """Whether a grammar constrains the answer."""
    return bool(body.format) or isinstance(body.format, dict)


def generate_body(
    body: WritingBody, served: ServedModel, prompt: PromptValue, room: int, *, with_ids: bool
) -> GenerateBody:
    """Translate a chat or a prompt; raises `ApiError` with native field names.

    `room` is the number of tokens that fit the context after the prompt.
    """
    options = body.options or Options.model_validate({})
    fields = fields_of(body) | OLLAMA.fields(options)
    length = options.num_predict
    fields |= {
        "stream": body.stream is not False,
        "max_tokens": None if length is None or length < 0 else min(length, max(1, room)),
        "stop": options.stop or None,
        "seed": None if options.seed is None or options.seed < 0 else options.seed,
        "repetition_penalty": options.repeat_penalty,
        "num_speculative_tokens": options.draft_num_predict,
        "num_beams": 1,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "return_token_ids": with_ids,
    }
    if fields["top_k"] is not None:
        fields["top_k"] = max(0, fields["top_k"])
    for name, value in _DEFAULTS.items():
        if fields[name] is None and name not in served.checkpoint.sampling_defaults:
            fields[name] = value
    if fields["top_p"] == 0:
        fields |= {"temperature": 0.0, "top_p": None}
    fields |= native_penalties(options.repeat_last_n, fields)
    if isinstance(body, OllamaGenerateBody):
        fields["suffix"] = body.suffix or None
    if isinstance(body.format, dict):
        fields["response_format"] = json_format(body.format, "format")
    elif body.format:
        fields["response_format"] = {"type": "json_object"}
    return native_generate(fields, prompt)


def embed(body: OllamaEmbedBody) -> EncodeBody:
    """Translate a body with at least one text."""
    fields = {"normalize": True, "truncate": None if body.truncate is False else "right"}
    return native_encode(fields_of(body) | fields, body.input)


def embed_reply(name: str, load_s: float) -> Callable[[EncodePlan, Json], Json]:
    """Return a function that converts a reply of /encode."""

    def show(plan: EncodePlan, reply: Json) -> Json:
        return {
            "model": name,
            "embeddings": [item["embedding"] for item in reply["data"]],
            "total_duration": round(reply["timings"]["total_ms"] * _NANOSECONDS),
            "load_duration": round(load_s * 1e9),
            "prompt_eval_count": reply["usage"]["prompt_tokens"],
        }

    return show


def embeddings(body: OllamaEmbeddingsBody) -> EncodeBody:
    """Translate the body of older clients."""
    return native_encode(fields_of(body), body.prompt)


def embeddings_reply(plan: EncodePlan, reply: Json) -> Json:
    """Convert the reply for older clients."""
    return {"embedding": reply["data"][0]["embedding"]}


def timestamp(seconds: float) -> str:
    """Return a Unix time as the API writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def empty_reply(body: WritingBody, name: str, created_at: str, reason: str) -> Json:
    """Return the reply to a request that only loads or unloads a model."""
    said = {"message": {"role": "assistant", "content": ""}} if isinstance(body, OllamaChatBody) else {"response": ""}
    return {"model": name, "created_at": created_at, **said, "done": True, "done_reason": reason}


def gives_context(body: WritingBody) -> bool:
    """Whether the reply has the tokens of prompt and output, which a later prompt can continue."""
    return isinstance(body, OllamaGenerateBody) and not body.raw and not body.suffix


class OllamaReply(JsonLines, BlockRendering):
    """Renders the reply to a chat or a prompt; a call is one line, with all its arguments."""

    def __init__(
        self, generation: Generation, body: WritingBody, format: ReplyFormat, name: str, load_s: float
    ) -> None:
        """`name` is the model's, as the client wrote it; `load_s` the seconds until the model was loaded."""
        super().__init__(generation, format)
        self._is_chat = isinstance(body, OllamaChatBody)
        self._has_context = gives_context(body)
        self._has_logprobs = bool(body.logprobs)
        self._load_s = load_s
        self._num_calls = 0  # that were closed
        self._head = {"model": name, "created_at": timestamp(generation.head()["created"])}
        self.keepalive = self.frame(self._line())  # clients read every line as an answer

    def events(self, event: Json) -> Iterable[Json]:
        lines = list(super().events(event))
        if logprobs := self._logprobs(event["choices"][0]):
            lines = lines or [self._line()]
            lines[0] |= logprobs
        return lines

    def repeated(self, event: Json) -> Json | None:
        is_content = self._parser.passes and self.blocks and self.blocks[-1].kind == "content"
        if not is_content or self._has_context or self._has_logprobs:  # `context` needs the ids of all outputs
            return None
        return self._line(content=event["choices"][0]["text"])

    def failed(self, error: ApiError) -> Iterable[Json]:
        return (ollama_error(error),)

    def _pieces(self, part: Part) -> Iterator[Json]:
        return filter(None, super()._pieces(part))

    def _begin(self, block: Block) -> Iterable[Json]:
        return ()

    def _piece(self, block: Block, text: str) -> Json:
        if block.kind == "call":
            return {}
        return self._line(content=text) if block.kind == "content" else self._line(thinking=text)

    def _close(self, block: Block) -> Iterable[Json]:
        if block.kind == "call":
            yield self._line(calls=[_call(block, self._num_calls)])
            self._num_calls += 1

    def _end(self, delta: Json, event: Json) -> Iterable[Json]:
        yield self._line() | self._ending(delta, event)

    def _whole(self, choice: Json, reply: Json) -> object:
        said = {
            kind: "".join(block.text for block in self.blocks if block.kind == kind)
            for kind in ("content", "reasoning")
        }
        calls = [_call(block, at) for at, block in enumerate(block for block in self.blocks if block.kind == "call")]
        line = self._line(content=said["content"], thinking=said["reasoning"], calls=calls)
        return line | self._ending(choice, reply) | self._logprobs(choice)

    def _line(self, *, content: str = "", thinking: str = "", calls: Sequence[Json] = ()) -> Json:
        more: Json = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return self._head | {"response": content, **more, "done": False}
        if calls:
            more["tool_calls"] = calls
        return self._head | {"message": {"role": "assistant", "content": content, **more}, "done": False}

    def _ending(self, choice: Json, native: Json) -> Json:
        timings, usage = native["timings"], native["usage"]
        found = {
            "done": True,
            "done_reason": _DONE.get(choice["finish_reason"], "abort"),
            "total_duration": round(timings["total_ms"] * _NANOSECONDS),
            "load_duration": round(self._load_s * 1e9),
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": round(timings["prefill_ms"] * _NANOSECONDS),
            "eval_count": usage["completion_tokens"],
            "eval_duration": round(timings["decode_ms"] * _NANOSECONDS),
        }
        request = self._generation.plan.requests[0]
        if self._has_context and request.source is None and not request.images:
            found["context"] = [*request.prompt_token_ids, *self._ids]
        return found

    def _logprobs(self, choice: Json) -> Json:
        entries = choice.get("logprobs") or ()
        shown = [shown_token(entry) | {"top_logprobs": [shown_token(one) for one in entry["top"]]} for entry in entries]
        return {"logprobs": shown} if shown and self._has_logprobs else {}


def _call(block: Block, index: int) -> Json:
    return {"id": block.id, "function": {"index": index, "name": block.name, "arguments": arguments_of(block)}}
