"""Parses calls that are written as Python: NAME(KEY=VALUE, ...)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from service.chat.argument_values import python_json
from service.chat.json_calls import json_value
from service.chat.parts import PartSink
from service.chat.reader import Reader, Steps
from service.chat.tools import Tool

_NAME = re.compile(r"[A-Za-z0-9_.:\-]*")
_KEY = re.compile(r"\w*")
_OUTSIDE = re.compile(r"""["'()\[\]{},]""")
_QUOTED = {quote: re.compile(rf"[{quote}\\]") for quote in ('"', "'")}


def pythonic(reader: Reader, sink: PartSink, tools: Mapping[str, Tool]) -> Steps[None]:
    """Parse a reply that is nothing but a list of calls, as Llama 4 writes it: [f(a=1), g()]."""
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
            reader.forget()
    sink.content(reader.recorded())
    yield from reader.rest(sink.content)


def python_call(reader: Reader, sink: PartSink, name: str) -> Steps[bool]:
    """Parse the arguments of a call whose name was taken, from bracket to bracket; False if there are none."""
    yield from reader.skip_spaces()
    if (yield from reader.accept("(")) is None:
        return False
    following = yield from reader.skip_spaces()
    if following == "{":  # all arguments in one object, which a grammar writes where it cannot write them apart
        reader.forget()
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
    reader.forget()
    sink.call(name)
    sink.arguments("{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in found.items()) + "}")
    return True


def _value(reader: Reader) -> Steps[str | None]:
    """Take a value up to the comma or bracket that ends it, and return its JSON; None if it is no value."""
    at, depth, quote = 0, 0, ""
    while True:
        pattern = _QUOTED[quote] if quote else _OUTSIDE
        found = pattern.search(reader.text, at)
        if found is None or (found[0] == "\\" and found.end() == len(reader.text)):
            if reader.ended:
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
        return python_json(text.replace("\n", "\\n") if text[:1] in ('"', "'") else text)
    return text
