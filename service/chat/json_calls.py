"""Tool calls that are written as JSON: {"name": ..., "arguments": {...}}, alone or in an array."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from service.chat.parts import PartSink
from service.chat.reader import Reader, Steps

Known = Callable[[str], bool]  # whether a call of this name is one

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args")
_OTHERS = ("type", "id", "call_id", "tool_call_id", "index", "description")  # keys besides name and arguments


def json_calls(reader: Reader, sink: PartSink, known: Known) -> Steps[bool]:
    """Parse a call, or an array of calls, whose bracket is next; False if it is something else.

    `reader` records; what was recorded is forgotten with the first call, so that the caller can give back what was
    none.
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
    """Parses one call. It becomes one once its name and the beginning of its arguments have come, in either order."""

    def __init__(self, reader: Reader, sink: PartSink, known: Known) -> None:
        self._reader = reader
        self._sink = sink
        self._known = known
        self._name: str | None = None
        self._arguments: str | None = None  # that came before the name
        self._begun = False

    def parse(self) -> Steps[bool]:
        """Take the object, whose bracket is next; False if it is no call."""
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
            return self._name is not None and self._known(self._name)
        if key in _ARGUMENTS and self._arguments is None:
            return (yield from self._take_arguments(following))
        if key not in _OTHERS:
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
        self._reader.forget()
        self._sink.call(self._name)


def json_value(text: str) -> Any:
    """Return the value of a JSON text; raises `ValueError`, also for NaN and infinities, which Python takes."""
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _object_in(text: str | None) -> str | None:
    """Return the JSON object that a string holds; None if it holds none."""
    try:
        return text if text and isinstance(json_value(text), dict) else None
    except (ValueError, RecursionError):
        return None


def _nowhere(text: str) -> None:
    """Drop the text."""
