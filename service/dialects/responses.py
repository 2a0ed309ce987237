"""OpenAI's responses: translates bodies to conversations and native bodies, and replies and events back.

A response has no `[DONE]`: its last event is `response.completed`, `response.incomplete` or `response.failed`. If it
ended at its deadline or was cancelled, its status is `failed`, because the API has no better one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from triptych.service.chat.conversation import Conversation, template_variables
from triptych.service.chat.parts import Content, Part
from triptych.service.chat.reply_parser import ReplyFormat
from triptych.service.chat.tools import Choice, Json, Tool, ToolUse, called_arguments, tool_use
from triptych.service.core.errors import ApiError, invalid
from triptych.service.core.models import ServedModel
from triptych.service.dialects.blocks import Block, BlockRendering
from triptych.service.dialects.common import native_generate, native_top_k, sampling_fields
from triptych.service.dialects.content_tokens import ContentTokens, token_texts
from triptych.service.dialects.openai_replies import shown_token
from triptych.service.dialects.responses_bodies import (
    InputCall,
    InputCallOutput,
    InputImage,
    InputMessage,
    InputReasoning,
    InputTokensBody,
    ResponsesAllowedTools,
    ResponsesBody,
    ResponsesNamedTool,
    ResponsesNamespace,
    ResponsesTool,
)
from triptych.service.http.json_replies import Generation
from triptych.service.images import pictures
from triptych.service.images.pictures import content_of, picture, text
from triptych.service.schemas.bodies import GenerateBody
from triptych.service.schemas.parameters import RESPONSES

NAMES = {
    **RESPONSES.names,
    "prompt": "input",
    "messages": "input",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
}
_STATUS = {"stop": "completed", "length": "incomplete", "cancelled": "failed", "deadline": "failed", "error": "failed"}
_SHOWN = {"type", "name", "description", "parameters"}  # fields of a tool that a reply repeats
_FAILURES = {
    "cancelled": "the response was cancelled",
    "deadline": "the deadline passed before the response was complete",
}


def conversation(body: InputTokensBody, served: ServedModel, before: Sequence[Mapping[str, Any]]) -> Conversation:
    """Return the messages, tools and template variables of a body; `before` are the messages of earlier responses."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    others = body.chat_template_kwargs
    variables = template_variables(served.chat, effort, "reasoning.effort", body.enable_thinking, others)
    use = _tool_use(body)
    messages = [*map(_earlier, before), *input_messages(body)]
    if not messages:
        raise invalid("input has no items, and there is no previous_response_id", "input")
    return Conversation(_instructed(body, messages), use, variables, param="input")


def _earlier(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message of an earlier response; errors of its images name that response."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [one | {"param": "previous_response_id"} for one in content]}


def _instructed(body: InputTokensBody, messages: list[Mapping[str, Any]]) -> list[Json]:
    """Put the instructions before the messages, or into the first one if it is a system message.

    Many templates read only one system message.
    """
    found = [dict(message) for message in messages]
    if body.instructions and found and found[0]["role"] in ("system", "developer"):
        found[0]["content"] = f"{body.instructions}\n\n{found[0]['content']}"
    elif body.instructions:
        found.insert(0, {"role": "system", "content": body.instructions})
    return found


def _tool_use(body: InputTokensBody) -> ToolUse:
    tools = tuple(tool for tool, _, _ in _tools(body))
    return chosen(tools, body.tool_choice, parallel=body.parallel_tool_calls is not False)


def chosen(
    tools: tuple[Tool, ...], choice: ResponsesNamedTool | ResponsesAllowedTools | Choice | None, *, parallel: bool
) -> ToolUse:
    """Return the use of tools that a choice asks for."""
    match choice:
        case ResponsesNamedTool(name=name):
            return tool_use(tools, "required", (name,), parallel=parallel)
        case ResponsesAllowedTools(mode=mode, tools=allowed):
            return tool_use(tools, mode, (one.name for one in allowed), parallel=parallel)
        case word:
            return tool_use(tools, word, None, parallel=parallel)


def _tools(body: InputTokensBody) -> Iterator[tuple[Tool, str | None, str]]:
    """Yield each function for the template, with its namespace and its name in the namespace."""
    for at, one in enumerate(body.tools or ()):
        if isinstance(one, ResponsesTool):
            yield _tool(one, None, f"tools[{at}]"), None, one.name
        else:
            for within, tool in enumerate(one.tools):
                yield _tool(tool, one, f"tools[{at}].tools[{within}]"), one.name, tool.name


def _tool(tool: ResponsesTool, within: ResponsesNamespace | None, param: str) -> Tool:
    name, description = tool.name, tool.description
    if within is not None:
        name = _full_name(within.name, name)
        description = "\n".join(text for text in (within.description, description) if text) or None
    return Tool(name, description, tool.parameters, bool(tool.strict), f"{param}.parameters")


def _full_name(namespace: str | None, name: str) -> str:
    """Return the name of a function in templates and in the model's output."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


def input_messages(body: InputTokensBody) -> list[Json]:
    """Return the input as messages of a template; consecutive reasoning, text and calls become one message."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    found: list[Json] = []
    for at, item in enumerate(body.input):
        match item:
            case InputMessage():
                content = _content(item.content, f"input[{at}].content", item.role)
                if item.role == "assistant":
                    _add(found, {"content": content})
                else:
                    found.append({"role": item.role, "content": content})
            case InputReasoning():
                _add(found, {"reasoning_content": "".join(one.text for one in item.content or ())})
            case InputCall():
                name = _full_name(item.namespace, item.name)
                _add(found, {"tool_calls": [call_message(item.call_id, name, item.arguments)]})
            case InputCallOutput():
                content = _content(item.output, f"input[{at}].output", "tool")
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    for one in found:
        for name in ("content", "reasoning_content"):
            if one["role"] == "assistant" and isinstance(one.get(name), list):
                one[name] = "".join(one[name])
    return found


def response_of(item_id: str) -> str:
    """Return the id of the response whose output has the item of this id."""
    return f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"


def _content(content: str | list[Any], param: str, role: str) -> pictures.Content:
    if isinstance(content, str):
        return content
    parts = [
        picture(part.image_url, f"{param}[{at}].image_url", part.detail)
        if isinstance(part, InputImage)
        else text(part.text)
        for at, part in enumerate(content)
    ]
    return content_of(parts, role)


def call_message(id: str, name: str, arguments: str) -> Json:
    """Return a call in the form that templates read."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": called_arguments(arguments)}}


def _add(messages: list[Json], fields: Json) -> None:
    """Add a field to the assistant's message at the end, or to a new one if the last already has a later field.

    Texts become a list, which is joined once: joining each text would copy the earlier ones again.
    """
    last = messages[-1] if messages else {}
    order = ("reasoning_content", "content", "tool_calls")
    [name] = fields
    begun = [one for one in order[order.index(name) + (name != "content") :] if one in last]
    if last.get("role") != "assistant" or begun:
        messages.append({"role": "assistant", **fields})
    elif name == "tool_calls" and name in last:
        last[name] += fields[name]
    elif isinstance(last.get(name), list):
        last[name].append(fields[name])
    elif name in last:
        last[name] = [last[name], fields[name]]
    else:
        last.update(fields)


def generate_body(body: ResponsesBody, served: ServedModel, prompt: list[int]) -> GenerateBody:
    """Translate a body whose conversation has become the token ids `prompt`."""
    fields = sampling_fields(body, RESPONSES, served) | {
        "max_tokens": body.max_output_tokens,
        "stop": body.stop,
        "top_k": native_top_k(body.top_k),
        "return_token_ids": True,
        "logprobs": (body.top_logprobs or 0) if body.has_logprobs else None,
    }
    if body.text is not None and body.text.format is not None:
        format = body.text.format
        schema = {} if format.schema_ is None else {"schema": format.schema_}
        fields["response_format"] = {"type": format.type} | (
            {"json_schema": schema} if format.type == "json_schema" else {}
        )
    return native_generate(fields, prompt)


def is_held(body: ResponsesBody) -> bool:
    """Whether a grammar constrains the answer."""
    return body.text is not None and body.text.format is not None and body.text.format.type != "text"


class Responses(BlockRendering):
    """Renders a reply as a response or its events. `keep` stores the id, message and response when it is complete."""

    def __init__(
        self,
        generation: Generation,
        body: ResponsesBody,
        format: ReplyFormat,
        keep: Callable[[str, Json, Json], None] | None,
    ) -> None:
        super().__init__(generation, format)
        self._body = body
        self._keep = keep
        self._number = 0
        self._tokens = ContentTokens() if body.has_logprobs else None
        self._logprobs: list[Json] = []  # of the current piece of content
        self._head = generation.head()
        self._namespaces = {tool.name: (space, name) for tool, space, name in _tools(body) if space is not None}

    @property
    def _id(self) -> str:
        return f"resp_{self._head['id']}"

    def opening(self) -> Iterable[Json]:
        response = self._response("in_progress", [])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def failed(self, error: ApiError) -> Iterable[Json]:
        yield from self._closing(is_cut=True)
        detail = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message}
        yield self._error(detail, error.type, error.param)
        response = self._response("failed", self._items()) | {"error": detail}
        yield self._event("response.failed", response=response)

    def _parts(self, choice: Json, *, end: bool) -> Iterator[Part]:
        if self._tokens is None:
            yield from super()._parts(choice, end=end)
            return
        texts: Sequence[tuple[str, Json | None]] = token_texts(choice["text"], choice.get("logprobs") or ())
        texts = texts or [(choice["text"], None)]
        for at, (piece, token) in enumerate(texts, start=1):
            self._tokens.add(piece, token)
            parts = self._parser.push(piece, end=end and at == len(texts))
            for part in parts:
                if isinstance(part, Content):
                    held = self._parser.held if part is parts[-1] else 0
                    self._logprobs = [_logprob(one) for one in self._tokens.take(part.text, held)]
                yield part

    def _error(self, detail: Json, type: str, param: str | None) -> Json:
        """Return the event for clients that raise the field `error` of any event, and do not know `response.failed`."""
        return self._event("error", **detail, param=param, error={"type": type, "param": param, **detail})

    def _event(self, type: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": type, "sequence_number": self._number - 1, **fields}

    def _begin(self, block: Block) -> Iterable[Json]:
        empty = Block(block.kind, block.index, "", block.id, block.name)
        item = self._item(empty, "in_progress")
        if block.kind != "call":
            item["content"] = []
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            yield self._event("response.content_part.added", **self._place(block), part=_part(empty))

    def _piece(self, block: Block, text: str) -> Json:
        if block.kind == "call":
            place = self._place(block, part=False)
            return self._event("response.function_call_arguments.delta", **place, delta=text)
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **self._place(block), delta=text)
        block.logprobs += self._logprobs
        return self._event("response.output_text.delta", **self._place(block), delta=text, logprobs=self._logprobs)

    def _close(self, block: Block) -> Iterable[Json]:
        if block.kind == "call":
            place = self._place(block, part=False)
            fields = {"name": self._name(block)["name"], "arguments": block.text}
            yield self._event("response.function_call_arguments.done", **place, **fields)
        else:
            name = "reasoning_text" if block.kind == "reasoning" else "output_text"
            more: Json = {} if block.kind == "reasoning" else {"logprobs": block.logprobs}
            yield self._event(f"response.{name}.done", **self._place(block), text=block.text, **more)
            yield self._event("response.content_part.done", **self._place(block), part=_part(block))
        item = self._item(block, _status(block))
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _end(self, delta: Json, event: Json) -> Iterable[Json]:
        response = self._complete(delta, event)
        if response["error"] is not None:
            yield self._error(response["error"], "server_error", None)
        yield self._event(f"response.{response['status']}", response=response)

    def _whole(self, choice: Json, reply: Json) -> object:
        return self._complete(choice, reply)

    def _complete(self, choice: Json, native: Json) -> Json:
        """Return the response with its final status and usage, and store it."""
        reason = choice["finish_reason"]
        response = self._response(_STATUS[reason], self._items())
        if reason == "stop":
            response["completed_at"] = self._head["created"] + round(native["timings"]["total_ms"] / 1000)
        elif reason == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        elif reason in _FAILURES:
            response["error"] = {"code": "server_error", "message": _FAILURES[reason]}
        usage = native["usage"]
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["cached_tokens"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }
        if self._keep is not None and response["status"] != "failed":
            self._keep(self._id, self._message(), response)
        return response

    def _message(self) -> Json:
        """Return the response as a message of a template."""
        message: Json = {"role": "assistant", "content": ""}
        for block in self.blocks:
            if block.kind == "call":
                call = call_message(block.id, block.name, block.text)
                message["tool_calls"] = [*message.get("tool_calls", ()), call]
            else:
                name = "content" if block.kind == "content" else "reasoning_content"
                message[name] = message.get(name, "") + block.text
        return message

    def _items(self) -> list[Json]:
        return [self._item(block, _status(block)) for block in self.blocks]

    def _item(self, block: Block, status: str) -> Json:
        id = self._item_id(block)
        if block.kind == "call":
            called = {"call_id": block.id, **self._name(block), "arguments": block.text}
            return {"type": "function_call", "id": id, "status": status, **called}
        if block.kind == "reasoning":
            return {"type": "reasoning", "id": id, "status": status, "summary": [], "content": [_part(block)]}
        return {"type": "message", "id": id, "status": status, "role": "assistant", "content": [_part(block)]}

    def _name(self, block: Block) -> Json:
        """Return the name of the called function, and its namespace, if it has one, in a separate field."""
        namespace, name = self._namespaces.get(block.name, (None, block.name))
        return {"name": name} if namespace is None else {"name": name, "namespace": namespace}

    def _item_id(self, block: Block) -> str:
        prefix = {"reasoning": "rs", "content": "msg", "call": "fc"}[block.kind]
        return f"{prefix}_{self._head['id']}_{block.index}"

    def _place(self, block: Block, *, part: bool = True) -> Json:
        place: Json = {"item_id": self._item_id(block), "output_index": block.index}
        return place | {"content_index": 0} if part else place

    def _response(self, status: str, output: list[Json]) -> Json:
        body = self._body
        effort = body.reasoning.effort if body.reasoning is not None else None
        choice = body.tool_choice
        format = body.text.format if body.text is not None and body.text.format is not None else None
        params = self._generation.plan.requests[0].params
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._head["model"],
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "store": self._keep is not None,
            "service_tier": "default",
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
            "temperature": params.temperature,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "text": {
                "format": {"type": "text"} if format is None else format.model_dump(by_alias=True, exclude_none=True)
            },
            "tool_choice": choice or "auto" if isinstance(choice, str | None) else choice.model_dump(),
            "tools": [_shown(tool) for tool in body.tools or ()],
            "top_p": params.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }


def _shown(tool: ResponsesTool | ResponsesNamespace) -> Json:
    shown = tool.model_dump(include=_SHOWN)
    if isinstance(tool, ResponsesNamespace):
        return shown | {"tools": [_shown(one) for one in tool.tools]}
    return shown | {"strict": bool(tool.strict)}


def _status(block: Block) -> str:
    return "incomplete" if block.is_cut else "completed"


def _part(block: Block) -> Json:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}


def _logprob(entry: Json) -> Json:
    one, *others = ({**token, "bytes": token["bytes"] or []} for token in map(shown_token, (entry, *entry["top"])))
    return {**one, "top_logprobs": others}
