"""Lists the input of a stored response as items, page by page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triptych.service.chat.tools import Json
from triptych.service.core.errors import invalid, shorten
from triptych.service.images.files import as_data_url


def page(items: Sequence[Json], *, after: str | None, limit: int, descends: bool) -> Json:
    """Return a list in OpenAI's form of at most `limit` items that follow the item with the id `after`."""
    ordered = list(reversed(items)) if descends else list(items)
    begin = 0
    if after is not None:
        begin = next((at for at, item in enumerate(ordered, start=1) if item["id"] == after), 0)
        if not begin:
            raise invalid(f"after: the response has no item {shorten(after)}", "after")
    shown = ordered[begin : begin + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": begin + limit < len(ordered),
    }


def items(messages: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Convert messages of a template to items; ids are made from their index."""
    found = [item for message in messages for item in _items(message)]
    return [{"id": f"item_{at}", **item} for at, item in enumerate(found)]


def _items(message: Mapping[str, Any]) -> Iterator[Json]:
    done: Json = {"status": "completed"}
    content = message.get("content") or ""
    if message["role"] == "tool":
        output = content if isinstance(content, str) else list(map(_part, content))
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": output, **done}
        return
    if thought := message.get("reasoning_content"):
        yield {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}], **done}
    is_assistant = message["role"] == "assistant"
    if content or not is_assistant:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        shown = list(map(_part, parts))
        if is_assistant:
            shown = [{"type": "output_text", "text": content, "annotations": [], "logprobs": []}]
        yield {"type": "message", "role": message["role"], "content": shown, **done}
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        named = {"call_id": call["id"], "name": call["function"]["name"], "arguments": written}
        yield {"type": "function_call", **named, **done}


def _part(part: Mapping[str, Any]) -> Json:
    if part["type"] == "text":
        return {"type": "input_text", "text": part["text"]}
    return {"type": "input_image", "image_url": as_data_url(part["file"]), "detail": part["detail"], "file_id": None}
