"""A parser of calls by their syntax alone: most families differ only in the texts around names and arguments.

White space between marks is not compared. Marks without a valid call are content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from triptych.service.chat.argument_values import Values
from triptych.service.chat.call_texts import json_calls, python_call
from triptych.service.chat.chat_template import INDEX, KIND, VARYING, ArgumentSyntax, CallSyntax
from triptych.service.chat.parts import PartSink
from triptych.service.chat.reader import Reader, Steps
from triptych.service.chat.tools import Tool

_ENVELOPE = re.compile(r'(\[\s*)?\{\s*"[^{]*:\s*"$')  # the beginning of a JSON object with a name
_CLOSED = re.compile(r"[^}]*\}\s*")  # the end of such an object
_WORD = re.compile(r"[A-Za-z0-9_.:\-]*")
_VARYING = {mark: re.compile(f"{characters}*") for mark, characters in VARYING.items()}
_CHUNK = re.compile(rf"[{''.join(VARYING)}]|[^\s{''.join(VARYING)}]+")
_PREFIX = re.compile(r"[A-Za-z0-9_]+\.$")  # before a name, which some models leave out


class MarkedCalls:
    """A parser of the calls of one syntax."""

    def __init__(self, syntax: CallSyntax, *, is_held: bool = False) -> None:
        """`is_held`: a grammar constrains the calls, so no mark is missing."""
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
        self._prefix = "" if self._is_json or (prefix := _PREFIX.search(head)) is None else prefix[0]
        self._first, self._next = (one.removesuffix(self._prefix) for one in (self._first, self._next))
        self._end = None if is_held else self._call_end()

    def _call_end(self) -> CallEnd | None:
        """Return the mark that ends a call; None if there is none."""
        mark, *more = self._after.split() or ("",)
        texts = more[:1] or [text.split()[0] for text in (self._closing, self._next) if text.strip()]
        return CallEnd(mark, tuple(texts)) if mark else None

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
                yield from json_calls(reader, sink, None if self._syntax.trigger else tools.__contains__)
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
        name = name.removeprefix(self._prefix)
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
        yield from marked_arguments(reader, sink, syntax, Values(tools.get(name)), self._end)
        return True


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The mark that ends a call. One of the marks `following` follows it, unless the reply ends there."""

    mark: str
    following: tuple[str, ...]


def marked_arguments(
    reader: Reader, sink: PartSink, syntax: ArgumentSyntax, values: Values, end: CallEnd | None
) -> Steps[None]:
    """Parse the arguments that follow, each between marks.

    With `end`, a value whose last mark is missing ends where another argument of the tool begins, or the call ends.
    """
    opening, after = syntax.before.strip(), syntax.after.strip()
    between, _, rest = syntax.between.partition(KIND)
    name_end, *more = between.split()
    others = _Others(opening, name_end, set(values.names), max(map(len, values.names), default=0))
    before = "{"
    while True:
        yield from reader.skip_spaces()
        if (yield from reader.accept(opening)) is None:
            break
        key: list[str] = []
        kind: list[str] = []
        yield from reader.until(name_end, emit=key.append)
        has_kind = (yield from _literal(reader, " ".join(more))) and bool(rest)
        if has_kind:
            yield from reader.until(rest.strip(), emit=kind.append)
        elif rest:  # some models leave it out
            yield from reader.accept(rest.strip().removeprefix(name_end))
        sink.arguments(before)
        before = ", "
        name = "".join(key).strip()
        others.names.discard(name)
        text = yield from _value(reader, after, others, end)
        if syntax.between.endswith("\n"):
            text = text.removeprefix("\n")
        if syntax.after.startswith("\n"):
            text = text.removesuffix("\n")
        is_string = "".join(kind) == syntax.text_kind if has_kind else None
        value = values.json(name, text, is_string=is_string, is_held=end is None)
        sink.arguments(f"{json.dumps(name, ensure_ascii=False)}: {value}")
    sink.arguments("{}" if before == "{" else "}")


@dataclass(slots=True)
class _Others:
    """How the arguments begin that were not given yet."""

    opening: str
    name_end: str
    names: set[str]
    longest: int  # characters of a name

    def follow(self, reader: Reader) -> Steps[bool]:
        """Return whether the name of one of them follows, with its end."""
        most = self.longest + len(self.name_end)
        while True:
            at = reader.text.find(self.name_end, 0, most)
            if at >= 0 or len(reader.text) >= most or reader.ended:
                return at >= 0 and reader.text[:at] in self.names
            yield


def _value(reader: Reader, after: str, others: _Others, end: CallEnd | None) -> Steps[str]:
    """Take the text up to `after`, or up to the marks before which it is missing."""
    pieces: list[str] = []
    marks = (after,) if end is None else (after, others.opening, end.mark)
    while (mark := (yield from reader.until(*marks, emit=pieces.append))) is not None and mark != after:
        reader.record(mark)
        if mark == others.opening:
            is_end = yield from others.follow(reader)
        else:
            is_last = (yield from reader.skip_spaces()) == ""
            is_end = is_last or (yield from reader.coming(*(end.following if end else ()))) is not None
        if is_end:
            reader.give_back()
            break
        pieces.append(reader.recorded())
    return "".join(pieces)


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
