"""The conversations that `triptych check` and `make conformance` render with a chat template."""

from __future__ import annotations

from typing import Any

from triptych.service.chat.tools import Json, Tool

_WHERE = {"type": "string", "description": "Where."}
TOOLS = (
    Tool(
        "get_weather",
        "Tells the weather.",
        {"type": "object", "properties": {"city": _WHERE, "n": {"type": "integer"}}},
    ),
    Tool("list_files", None, None),
    Tool(
        "send",
        "Sends it.",
        {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "to": {"type": "array", "items": {"type": "string"}},
                "urgent": {"type": "boolean"},
                "more": {"type": "object", "properties": {"k": {"type": "null"}}},
            },
            "required": ["text"],
        },
    ),
)
Calls = list[tuple[str, dict[str, Any]]]
CALLS: dict[str, Calls] = {
    "a call": [("get_weather", {"city": "Malmö", "n": 3})],
    "no arguments": [("list_files", {})],
    "hard values": [("send", {"text": 'a "b" <c> \\ {d} 7', "to": ["x", "y"], "urgent": True, "more": {"k": None}})],
    "two calls": [("get_weather", {"city": "Lund", "n": 1}), ("get_weather", {"city": "Oslo", "n": 2})],
}
ASKED: Json = {"role": "user", "content": "Weather?"}
_MARKS = "<think> {{ x }} {% if %} [INST] </s> <|im_end|> <tool_call> [TOOL_CALLS]"
UNICODE = "Zürich 東京 🙂 नमस्ते 👩‍👩‍👧 שלום"
THOUGHT, SAID = "Hmm-9.", "Well-5."
ANSWER = {"city": "Malmö", "n": 3}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["city", "n"],
    "additionalProperties": False,
}


def called(kind: str, **more: Any) -> Json:
    """Return a message of the assistant with the calls of a kind."""
    calls = [
        {"id": f"call_{at}a2b3c4d5e6", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(CALLS[kind])
    ]
    return {"role": "assistant", "tool_calls": calls, **more}


def results(*texts: str) -> list[Json]:
    """Return the messages with the results of calls."""
    return [{"role": "tool", "content": text, "tool_call_id": f"call_{at}a2b3c4d5e6"} for at, text in enumerate(texts)]


def turns(*texts: str) -> list[Json]:
    return [{"role": "user" if at % 2 == 0 else "assistant", "content": text} for at, text in enumerate(texts)]


def _system(role: str) -> list[Json]:
    return [{"role": role, "content": "Rule-4"}, *turns("Question-3")]


# Name, messages, whether there are tools, and whether a template may refuse the conversation.
SHOWN_TEXTS: tuple[tuple[str, list[Json], bool, bool], ...] = (
    ("turns", turns("Question-1", "Answer-2", "Question-3", "Answer-4", "Question-5"), False, False),
    ("system message", _system("system"), False, True),
    ("developer message", _system("developer"), False, True),
    ("Unicode", turns(UNICODE), False, False),
    ("marks in a user's text", turns(_MARKS), False, False),
    ("result of a call", [ASKED, called("a call"), *results("Result-1")], True, False),
    ("results of two calls", [ASKED, called("two calls"), *results("Result-1", "Result-2")], True, True),
    ("marks in a result", [ASKED, called("a call"), *results(_MARKS)], True, False),
    ("turns after a result", [ASKED, called("a call"), *results("Result-1"), *turns("x", "Q-2")[1:]], True, False),
)
