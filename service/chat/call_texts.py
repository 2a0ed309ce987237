"""Parsers of calls written as JSON or as Python, NAME(KEY=VALUE, ...)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from triptych.service.chat.argument_values import json_value, python_json
from triptych.service.chat.parts import PartSink
from triptych.service.chat.reader import Reader, Steps
from triptych.service.chat.tools import Tool

# -- Tool calls written as JSON: {"name": ..., "arguments": {...}}, alone or in an array.

Known = Callable[[str], bool] | None  # whether a call may have this name; None: any, as marks are around it

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args")
_OTHERS = ("type", "id", "call_id", "tool_call_id", "index", "description")  # other keys that a call may have


def json_calls(reader: Reader, sink: PartSink, known: Known) -> Steps[bool]:
    """Parse a call, or an array of calls, whose bracket is next; False if it is something else.

    `reader` is recording. The record is dropped with the first call; without a call, the caller can still give it back.
    """
    if (yield from reader.accept("[")) is None:
        return (yield from _JsonCall(reader, sink, known).parse())
    found = 0
    while (following := (yield from reader.skip_spaces())) != "]":
        if following == "{" and (yield from _JsonCall(reader, sink, known).parse()):
            found += 1
        elif found and following == ",":
            reader.take(1)
        else:
            return bool(found)
    if found:
        reader.take(1)
    return bool(found)


class _JsonCall:
    """A parser of one call, which begins once its name and the start of its arguments have come, in either order."""

    def __init__(self, reader: Reader, sink: PartSink, known: Known) -> None:
        self._reader = reader
        self._sink = sink
        self._known = known
        self._name: str | None = None
        self._arguments: str | None = None  # those that came before the name
        self._begun = False

    def parse(self) -> Steps[bool]:
        """Take the object, whose bracket is next; False if it is not a call."""
        reader = self._reader
        if (yield from reader.accept("{")) is None:
            return False
        depth = 1  # 2: within OpenAI's {"function": {...}}
        while depth:
            following = yield from reader.skip_spaces()
            if following == "":
                return self._begun
            if following in ",}":
                reader.take(1)
                depth -= following == "}"
                continue
            key = (yield from reader.string()) if following == '"' else None
            yield from reader.skip_spaces()
            if key is None or (yield from reader.accept(":")) is None:
                return self._begun
            following = yield from reader.skip_spaces()
            if key == "function" and following == "{":
                reader.take(1)
                depth += 1
            elif not (yield from self._value(key, following)):
                return self._begun
        if self._name is None:
            return self._begun
        if not self._begun:
            self._begin()
            self._sink.arguments(self._arguments or "{}")
        return True

    def _value(self, key: str, following: str) -> Steps[bool]:
        """Take the value of a key, which begins with `following`; False if the object cannot be a call."""
        if key in _NAMES and self._name is None:
            self._name = (yield from self._reader.string()) if following == '"' else None
            return bool(self._name) and (self._known is None or self._known(self._name or ""))
        if key in _ARGUMENTS and self._arguments is None:
            return (yield from self._take_arguments(following))
        if key not in _OTHERS and self._known is not None and not self._begun:
            return False
        if following in ("{", "["):
            return (yield from self._reader.bracketed(_nowhere))
        if following == '"':
            return (yield from self._reader.string()) is not None
        return bool((yield from self._reader.scalar()))

    def _take_arguments(self, following: str) -> Steps[bool]:
        reader = self._reader
        if following == "{":
            self._arguments = ""
            if self._name is not None:
                self._begin()
                return (yield from reader.bracketed(self._sink.arguments))
            pieces: list[str] = []
            complete = yield from reader.bracketed(pieces.append)
            self._arguments = "".join(pieces)
            return complete
        if following == '"':
            self._arguments = _object_in((yield from reader.string()))
            return self._arguments is not None
        self._arguments = "{}"
        return (yield from reader.scalar()) == "null"

    def _begin(self) -> None:
        assert self._name is not None
        self._begun = True
        self._reader.drop_record()
        self._sink.call(self._name)


def _object_in(text: str | None) -> str | None:
    """Return the text if it is a JSON object, else None."""
    try:
        return text if text and isinstance(json_value(text), dict) else None
    except (ValueError, RecursionError):
        return None


def _nowhere(text: str) -> None:
    """Drop the text."""


# -- Calls written as Python: NAME(KEY=VALUE, ...).

_NAME = re.compile(r"[A-Za-z0-9_.:\-]*")
_KEY = re.compile(r"\w*")
_OUTSIDE = re.compile(r"""["'()\[\]{},]""")
_QUOTED = {quote: re.compile(rf"[{quote}\\]") for quote in ('"', "'")}


def pythonic(reader: Reader, sink: PartSink, tools: Mapping[str, Tool]) -> Steps[None]:
    """Parse a reply that is only a list of calls, as Llama 4 writes it: [f(a=1), g()]."""
    reader.record()
    yield from reader.skip_spaces()
    if (yield from reader.accept("[")) is not None:
        calls = 0
        while True:
            yield from reader.skip_spaces()
            name = yield from reader.run_of(_NAME)
            if name not in tools or not (yield from python_call(reader, sink, name)):
                break
            calls += 1
            reader.record()
            yield from reader.skip_spaces()
            if (yield from reader.accept(",", "]")) != ",":
                break
        if calls:
            reader.drop_record()
    sink.content(reader.recorded())
    yield from reader.rest(sink.content)


def python_call(reader: Reader, sink: PartSink, name: str) -> Steps[bool]:
    """Parse the arguments of a call whose name was taken, from bracket to bracket; False if this is not a call."""
    yield from reader.skip_spaces()
    if (yield from reader.accept("(")) is None:
        return False
    following = yield from reader.skip_spaces()
    if following == "{":  # all arguments in one object: a grammar allows this if it cannot constrain them one by one
        reader.drop_record()
        sink.call(name)
        yield from reader.bracketed(sink.arguments)
        yield from reader.accept(")")
        return True
    found: dict[str, str] = {}
    while following != ")":
        key = yield from reader.run_of(_KEY)
        yield from reader.skip_spaces()
        if not key or (yield from reader.accept("=")) is None:
            return False
        text = yield from _value(reader)
        if text is None:
            return False
        found[key] = text
        if (yield from reader.accept(",")) is not None:
            following = yield from reader.skip_spaces()
        else:
            following = ")"
    yield from reader.accept(")")
    reader.drop_record()
    sink.call(name)
    sink.arguments("{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in found.items()) + "}")
    return True


def _value(reader: Reader) -> Steps[str | None]:
    """Take a value up to the comma or bracket that ends it, and return its JSON; None if it is not a value."""
    at, depth, quote = 0, 0, ""
    while True:
        pattern = _QUOTED[quote] if quote else _OUTSIDE
        found = pattern.search(reader.text, at)
        if found is None or (found[0] == "\\" and found.end() == len(reader.text)):
            if reader.ended:
                reader.take(len(reader.text))  # what follows is part of the value, and searched only once
                return None
            at = len(reader.text) if found is None else found.start()
            yield
            continue
        mark, at = found[0], found.end()
        if mark == "\\":
            at += 1
        elif quote:
            quote = ""
        elif mark in _QUOTED:
            quote = mark
        elif mark in "([{":
            depth += 1
        elif depth == 0:
            return _json(reader.take(found.start()))
        elif mark != ",":
            depth -= 1


def _json(text: str) -> str | None:
    """Return the JSON of a value that is a Python literal or JSON; a string may hold line breaks."""
    text = text.strip()
    try:
        json_value(text)
    except (ValueError, RecursionError):
        return python_json(text)
    return text
