"""Anthropic's messages: translates bodies to conversations and native bodies, and replies and events back.

A reply that ended at its deadline, or was cancelled, has the stop_reason `pause_turn`: sent back, it is continued.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pydantic_core

from triptych.service.chat.conversation import Conversation, template_variables
from triptych.service.chat.parts import Arguments, Part
from triptych.service.chat.reply_parser import ReplyFormat
from triptych.service.chat.tools import Json, Tool, tool_use
from triptych.service.core.errors import ApiError, anthropic_error, invalid
from triptych.service.core.models import ServedModel
from triptych.service.dialects.blocks import Block, BlockRendering, arguments_of
from triptych.service.dialects.common import native_generate, sampling_fields
from triptych.service.dialects.messages_bodies import (
    ConversationMessage,
    CountBody,
    ImageBlock,
    MessagesBody,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UnservedText,
)
from triptych.service.http.json_replies import Generation
from triptych.service.images.pictures import Content, content_of, merged, picture, text
from triptych.service.schemas.bodies import GenerateBody
from triptych.service.schemas.parameters import MESSAGES

NAMES = {
    **MESSAGES.names,
    "prompt": "messages",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
}
_STOP = {"stop": "end_turn", "length": "max_tokens", "deadline": "pause_turn", "cancelled": "pause_turn"}


def names(body: CountBody) -> Mapping[str, str]:
    """Return the body's own field names, by native name."""
    if body.output_format is None:
        return NAMES
    return NAMES | {"response_format.json_schema.schema": "output_format.schema", "response_format": "output_format"}


def conversation(body: CountBody, served: ServedModel) -> Conversation:
    """Return the messages, tools and template variables of a body; raises `ApiError`."""
    if body.output_format is not None and body.output_config is not None and body.output_config.format is not None:
        raise invalid("output_format and output_config.format are the same; send one of them", "output_format")
    found: list[Json] = []
    if body.system:
        found.append({"role": "system", "content": _text(body.system)})
    for at, message in enumerate(body.messages):
        for one in _messages(message, f"messages[{at}]"):
            _add(found, one)
    for one in found:
        if isinstance(one["content"], _Contents):
            one["content"] = merged(one["content"])
    last = found[-1]
    continues = last["role"] == "assistant" and "tool_calls" not in last
    tools = tuple(
        Tool(one.name, one.description, one.input_schema, bool(one.strict), f"tools[{at}].input_schema")
        for at, one in enumerate(body.tools or ())
    )
    choice = body.tool_choice
    kind = "auto" if choice is None else choice.type
    named = choice.name if choice is not None and kind == "tool" else None
    if kind == "tool" and named is None:
        raise invalid("tool_choice.name is required with the type tool", "tool_choice.name", "missing_field")
    use = tool_use(
        tools,
        "none" if kind == "none" else "auto" if kind == "auto" else "required",
        None if named is None else (named,),
        parallel=not (choice is not None and choice.disable_parallel_tool_use),
    )
    return Conversation(found, use, _variables(body, served), continues=continues)


def _variables(body: CountBody, served: ServedModel) -> Mapping[str, tuple[Any, str]]:
    """Return the variables of the template. If it can turn reasoning off, it does unless the body requests it.

    An effort is a wish: templates without levels do not get it. Claude Code sends one to every model.
    """
    effort = body.output_config.effort if body.output_config is not None else None
    if served.chat is None or not served.chat.takes("reasoning_effort"):
        effort = None if effort != "none" else effort
    variables = template_variables(served.chat, effort, "output_config.effort", None, body.chat_template_kwargs)
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    if served.chat is not None and served.chat.switch is not None:
        variables.setdefault(served.chat.switch, (thinks, "thinking"))
    return variables


def check_thinking(body: MessagesBody, format: ReplyFormat) -> None:
    """Refuse reasoning if the model cannot reason, and a budget that leaves no tokens for an answer."""
    if body.thinking is None or body.thinking.type == "disabled":
        return
    if format.reasoning is None:
        raise invalid("thinking: the chat template of this model knows no reasoning", "thinking", "not_supported")
    budget = body.thinking.budget_tokens
    if budget is not None and budget >= body.max_tokens:
        message = f"thinking.budget_tokens ({budget}) must be below max_tokens ({body.max_tokens})"
        raise invalid(message, "thinking.budget_tokens")


class _Contents(list[Content]):
    """The contents of consecutive messages of one author, which form one turn."""


def _text(content: str | Sequence[TextBlock | UnservedText] | None) -> str:
    return content or "" if content is None or isinstance(content, str) else "\n".join(one.text for one in content)


def _add(messages: list[Json], one: Json) -> None:
    """Add a message. Consecutive texts of one author are one turn, as in that API: they form a list, joined later."""
    last = messages[-1] if messages else {}
    if one["role"] == "tool" or last.get("role") != one["role"] or not last.keys() == one.keys() == {"role", "content"}:
        messages.append(one)
    elif isinstance(last["content"], _Contents):
        last["content"].append(one["content"])
    else:
        last["content"] = _Contents((last["content"], one["content"]))


def _messages(message: ConversationMessage, param: str) -> list[Json]:
    """Return a message as messages of a template: first each result of a tool, then the rest."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    found: list[Json] = []
    parts: list[Json] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for at, block in enumerate(message.content):
        match block:
            case TextBlock():
                parts.append(text(block.text))
            case ImageBlock():
                parts.append(_image(block, f"{param}.content[{at}].source"))
            case ToolResultBlock() if message.role == "user":
                content = _result(block, f"{param}.content[{at}].content")
                found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            case RedactedThinkingBlock() if message.role == "assistant":
                pass
            case ThinkingBlock() if message.role == "assistant":
                thoughts.append(block.thinking)
            case ToolUseBlock() if message.role == "assistant":
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                place = f"{param}.content[{at}]"
                raise invalid(f"{place}: a {block.type} block has no place in a message of the {message.role}", place)
    if parts or thoughts or calls:
        own: Json = {"role": message.role, "content": content_of(parts, message.role)}
        if thoughts:
            own["reasoning_content"] = "".join(thoughts)
        if calls:
            own["tool_calls"] = calls
        found.append(own)
    return found


def _result(block: ToolResultBlock, param: str) -> Content:
    """Return what a tool returned; a failure is marked."""
    given = block.content or ""
    content: Content
    if isinstance(given, str):
        content = given
    else:
        parts = [
            _image(one, f"{param}[{at}].source") if isinstance(one, ImageBlock) else text(one.text)
            for at, one in enumerate(given)
        ]
        content = content_of(parts, "tool")
    return merged(("Error", content), ": ") if block.is_error else content


def _image(block: ImageBlock, param: str) -> Json:
    if block.source.type != "base64":
        raise invalid(f"{param}.type must be base64, found {block.source.type}", f"{param}.type", "not_supported")
    if block.source.data is None:
        raise invalid(f"{param}.data is required", f"{param}.data", "missing_field")
    return picture(block.source.data, f"{param}.data")


def generate_body(body: MessagesBody, served: ServedModel, prompt: list[int], room: int) -> GenerateBody:
    """Translate a body whose conversation has become the token ids `prompt`; `room` more fit the context.

    `max_tokens` is reduced to `room`: clients request what the models of that API can generate.
    """
    fields = sampling_fields(body, MESSAGES, served) | {
        "max_tokens": min(body.max_tokens, max(1, room)),
        "stop": body.stop_sequences or None,
        "return_token_ids": True,
    }
    if body.format is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format.schema_}}
    return native_generate(fields, prompt)


def is_held(body: MessagesBody) -> bool:
    """Whether a grammar constrains the answer."""
    return body.format is not None


class Messages(BlockRendering):
    """Renders a reply as a message or its events."""

    keepalive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, generation: Generation, body: MessagesBody, format: ReplyFormat) -> None:
        super().__init__(generation, format)
        self._body = body
        self._omits_thinking = body.thinking is not None and body.thinking.display == "omitted"
        self._head = generation.head()
        self._arguments = JsonBeginning()  # arguments of the current call

    def opening(self) -> Iterable[Json]:
        usage = {"input_tokens": self._generation.plan.prompt_tokens, "output_tokens": 0}
        yield {"type": "message_start", "message": self._message([], None, None, usage)}
        yield {"type": "ping"}

    def failed(self, error: ApiError) -> Iterable[Json]:
        return (anthropic_error(error, self._head["id"]),)

    def _pieces(self, part: Part) -> Iterator[Json]:
        if isinstance(part, Arguments):
            part = replace(part, text=self._arguments.push(part.text))
            if not part.text:
                return
        for event in super()._pieces(part):
            if not (self._omits_thinking and event.get("delta", {}).get("type") == "thinking_delta"):
                yield event

    def _begin(self, block: Block) -> Iterable[Json]:
        self._arguments = JsonBeginning()
        empty = Block(block.kind, block.index, "", block.id, block.name)
        yield {"type": "content_block_start", "index": block.index, "content_block": _shown(empty)}

    def _piece(self, block: Block, text: str) -> Json:
        type_, name = {
            "reasoning": ("thinking_delta", "thinking"),
            "content": ("text_delta", "text"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        return {"type": "content_block_delta", "index": block.index, "delta": {"type": type_, name: text}}

    def _close(self, block: Block) -> Iterable[Json]:
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", "index": block.index, "delta": delta}
        elif block.kind == "call" and (rest := self._arguments.rest()):
            block.text += rest
            yield self._piece(block, rest)
        yield {"type": "content_block_stop", "index": block.index}

    def _end(self, delta: Json, event: Json) -> Iterable[Json]:
        reason, sequence = self._stop(delta)
        ended = {"stop_reason": reason, "stop_sequence": sequence}
        yield {"type": "message_delta", "delta": ended, "usage": self._usage(event)}
        yield {"type": "message_stop"}

    def _whole(self, choice: Json, reply: Json) -> object:
        content = [_shown(block) for block in self.blocks]
        if self._omits_thinking:
            content = [one | {"thinking": ""} if one["type"] == "thinking" else one for one in content]
        return self._message(content, *self._stop(choice), self._usage(reply))

    def _stop(self, choice: Json) -> tuple[str, str | None]:
        """Return the stop_reason and the stop_sequence."""
        sequence = choice.get("stop_reason")
        reason = _STOP[choice["finish_reason"]]
        if reason == "end_turn" and isinstance(sequence, str):
            return "stop_sequence", sequence
        if reason == "max_tokens" and self._generation.plan.requests[0].params.max_tokens < self._body.max_tokens:
            return "model_context_window_exceeded", None
        return ("tool_use" if reason == "end_turn" and self._parser.has_calls else reason), None

    def _usage(self, native: Json) -> Json:
        usage = native["usage"]
        cached = usage["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._reasoning_tokens},
        }

    def _message(self, content: list[Json], reason: str | None, sequence: str | None, usage: Json) -> Json:
        return {
            "id": f"msg_{self._head['id']}",
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }


class JsonBeginning:
    """Passes a text on while it is the beginning of a JSON value; the API's client fails on other arguments of a call.

    Each check reads the whole text, so a long text is passed on in pieces of 1/256 of it.
    """

    def __init__(self) -> None:
        self._text = ""
        self._passed = 0
        self._is_json = True

    def push(self, text: str) -> str:
        """Add text; return what can be passed on now; may be empty."""
        self._text += text
        return self.rest() if len(self._text) - self._passed > len(self._text) // 256 else ""

    def rest(self) -> str:
        """Return the rest of the text, up to where it stops being JSON."""
        if not self._is_json:
            return ""
        start, end = self._passed, len(self._text)
        if not self._begins_json(end):
            self._is_json = False
            end = start + bisect(range(start + 1, end), False, key=lambda size: not self._begins_json(size))
        self._passed = end
        return self._text[start:end]

    def _begins_json(self, size: int) -> bool:
        text = self._text[:size]
        try:
            pydantic_core.from_json(text, allow_partial=True, allow_inf_nan=False)
        except ValueError:
            return not text.strip()
        return True


def _shown(block: Block) -> Json:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "content":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments_of(block)}
