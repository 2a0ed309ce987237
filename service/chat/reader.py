"""Reading of a text that is still growing, written as if it were all there.

A parser is a generator over a `Reader`. It yields where it needs more text, and goes on when there is more or the text
has ended. What it takes does not depend on how the text was cut into pieces, because it decides nothing before it has
seen what it needs.
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
    """Holds the text that has come and was not taken yet."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self._record: list[str] | None = None

    def record(self, before: str = "") -> None:
        """Remember what is taken from now on, behind `before`, to be able to give it back as text."""
        self._record = [before]

    def recorded(self) -> str:
        """Return what was taken since `record`, and remember no more."""
        found, self._record = "".join(self._record or ()), None
        return found

    def give_back(self) -> None:
        """Put back what was taken since `record`, and remember no more."""
        self.text = self.recorded() + self.text

    def forget(self) -> None:
        """Remember no more."""
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
        """Take white space; return the next character without taking it."""
        while True:
            stripped = self.text.lstrip()
            self.take(len(self.text) - len(stripped))
            if stripped or self.ended:
                return stripped[:1]
            yield

    def accept(self, *texts: str) -> Steps[str | None]:
        """Take the one of `texts` that follows and return it; None if there is none. None may begin another."""
        found = yield from self.coming(*texts)
        return None if found is None else self.take(len(found))

    def coming(self, *texts: str) -> Steps[str | None]:
        """Return the one of `texts` that follows, without taking it; None if there is none. None may begin another."""
        while True:
            for text in texts:
                if self.text.startswith(text):
                    return text
            if self.ended or not any(text.startswith(self.text) for text in texts):
                return None
            yield

    def until(self, *markers: str, emit: Emit) -> Steps[str | None]:
        """Emit the text before the first of `markers`, take that and return it; None at the end of the text."""
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
        """Emit a JSON object or array, whose bracket is next, as it is written; False if the text ends before it."""
        depth, quoted = 0, False
        while True:
            at = 0
            while (found := (_INSIDE if quoted else _OUTSIDE).search(self.text, at)) is not None:
                at, mark = found.end(), found[0]
                if mark == "\\":
                    if at == len(self.text):
                        at -= 1  # the escaped character is missing
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
        """Take a JSON string, whose quote is next, and return its value; None if it is none."""
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
        """Take what a pattern, which may match nothing, matches next, and return it; it must match its own parts."""
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
