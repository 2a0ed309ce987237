"""A parser of calls by their syntax alone: most families differ only in the texts around names and arguments.

White space between marks is not compared. Marks without a valid call are content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from triptych.service.chat.call_texts import json_calls, properties_of, python_call, value_json
from triptych.service.chat.chat_template import INDEX, KIND, VARYING, ArgumentSyntax, CallSyntax
from triptych.service.chat.parts import PartSink
from triptych.service.chat.reader import Reader, Steps
from triptych.service.chat.tools import Tool

_ENVELOPE = re.compile(r'(\[\s*)?\{\s*"[^{]*:\s*"$')  # the beginning of a JSON object with a name
_CLOSED = re.compile(r"[^}]*\}\s*")  # the end of such an object
_WORD = re.compile(r"[A-Za-z0-9_.:\-]*")
_VARYING = {mark: re.compile(f"{characters}*") for mark, characters in VARYING.items()}
_CHUNK = re.compile(rf"[{''.join(VARYING)}]|[^\s{''.join(VARYING)}]+")


class MarkedCalls:
    """A parser of the calls of one syntax."""

    def __init__(self, syntax: CallSyntax) -> None:
        head = (syntax.opening + syntax.before).lstrip()
        found = _ENVELOPE.search(head)
        self._syntax = syntax
        self._is_json = found is not None and '"' in syntax.between and ":" in syntax.between
        self._is_python = syntax.between == "("
        if self._is_json and found is not None:
            self._first = head[: found.start()]
            before = _ENVELOPE.search(syntax.before)
            self._next = syntax.before[: before.start()] if before is not None else ""
            self._after = _CLOSED.sub("", syntax.after, count=1)
            in_array = head.startswith("[", found.start())
            self._closing = syntax.closing.lstrip().removeprefix("]") if in_array else syntax.closing
        else:
            self._first, self._next, self._after, self._closing = head, syntax.before, syntax.after, syntax.closing
        self._first = self._first.removeprefix(syntax.trigger)
        self._separator = syntax.separator.strip()
        self._numbered = INDEX in syntax.between

    def __call__(self, reader: Reader, sink: PartSink, tools: Mapping[str, Tool]) -> Steps[None]:
        """Parse a reply; if the syntax has no trigger, calls must be the whole reply."""
        trigger = self._syntax.trigger
        if not trigger:
            reader.record()
            yield from self._calls(reader, sink, tools, self._first)
            sink.content(reader.recorded())
            yield from reader.rest(sink.content)
            return
        while (yield from reader.until(trigger, emit=sink.content)) is not None:
            reader.record(trigger)
            if not (yield from self._calls(reader, sink, tools, self._first)):
                sink.content(reader.recorded())

    def _calls(self, reader: Reader, sink: PartSink, tools: Mapping[str, Tool], first: str) -> Steps[bool]:
        """Parse the calls after their trigger; False if there is none."""
        if not (yield from _literal(reader, first)) or not (yield from self._call(reader, sink, tools)):
            return False
        while not self._syntax.one:
            reader.record()
            yield from _literal(reader, self._separator)
            if not (yield from _literal(reader, self._next)) or not (yield from self._call(reader, sink, tools)):
                break
        reader.give_back()
        yield from _optional(reader, self._closing)
        return True

    def _call(self, reader: Reader, sink: PartSink, tools: Mapping[str, Tool]) -> Steps[bool]:
        """Parse one call from its name or its JSON object to its end."""
        if self._is_json:
            found = (yield from reader.skip_spaces()) in ("{", "[") and (
                yield from json_calls(reader, sink, _any_name if self._syntax.trigger else tools.__contains__)
            )
        else:
            found = yield from self._named(reader, sink, tools)
        if found:
            yield from _optional(reader, self._after)
        return found

    def _named(self, reader: Reader, sink: PartSink, tools: Mapping[str, Tool]) -> Steps[bool]:
        yield from reader.skip_spaces()
        name = yield from reader.run_of(_WORD)
        between = self._syntax.between
        if self._numbered:  # the name read includes a colon and a number
            name, _, number = name.rpartition(":")
            between = between.partition(INDEX)[2]
            if not number.isdecimal():
                return False
        if not name or (not self._syntax.trigger and name not in tools):
            return False
        if self._is_python:
            return (yield from python_call(reader, sink, name))
        if not (yield from _literal(reader, between)):
            return False
        syntax = self._syntax.arguments
        following = yield from reader.skip_spaces()
        if following == "{":
            reader.drop_record()
            sink.call(name)
            yield from reader.bracketed(sink.arguments)
            return True
        if syntax is None:
            return False
        if self._after.strip() and (yield from reader.coming(syntax.before.strip(), self._after.split()[0])) is None:
            return False
        reader.drop_record()
        sink.call(name)
        yield from _tagged(reader, sink, syntax, properties_of(tools.get(name)))
        return True


def _tagged(reader: Reader, sink: PartSink, syntax: ArgumentSyntax, schemas: Mapping[str, object]) -> Steps[None]:
    """Parse the arguments that follow, each between marks."""
    opening, after = syntax.before.strip(), syntax.after.strip()
    between, _, rest = (part.strip() for part in syntax.between.partition(KIND))
    before = "{"
    while True:
        yield from reader.skip_spaces()
        if (yield from reader.accept(opening)) is None:
            break
        key: list[str] = []
        kind: list[str] = []
        value: list[str] = []
        yield from reader.until(between, emit=key.append)
        if rest:
            yield from reader.until(rest, emit=kind.append)
        yield from reader.until(after, emit=value.append)
        name, text = "".join(key).strip(), "".join(value)
        if syntax.between.endswith("\n"):
            text = text.removeprefix("\n")
        if syntax.after.startswith("\n"):
            text = text.removesuffix("\n")
        is_string = None if not rest else "".join(kind) == syntax.text_kind
        sink.arguments(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
        sink.arguments(value_json(text, schemas.get(name), is_string=is_string))
        before = ", "
    sink.arguments("{}" if before == "{" else "}")


def _literal(reader: Reader, text: str) -> Steps[bool]:
    """Take a text, ignoring differences in white space; False if something else follows."""
    for chunk in _CHUNK.findall(text):
        yield from reader.skip_spaces()
        if chunk in _VARYING:
            if not (yield from reader.run_of(_VARYING[chunk])):
                return False
        elif (yield from reader.accept(chunk)) is None:
            return False
    return True


def _optional(reader: Reader, text: str) -> Steps[None]:
    """Take a text if it follows."""
    reader.record()
    if (yield from _literal(reader, text)):
        reader.drop_record()
    else:
        reader.give_back()


def _any_name(name: str) -> bool:
    """Return whether there is a name: after a family's own mark, every name is accepted as a call's."""
    return bool(name)
