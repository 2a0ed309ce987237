"""Gives messages the form that a chat template accepts, according to its traits."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from triptych.model.text.spelled_marks import SpelledMarks
from triptych.service.chat.call_grammar import written_calls
from triptych.service.chat.chat_template import CallIds, ChatTemplate, TemplateTraits, in_parts
from triptych.service.chat.formats import ToolFormat, fitting_id
from triptych.service.chat.tools import Json, Tool
from triptych.service.images.pictures import Content, merged

# -- Tools for chat templates that know none: plain messages describe the tools and the earlier calls.

_TOOLS = """You can call functions. Each of these lines describes one, with a JSON schema of its arguments:
{tools}

To call functions, reply with nothing but a JSON array of calls, as here:
[{{"name": "the function", "arguments": {{"an argument": "its value"}}}}]
What they return follows in the next message. If no function is needed, answer in words."""
_OWN = ("system", "developer", "assistant")  # the roles whose texts are the operator's and the model's
_NAMES = ("role", "name", "tool_call_id")  # the texts of other messages that templates show with the content
_PART = 10_000  # entries of a list that one call of `json.dumps` writes


def plain_messages(messages: Sequence[Json], tools: Sequence[Tool]) -> list[Json]:
    """Return the conversation with tool calls, results and descriptions of tools written as plain messages.

    The description follows the text of a system message; without one, it begins the first message. Results of several
    calls become one user message, because many templates require alternating roles.
    """
    found: list[Json] = []
    joined: dict[int, list[Content]] = {}  # contents of messages, by place: joined once
    names: dict[str, str] = {}  # of functions, by the id of their call
    joins = False  # whether the last message is a tool's, to which results and user messages are joined
    for message in messages:
        role = message["role"]
        if role == "tool":
            said = _result(message, names)
        elif message.get("tool_calls"):
            calls = [call["function"] for call in message["tool_calls"]]
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"] if call.get("id")}
            said = "\n".join(filter(None, (message.get("content"), json.dumps(calls, ensure_ascii=False))))
            message = {name: value for name, value in message.items() if name != "tool_calls"} | {"content": said}
        else:
            said = message.get("content") or ""
        if role in ("tool", "user") and joins:
            joined.setdefault(len(found) - 1, [found[-1]["content"]]).append(said)
        else:
            found.append({"role": "user", "content": said} if role == "tool" else message)
        joins = role == "tool"
    for at, contents in joined.items():
        found[at] = found[at] | {"content": merged(contents)}
    return _introduced(found, tools) if tools else found


def _result(message: Json, names: dict[str, str]) -> Content:
    name = names.get(message.get("tool_call_id", ""), message.get("name", ""))
    return merged((f"Result of {name}:" if name else "Result:", message.get("content") or ""))


def _introduced(messages: list[Json], tools: Sequence[Tool]) -> list[Json]:
    lines = "\n".join(_written(tool.shown()["function"]) for tool in tools)
    description = _TOOLS.format(tools=lines)
    first = messages[0]
    content = first.get("content") or ""
    parts = (content, description) if first["role"] in ("system", "developer") else (description, content)
    return [first | {"content": merged([part for part in parts if part], "\n\n")}, *messages[1:]]


def _written(value: object) -> str:
    """Return what `json.dumps` does; long lists are written in pieces, because it blocks all other threads."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_written(name)}: {_written(one)}' for name, one in value.items())}}}"
    if isinstance(value, list) and len(value) > _PART:
        return f"[{', '.join(_written(value[at : at + _PART])[1:-1] for at in range(0, len(value), _PART))}]"
    return json.dumps(value, ensure_ascii=False)


def fitted_messages(
    messages: Sequence[Json], tools: Sequence[Tool], chat: ChatTemplate, calls: ToolFormat | None
) -> list[Json]:
    """Return the messages for a template; `tools` are those of the conversation."""
    traits, reads_tools = chat.traits, chat.reads("tools")
    if (reads_tools and (traits.renders_calls or calls is not None)) or (traits.renders_calls and not tools):
        fit = _Fit(traits, calls)
        found = [fitted for message in messages for fitted in fit.messages(message)]
    elif tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        found = plain_messages(messages, () if reads_tools else tools)
    else:
        found = list(messages)
    if not traits.knows_developer:
        found = [one | {"role": "system"} if one["role"] == "developer" else one for one in found]
    found = [_with_reasoning(one, traits) for one in found]
    return [in_parts(one) for one in found] if traits.text_in_parts else found


def shown_tools(tools: Iterable[Tool], traits: TemplateTraits) -> list[Json]:
    """Return the tools as a template expects them."""
    found = [tool.shown() for tool in tools]
    return [_described(tool) for tool in found] if traits.describes else found


def given_ids(traits: TemplateTraits, calls: ToolFormat | None) -> CallIds:
    """Return the form that ids of calls must have."""
    return traits.ids if calls is None or traits.ids is not CallIds.ANY else calls.ids


# -- Special tokens that a user or a tool spells. The tokenizer would read them as tokens that end a turn or begin one,
# so the prompt is cut within each.


def new_separator() -> str:
    """Return a text that no client can guess, of digits: templates change neither these nor their JSON."""
    return f"{secrets.randbits(128):039d}"


def texts_of(message: Json) -> Iterator[str]:
    """Yield the texts of a message's content, which may be a list of parts."""
    content = message.get("content")
    for one in content if isinstance(content, list) else ({"text": content},):
        if isinstance(text := one.get("text"), str):
            yield text


def parted_messages(messages: Sequence[Json], marks: SpelledMarks, separator: str, known: dict[str, str]) -> list[Json]:
    """Return the messages with a separator in each mark that all roles but `_OWN` spell; `known` are texts done before.

    Templates join the parts of a content, some without the spaces around them: a mark may go on in the next part.
    """
    for text in (text for one in messages if one["role"] not in _OWN for text in texts_of(one)):
        if text not in known:
            known[text] = marks.parted(text, separator)
    return [_parted(one, marks, separator, known) if one["role"] not in _OWN else one for one in messages]


def without_marks(value: Any, marks: SpelledMarks, separator: str) -> Any:
    """Return messages or tools with a separator in each mark that any of their texts or names spells."""
    if isinstance(value, str):
        return marks.parted(value, separator)
    if isinstance(value, list):
        return [without_marks(one, marks, separator) for one in value]
    if isinstance(value, dict):
        return {marks.parted(name, separator): without_marks(one, marks, separator) for name, one in value.items()}
    return value


def _parted(message: Json, marks: SpelledMarks, separator: str, known: Mapping[str, str]) -> Json:
    named = {key: marks.parted(text, separator) for key in _NAMES if isinstance(text := message.get(key), str)}
    message, content = message | named, message.get("content")
    if isinstance(content, str):
        return message | {"content": known[content]}
    if not isinstance(content, list):
        return message
    texts = list(texts_of(message))
    cut = marks.crossed(texts) | marks.crossed([text.strip() for text in texts])
    parted = iter([known[text] + (separator if at in cut else "") for at, text in enumerate(texts)])
    return message | {
        "content": [part | {"text": next(parted)} if isinstance(part.get("text"), str) else part for part in content]
    }


class _Fit:
    """A converter of the messages of one conversation, in their order."""

    def __init__(self, traits: TemplateTraits, calls: ToolFormat | None) -> None:
        self._traits = traits
        self._format = calls
        self._ids = given_ids(traits, calls)
        self._in_content = calls is not None and (traits.calls_in_content or not traits.renders_calls)
        self._given: dict[str, tuple[str, str]] = {}  # new id and function name, by the id of a call
        self._count = 0

    def messages(self, message: Json) -> list[Json]:
        """Return the message in the template's form: two messages if its content and calls must be separate."""
        found = self._message(message)
        if not (self._traits.calls_apart and found.get("tool_calls") and found.get("content")):
            return [found]
        said = {name: value for name, value in found.items() if name != "tool_calls"}
        called = {name: value for name, value in found.items() if name != "reasoning_content"}
        self._leave_empty(called)
        return [said, called]

    def _message(self, message: Json) -> Json:
        found = dict(message)
        if "tool_call_id" in found:
            id, name = self._given.get(found["tool_call_id"], (fitting_id(self._ids, found["tool_call_id"]), ""))
            found["tool_call_id"] = id
            if self._traits.names_results and name:
                found.setdefault("name", name)
        if found.get("tool_calls"):
            found["tool_calls"] = [self._call(call) for call in found["tool_calls"]]
            if self._in_content and self._format is not None:
                return self._written(found, self._format)
            if not found.get("content"):
                self._leave_empty(found)
        return found

    def _leave_empty(self, found: Json) -> None:
        """Set the empty content of a message with calls in the form that the template accepts."""
        if self._traits.has_content_key:
            found["content"] = self._traits.empty_content
        else:
            found.pop("content", None)

    def _call(self, call: Json) -> Json:
        found, name = dict(call), call["function"]["name"]
        given = found.get("id") or ""
        if self._ids is CallIds.NUMBERED:
            found["id"] = f"functions.{name}:{self._count}"
        elif given:
            found["id"] = fitting_id(self._ids, given)
        self._count += 1
        if given:
            self._given[given] = found["id"], name
        arguments = call["function"]["arguments"]
        if self._traits.text_arguments and not isinstance(arguments, str):
            found["function"] = call["function"] | {"arguments": json.dumps(arguments, ensure_ascii=False)}
        return found

    @staticmethod
    def _written(message: Json, format: ToolFormat) -> Json:
        """Return the message with its calls written into its content, as the model writes them."""
        found = {name: value for name, value in message.items() if name != "tool_calls"}
        functions = [call["function"] for call in message["tool_calls"]]
        calls = [(one["name"], one["arguments"] if isinstance(one["arguments"], dict) else {}) for one in functions]
        return found | {"content": f"{found.get('content') or ''}{written_calls(format.syntax, calls)}"}


def _with_reasoning(message: Json, traits: TemplateTraits) -> Json:
    """Return the message with its reasoning under the reference library's keys and the template's own."""
    thought = message.get("reasoning_content")
    if not thought:
        return message
    if traits.content_or_reasoning and message.get("tool_calls") and message.get("content"):
        rest = {name: value for name, value in message.items() if name != "reasoning_content"}
        return rest | {"content": f"{thought}\n\n{message['content']}"}
    named = {traits.reasoning_key: thought} if traits.reasoning_key else {}
    return {"thinking": thought, **message, **named}


def _described(tool: Json) -> Json:
    """Return the tool with an empty description wherever it or a parameter has none."""
    function: Json = tool["function"]
    return tool | {"function": {"description": "", **function, "parameters": _described_schema(function["parameters"])}}


def _described_schema(schema: Mapping[str, Any]) -> Json:
    found = dict(schema)
    if isinstance(properties := found.get("properties"), dict):
        found["properties"] = {
            name: {"description": "", **_described_schema(one)} if isinstance(one, dict) else one
            for name, one in properties.items()
        }
    if isinstance(items := found.get("items"), dict):
        found["items"] = _described_schema(items)
    return found
