"""A reader of growing text, for parsers that are written as if the text were complete.

A parser is a generator over a `Reader`. It yields when it needs more text, and continues when there is more or the text
has ended. It decides only on text that it has seen, so its result does not depend on how the text was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
Emit: TypeAlias = Callable[[str], None]

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_SCALAR = re.compile(r"[^\s,:{}\[\]\"]*")


class Reader:
    """The text that has arrived and was not taken yet."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self._record: list[str] | None = None

    @property
    def held(self) -> int:
        """The number of characters that were not taken, or may be given back."""
        return len(self.text) + sum(map(len, self._record or ()))

    def record(self, before: str = "") -> None:
        """Start a record of `before` and all text taken from now on."""
        self._record = [before]

    def recorded(self) -> str:
        """Return the record and end it."""
        found, self._record = "".join(self._record or ()), None
        return found

    def give_back(self) -> None:
        """Put the record back in front of the text, and end it."""
        self.text = self.recorded() + self.text

    def drop_record(self) -> None:
        """Drop the record."""
        self._record = None

    def take(self, size: int) -> str:
        taken, self.text = self.text[:size], self.text[size:]
        if self._record is not None:
            self._record.append(taken)
        return taken

    def next(self) -> Steps[str]:
        """Return the next character without taking it; empty at the end."""
        while not self.text and not self.ended:
            yield
        return self.text[:1]

    def skip_spaces(self) -> Steps[str]:
        """Take white space, and return the next character without taking it; empty at the end."""
        while True:
            stripped = self.text.lstrip()
            self.take(len(self.text) - len(stripped))
            if stripped or self.ended:
                return stripped[:1]
            yield

    def accept(self, *texts: str) -> Steps[str | None]:
        """Take and return the one of `texts` that follows, else None. No text may be the beginning of another."""
        found = yield from self.coming(*texts)
        return None if found is None else self.take(len(found))

    def coming(self, *texts: str) -> Steps[str | None]:
        """Return the one of `texts` that follows, else None. No text may be the beginning of another."""
        while True:
            for text in texts:
                if self.text.startswith(text):
                    return text
            if self.ended or not any(text.startswith(self.text) for text in texts):
                return None
            yield

    def until(self, *markers: str, emit: Emit) -> Steps[str | None]:
        """Emit the text before the first of `markers`, then take and return the marker; None at the end of the text."""
        while True:
            found = [(at, marker) for marker in markers if (at := self.text.find(marker)) >= 0]
            if found:
                at, marker = min(found)
                emit(self.take(at))
                return self.take(len(marker))
            held = 0 if self.ended else max(_overlap(self.text, marker) for marker in markers)
            if held < len(self.text):
                emit(self.take(len(self.text) - held))
            if self.ended:
                return None
            yield

    def rest(self, emit: Emit) -> Steps[None]:
        """Emit all text up to the end."""
        while True:
            emit(self.take(len(self.text)))
            if self.ended:
                return
            yield

    def bracketed(self, emit: Emit) -> Steps[bool]:
        """Emit the text of a JSON object or array, whose bracket is next; False if it is cut off."""
        depth, quoted = 0, False
        while True:
            at = 0
            while (found := (_INSIDE if quoted else _OUTSIDE).search(self.text, at)) is not None:
                at, mark = found.end(), found[0]
                if mark == "\\":
                    if at == len(self.text):
                        at -= 1  # the escaped character has not arrived
                        break
                    at += 1
                elif mark == '"':
                    quoted = not quoted
                elif mark in "{[":
                    depth += 1
                else:
                    depth -= 1
                    if depth == 0:
                        emit(self.take(at))
                        return True
            else:
                at = len(self.text)
            if self.ended:
                emit(self.take(len(self.text)))
                return False
            emit(self.take(at))
            yield

    def string(self) -> Steps[str | None]:
        """Take a JSON string, whose quote is next, and return its value; None if it is not valid."""
        at = 1
        while (found := _INSIDE.search(self.text, at)) is None or found[0] == "\\":
            if found is not None and found.end() < len(self.text):
                at = found.end() + 1
                continue
            at = len(self.text) if found is None else found.start()
            if self.ended:
                return None
            yield
        try:
            value = str(json.loads(self.take(found.end()), strict=False))
            value.encode()  # raises for half of a surrogate pair, which no reply can have
        except ValueError:
            return None
        return value

    def scalar(self) -> Steps[str]:
        """Take a number or a literal and return it; empty if something else is next."""
        return (yield from self.run_of(_SCALAR))

    def run_of(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Take and return what the pattern matches next; the pattern must also match any piece of a match."""
        at = 0
        while True:
            found = pattern.match(self.text, at)
            at = at if found is None else found.end()
            if at < len(self.text) or self.ended:
                return self.take(at)
            yield


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
