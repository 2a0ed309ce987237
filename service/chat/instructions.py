"""Tools for chat templates that know none: what they can do, and what was called, is said in plain messages."""

from __future__ import annotations

import json
from collections.abc import Sequence

from service.chat.tools import Json, Tool

_TOOLS = """You can call functions. Each of these lines describes one, with a JSON schema of its arguments:
{tools}

To call functions, reply with nothing but a JSON array of calls, as here:
[{{"name": "the function", "arguments": {{"an argument": "its value"}}}}]
What they return follows in the next message. If no function is needed, answer in words."""
_PART = 10_000  # entries of a list that are written in one call


def plain_messages(messages: Sequence[Json], tools: Sequence[Tool]) -> list[Json]:
    """Return the conversation without tool calls and messages of tools, and with a description of the tools.

    The description stands behind the system message, or else before the first message. Results of several calls become
    one message of the user, since many templates want roles to alternate.
    """
    found: list[Json] = []
    joined: dict[int, list[str]] = {}  # texts of messages, by place: joined once
    names: dict[str, str] = {}  # of functions, by the id of their call
    joins = False  # whether the last message is of tools, and takes what follows from the user
    for message in messages:
        role = message["role"]
        if role == "tool":
            text = _result(message, names)
        elif message.get("tool_calls"):
            calls = [call["function"] for call in message["tool_calls"]]
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"] if call.get("id")}
            text = "\n".join(filter(None, (message.get("content"), json.dumps(calls, ensure_ascii=False))))
            message = {name: value for name, value in message.items() if name != "tool_calls"} | {"content": text}
        else:
            text = message.get("content") or ""
        if role in ("tool", "user") and joins:
            joined.setdefault(len(found) - 1, [found[-1]["content"]]).append(text)
        else:
            found.append({"role": "user", "content": text} if role == "tool" else message)
        joins = role == "tool"
    for at, texts in joined.items():
        found[at] = found[at] | {"content": "\n".join(texts)}
    return _introduced(found, tools) if tools else found


def _result(message: Json, names: dict[str, str]) -> str:
    name = names.get(message.get("tool_call_id", ""), message.get("name", ""))
    return f"Result of {name}:\n{message.get('content') or ''}" if name else f"Result:\n{message.get('content') or ''}"


def _introduced(messages: list[Json], tools: Sequence[Tool]) -> list[Json]:
    lines = "\n".join(_written(tool.shown()["function"]) for tool in tools)
    told = _TOOLS.format(tools=lines)
    first = messages[0]
    content = first.get("content") or ""
    parts = (content, told) if first["role"] in ("system", "developer") else (told, content)
    return [first | {"content": "\n\n".join(filter(None, parts))}, *messages[1:]]


def _written(value: object) -> str:
    """Return what `json.dumps` does, with long lists written in parts: no other thread runs while one is written."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_written(name)}: {_written(one)}' for name, one in value.items())}}}"
    if isinstance(value, list) and len(value) > _PART:
        return f"[{', '.join(_written(value[at : at + _PART])[1:-1] for at in range(0, len(value), _PART))}]"
    return json.dumps(value, ensure_ascii=False)
