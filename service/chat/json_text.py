"""Rewrites JSON of a model or a client so that every library reads it, with the same result.

Models write, and Python's `json` reads, three things that other libraries refuse: control characters in strings, half
of a surrogate pair (`\\ud800`), and NaN and infinities. They become escapes, U+FFFD, and null.
"""

from __future__ import annotations

import json
import re
from typing import Any

from triptych.service.core.json_bounds import VALUE_LEVELS, deep_place

_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")
_OUTSIDE, _INSIDE = re.compile('"|NaN|-?Infinity'), re.compile(r'["\\\x00-\x1f]')
_HEX = re.compile(r"\\u([0-9a-fA-F]{4})")
_HEX_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_LOW_BEGUN = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?")
_REPLACEMENT = r"\ufffd"
_ESCAPE, _PAIR = 6, 12  # characters of `\ud83d`, and of a pair of them


class JsonText:
    """A rewriter of a growing text, whose joined output does not depend on how the text was cut."""

    def __init__(self) -> None:
        self._quoted = False
        self._held = ""  # an incomplete escape, the possible first half of a pair, or a possible start of `_NO_NUMBERS`

    @classmethod
    def whole(cls, text: str) -> str:
        """Return a complete text, rewritten."""
        one = cls()
        return one.push(text) + one.end()

    def push(self, text: str) -> str:
        """Add text, and return the output that is certain so far."""
        text, self._held = self._held + text, ""
        shown: list[str] = []
        at = 0
        while (found := (_INSIDE if self._quoted else _OUTSIDE).search(text, at)) is not None:
            begin, mark = found.start(), found[0]
            shown.append(text[at:begin])
            if mark != "\\":
                self._quoted ^= mark == '"'
                shown.append(mark if mark == '"' else json.dumps(mark)[1:-1] if self._quoted else "null")
                at = found.end()
                continue
            escape, size = _escape(text[begin : begin + _PAIR])
            if not size:
                self._held = text[begin:]
                return "".join(shown)
            shown.append(escape)
            at = begin + size
        end = len(text) if self._quoted else _begun(text, at)
        self._held = text[end:]
        return "".join([*shown, text[at:end]])

    def end(self) -> str:
        """Return the output that was held back; no text follows."""
        held, self._held = self._held, ""
        return _REPLACEMENT + held[_ESCAPE:] if held.startswith("\\") and len(held) >= _ESCAPE else held


def _begun(text: str, start: int) -> int:
    """Return where a possible start of one of `_NO_NUMBERS` ends the text; the text's length if there is none."""
    for at in range(max(start, len(text) - len(max(_NO_NUMBERS, key=len)) + 1), len(text)):
        if any(name.startswith(text[at:]) for name in _NO_NUMBERS):
            return at
    return len(text)


def _escape(text: str) -> tuple[str, int]:
    """Return the rewritten escape at the start of a text, and its length in the text; 0: more text is needed."""
    if _HEX_BEGUN.fullmatch(text):
        return "", 0
    found = _HEX.match(text)
    unit = 0 if found is None else int(found[1], 16)
    if not 0xD800 <= unit < 0xE000:
        return (text[:2], 2) if found is None else (found[0], _ESCAPE)
    if unit < 0xDC00:
        following = text[_ESCAPE:]
        if _LOW_BEGUN.fullmatch(following):
            return "", 0
        second = _HEX.match(following)
        if second is not None and 0xDC00 <= int(second[1], 16) < 0xE000:
            return text[:_PAIR], _PAIR
    return _REPLACEMENT, _ESCAPE


def read_json(text: str) -> Any:
    """Return the value of a rewritten JSON text; raises `ValueError`, also for more than `VALUE_LEVELS` levels."""
    whole = JsonText.whole(text)
    may_be_deep = whole.count("{") + whole.count("[") > VALUE_LEVELS
    if may_be_deep and deep_place(whole.encode(errors="replace"), VALUE_LEVELS) is not None:
        raise ValueError("too deep")
    return json.loads(whole)
