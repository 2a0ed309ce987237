"""Parsers of tool calls, one for each family of models.

A parser gives content and calls to a `PartSink`. Text that resembles a call but is not one is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from triptych.service.chat.argument_values import Values, json_value
from triptych.service.chat.call_texts import json_calls
from triptych.service.chat.chat_template import ArgumentSyntax
from triptych.service.chat.marked_calls import CallEnd, marked_arguments
from triptych.service.chat.parts import PartSink
from triptych.service.chat.reader import Reader, Steps
from triptych.service.chat.tools import Tool

CallParser: TypeAlias = Callable[[Reader, PartSink, Mapping[str, Tool]], Steps[None]]

DEEPSEEK_MARKS = tuple(  # around all calls, around each, and between its name and arguments
    f"<\uff5ctool▁{name}\uff5c>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
_FENCES = ("```json\n", "```tool_code\n", "```tool_call\n", "```\n")
PARAMETERS = ArgumentSyntax("<parameter=", ">\n", "\n</parameter>\n")  # of Qwen3-Coder
_FUNCTION_END = CallEnd("</function>", ("</tool_call>", "<tool_call>", "<function="))
_NAME_END = re.compile(r"[\[{\s]")
_PLAIN_KEY = re.compile(r"[^\s:,{}\[\]]+")
_PLAIN_VALUE = re.compile(r"[^,}\]]*")
_HEADER = re.compile(r"<\|channel\|>|<\|start\|>| to=")  # beginnings of gpt-oss messages
_RECIPIENT = re.compile(r"to=(functions\.)?([^\s<]+)")
_PYTHON_VALUES = {"None": None, "True": True, "False": False}
_TO = ">>>"
_SPACES, _COMMA = re.compile(r"\s*"), re.compile(r"\s*,?\s*")


def hermes(reader: Reader, sink: PartSink, tools: Mapping[str, Tool]) -> Steps[None]:
    """Parse `<tool_call>` with JSON in it, as Hermes and Qwen write it, or with Qwen3-Coder's marks in it."""
    yield from _tagged(reader, sink, tools, "<tool_call>")


def qwen3_coder(reader: Reader, sink: PartSink, tools: Mapping[str, Tool]) -> Steps[None]:
    """Parse `<function=NAME>` with `<parameter=NAME>` in it, with or without a `<tool_call>` around it."""
    yield from _tagged(reader, sink, tools, "<tool_call>", "<function=")


def _tagged(reader: Reader, sink: PartSink, tools: Mapping[str, Tool], *markers: str) -> Steps[None]:
    while (marker := (yield from reader.until(*markers, emit=sink.content))) is not None:
        reader.record(marker)
        if marker == "<tool_call>":
            following = yield from reader.skip_spaces()
            if following in ("{", "["):
                if not (yield from json_calls(reader, sink, None)):
                    sink.content(reader.recorded())
                    continue
                while (yield from reader.skip_spaces()) == "{":
                    yield from json_calls(reader, sink, None)
                yield from reader.accept("</tool_call>")
                continue
            if (yield from reader.accept("<function=")) is None:
                sink.content(reader.recorded())
                continue
        if (yield from _xml_call(reader, sink, tools)):
            yield from reader.skip_spaces()
            yield from reader.accept("</tool_call>")


def _xml_call(reader: Reader, sink: PartSink, tools: Mapping[str, Tool]) -> Steps[bool]:
    """Parse `NAME>`, parameters and `</function>`; False if there is no name.

    Each value is text, or JSON if the schema is not of a string. All arguments may come as one JSON object.
    """
    pieces: list[str] = []
    closed = yield from reader.until(">", emit=pieces.append)
    name = "".join(pieces).strip().strip("\"'")
    if closed is None or not name:
        sink.content(reader.recorded())
        return False
    reader.drop_record()
    sink.call(name)
    if (yield from reader.skip_spaces()) == "{":
        yield from reader.bracketed(sink.arguments)
        yield from reader.skip_spaces()
    else:
        yield from marked_arguments(reader, sink, PARAMETERS, Values(tools.get(name)), _FUNCTION_END)
    yield from reader.accept("</function>")
    return True


def mistral(reader: Reader, sink: PartSink, tools: Mapping[str, Tool]) -> Steps[None]:
    """Parse `[TOOL_CALLS]` with an array of calls, or with names and `[ARGS]{...}`, as later versions write it."""
    marker = "[TOOL_CALLS]"
    while (yield from reader.until(marker, emit=sink.content)) is not None:
        reader.record(marker)
        if (yield from reader.skip_spaces()) in ("[", "{"):
            yield from json_calls(reader, sink, None)
        else:
            yield from _named_call(reader, sink)
        sink.content(reader.recorded())


def _named_call(reader: Reader, sink: PartSink) -> Steps[bool]:
    """Parse NAME, `[CALL_ID]` with an id, `[ARGS]`, and the object; False if this is not a call."""
    at = 0
    while (found := _NAME_END.search(reader.text, at)) is None:
        if reader.ended:
            return False
        at = len(reader.text)
        yield
    name = reader.take(found.start())
    yield from reader.skip_spaces()
    if (yield from reader.accept("[CALL_ID]", "[ARGS]")) == "[CALL_ID]":
        yield from reader.until("[ARGS]", emit=lambda _: None)
    if (yield from reader.skip_spaces()) != "{" or not name:
        return False
    reader.drop_record()
    sink.call(name)
    yield from reader.bracketed(sink.arguments)
    return True


def bare_json(reader: Reader, sink: PartSink, tools: Mapping[str, Tool]) -> Steps[None]:
    """Parse a reply that is only JSON, or has JSON after `<|python_tag|>`, as Llama 3 writes calls.

    Several calls follow each other, or are in an array. A call of an unknown tool is content.
    """
    reader.record()
    while True:
        following = yield from reader.skip_spaces()
        if (yield from reader.accept("<|python_tag|>")) is not None:
            following = yield from reader.skip_spaces()
        if not (following in ("{", "[") and (yield from json_calls(reader, sink, tools.__contains__))):
            break
        while (yield from reader.skip_spaces()) in (";", ","):
            reader.take(1)
        reader.record()
    sink.content(reader.recorded())
    if (yield from reader.until("<|python_tag|>", emit=sink.content)) is not None:
        reader.record("<|python_tag|>")
        yield from reader.skip_spaces()
        yield from json_calls(reader, sink, tools.__contains__)
        sink.content(reader.recorded())
        yield from reader.rest(sink.content)


def granite(reader: Reader, sink: PartSink, tools: Mapping[str, Tool]) -> Steps[None]:
    """Parse JSON after `<|tool_call|>`, a token of Granite 3, or after `<tool_call>`, as Granite 3.1 spells it."""
    while (marker := (yield from reader.until("<|tool_call|>", "<tool_call>", emit=sink.content))) is not None:
        reader.record(marker)
        if (yield from reader.skip_spaces()) in ("[", "{"):
            yield from json_calls(reader, sink, None)
        sink.content(reader.recorded())


def generic(reader: Reader, sink: PartSink, tools: Mapping[str, Tool]) -> Steps[None]:
    """Parse calls as JSON, at the beginning of the reply or in a fenced block anywhere; the name must be a tool's."""
    reader.record()
    following = yield from reader.skip_spaces()
    if following in ("{", "["):
        yield from json_calls(reader, sink, tools.__contains__)
    sink.content(reader.recorded())
    while (fence := (yield from reader.until(*_FENCES, emit=sink.content))) is not None:
        reader.record(fence)
        found = False
        while (yield from reader.skip_spaces()) in ("{", "["):
            if not (yield from json_calls(reader, sink, tools.__contains__)):
                break
            found = True
        if found:
            yield from reader.accept("```")
        sink.content(reader.recorded())


def deepseek(reader: Reader, sink: PartSink, tools: Mapping[str, Tool]) -> Steps[None]:
    """Parse calls between DeepSeek's marks: V3 writes `function` before the separator, V3.1 the name."""
    opening, closing, begin, end, separator = DEEPSEEK_MARKS
    while (marker := (yield from reader.until(begin, opening, closing, emit=sink.content))) is not None:
        if marker != begin:
            continue
        reader.record(marker)
        head: list[str] = []
        if (yield from reader.until(separator, emit=head.append)) is None:
            sink.content(reader.recorded())
            return
        name = "".join(head).strip()
        if name == "function":
            line: list[str] = []
            yield from reader.until("\n", emit=line.append)
            name = "".join(line).strip()
            yield from reader.skip_spaces()
            yield from reader.accept("```json")
        if (yield from reader.skip_spaces()) != "{" or not name:
            sink.content(reader.recorded())
            continue
        reader.drop_record()
        sink.call(name)
        yield from reader.bracketed(sink.arguments)
        yield from reader.until(end, emit=lambda _: None)


def gemma(reader: Reader, sink: PartSink, tools: Mapping[str, Tool]) -> Steps[None]:
    """Parse `<|tool_call>call:NAME{...}<tool_call|>` of Gemma 4, or `<start_function_call>` of FunctionGemma.

    Keys have no quotes. Strings are between `<|"|>` or `<escape>`, without escapes. JSON is accepted too.
    """
    ends = {"<|tool_call>": "<tool_call|>", "<start_function_call>": "<end_function_call>"}
    while (marker := (yield from reader.until(*ends, emit=sink.content))) is not None:
        reader.record(marker)
        body: list[str] = []
        yield from reader.until(ends[marker], emit=body.append)
        name, bracket, rest = "".join(body).strip().removeprefix("call:").partition("{")
        name = name.strip()
        value = _gemma_object(bracket + rest, Values(tools.get(name)))
        if value is None or not name:
            sink.content(reader.recorded())
            continue
        reader.drop_record()
        sink.call(name)
        sink.arguments(value)


def _gemma_object(text: str, values: Values) -> str | None:
    """Return the JSON of an object in Gemma's form; None if the text is not one."""
    try:
        if isinstance(json_value(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    try:
        if not text.startswith("{"):
            return None
        found, end = _gemma_items(text, 1, values)
        shown = json.dumps(found, ensure_ascii=False, allow_nan=False)
        shown.encode()  # raises for half of a surrogate pair
    except (ValueError, RecursionError):
        return None
    return None if text[end:].strip() else shown


def _gemma_value(text: str, at: int, typed: Callable[[str], Any]) -> tuple[Any, int]:
    """Return the value at a position of a text, and the position after it; raises `ValueError`.

    `typed` returns the value of a text without quotes.
    """
    at = _match_end(_SPACES, text, at)
    for quote in ('<|"|>', "<escape>"):
        if text.startswith(quote, at):
            begin = at + len(quote)
            end = text.index(quote, begin)
            return text[begin:end], end + len(quote)
    if text.startswith("{", at):
        return _gemma_items(text, at + 1)
    if text.startswith("[", at):
        values: list[Any] = []
        at = _match_end(_SPACES, text, at + 1)
        while not text.startswith("]", at):
            value, at = _gemma_value(text, at, _plain)
            values.append(value)
            at = _match_end(_COMMA, text, at)
        return values, at + 1
    if text.startswith('"', at):
        return json.JSONDecoder(strict=False).raw_decode(text, at)
    end = _match_end(_PLAIN_VALUE, text, at)
    if not (plain := text[at:end].strip()):
        raise ValueError
    return typed(plain), end


def _plain(text: str) -> Any:
    """Return the value of a text without quotes: JSON, Python's names, or the text."""
    if text in _PYTHON_VALUES:
        return _PYTHON_VALUES[text]
    try:
        return json_value(text)
    except ValueError:
        return text


def _gemma_items(text: str, at: int, values: Values | None = None) -> tuple[dict[str, Any], int]:
    """Return the object whose opening bracket ends at `at`, and the position after it; raises `ValueError`.

    `values` knows the types of its values.
    """
    items: dict[str, Any] = {}
    at = _match_end(_SPACES, text, at)
    while not text.startswith("}", at):
        if text.startswith(('<|"|>', "<escape>", '"'), at):
            key, at = _gemma_value(text, at, _plain)
        else:
            found = _PLAIN_KEY.match(text, at)
            if found is None:
                raise ValueError
            key, at = found[0], found.end()
        at = _match_end(_SPACES, text, at)
        if not text.startswith(":", at):
            raise ValueError
        name = str(key)
        typed = _plain if values is None else partial(_typed, values, name)
        items[name], at = _gemma_value(text, at + 1, typed)
        at = _match_end(_COMMA, text, at)
    return items, at + 1


def _typed(values: Values, name: str, text: str) -> Any:
    return json.loads(values.json(name, text))


def _match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the position after the pattern's match at `at`; `at` if there is no match."""
    found = pattern.match(text, at)
    return at if found is None else found.end()


def harmony(reader: Reader, sink: PartSink, tools: Mapping[str, Tool]) -> Steps[None]:
    """Parse the messages of gpt-oss: reasoning on the channel `analysis`, calls to `functions.NAME`, else content.

    A header that is cut off is dropped.
    """
    ends = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
    end: str | None = None
    said: Callable[[str], None] | None = None  # what the last message was
    while True:
        following = yield from reader.next()
        if following == "":
            return
        if end != "<|start|>" and following not in "< ":  # no header: an answer without channels
            if said == sink.reasoning:
                sink.end_reasoning()
            said = sink.content
            end = yield from reader.until(*ends, emit=sink.content)
            continue
        reader.record()
        head: list[str] = []
        if (yield from reader.until("<|message|>", emit=head.append)) is None:
            if end != "<|start|>" and not _HEADER.match("".join(head)):
                if said == sink.reasoning:
                    sink.end_reasoning()
                sink.content(reader.recorded())
            return
        reader.drop_record()
        _, _, channel = "".join(head).partition("<|channel|>")
        recipient = _RECIPIENT.search("".join(head))
        is_call = recipient is not None and bool(tools) and bool(recipient[1] or recipient[2] in tools)
        emit = sink.reasoning if channel.strip().startswith("analysis") and not is_call else sink.content
        if said == emit and not is_call:
            emit("\n")  # between messages of one kind
        elif said == sink.reasoning:
            sink.end_reasoning()
        if recipient is not None and is_call:
            sink.call(recipient[2])
            yield from reader.skip_spaces()
            emit = sink.arguments
        said = emit
        end = yield from reader.until(*ends, emit=emit)


def functionary(reader: Reader, sink: PartSink, tools: Mapping[str, Tool]) -> Steps[None]:
    """Parse messages of functionary 3.2: `>>>`, then the recipient, which is `all` or a function, then the text.

    The prompt ends with the first `>>>`.
    """
    yield from reader.skip_spaces()
    yield from reader.accept(_TO)
    while True:
        reader.record()
        recipient: list[str] = []
        if (yield from reader.until("\n", emit=recipient.append)) is None:
            sink.content(reader.recorded())
            return
        name = "".join(recipient).strip()
        if name == "all":
            reader.drop_record()
        elif name in tools and (yield from reader.skip_spaces()) == "{":
            reader.drop_record()
            sink.call(name)
            yield from reader.bracketed(sink.arguments)
        else:
            sink.content(reader.recorded())
        if (yield from reader.until(_TO, emit=sink.content)) is None:
            return
