"""Bounds the depth and the number of values of JSON, and finds where it is nested too deep."""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

from triptych.service.core.errors import ApiError, invalid

BODY_LEVELS: Final = 200  # of a body, the limit of Pydantic's parser
VALUE_LEVELS: Final = 190  # of a value within a body, such as a schema; the rest is for the levels around it

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[{}\[\],:]', re.DOTALL)


def deep_place(raw: bytes, most: int) -> list[int | str] | None:
    """Return the first location with more than `most` levels of a JSON text, as names and indices; None if none has."""
    place: list[int | str] = []
    text = b'""'
    for found in _TOKEN.finditer(raw):
        token = found[0]
        if token in (b"{", b"["):
            if len(place) == most:
                return place
            place.append("" if token == b"{" else 0)
        elif token in (b"}", b"]") and place:
            place.pop()
        elif token == b"," and place and isinstance(last := place[-1], int):
            place[-1] = last + 1
        elif token == b":" and place:
            place[-1] = _name(text)
        else:
            text = token
    return None


def _name(text: bytes) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return text.decode(errors="replace")


def check_levels(value: object, param: str) -> None:
    """Raise a 400 that names `param` for a value of more than `VALUE_LEVELS` levels."""
    levels, within = 0, [value]
    while within := [one for one in within if isinstance(one, dict | list)]:
        levels += 1
        if levels > VALUE_LEVELS:
            raise too_deep(param)
        within = [inner for one in within for inner in (one.values() if isinstance(one, dict) else one)]


def too_deep(param: str, most: int = VALUE_LEVELS, code: str = "invalid_value") -> ApiError:
    """Return the 400 for a value that is nested too deep."""
    return invalid(f"{param or 'the body'} has more than {most} levels of objects and lists", param or None, code)


# -- The number of values of a JSON text, counted without building them. It determines the cost of parsing: parsers make
# an object of each name, text, list and object, in one call that blocks all other threads. A body of 2 MB may have
# 600,000 values, or a single text. The count is exact for valid JSON; the parser refuses invalid JSON.

_PART = 65_536  # bytes counted in one step; other threads run between steps


class JsonSize(NamedTuple):
    """The number of values of a JSON text, or of its beginning if that has too many."""

    values: int  # names, texts, lists and objects
    marks: int  # commas, which bound the number of numbers, and escapes in texts
    blanks: int  # bytes of white space between values


def json_size(raw: bytes, most_values: int, most_marks: int) -> JsonSize:
    """Count the values of `raw`, and stop after a part in which a maximum is exceeded."""
    opened = quotes = marks = blanks = 0
    is_inside = is_escaped = False  # whether a part begins inside a text, or after a backslash
    for at in range(0, len(raw), _PART):
        part = raw[at : at + _PART]
        if is_escaped:
            part, is_escaped = b"_" + part[1:], False
        if b"\\" in part:
            marks += part.count(rb"\\")
            part = part.replace(rb"\\", b"__")
            marks += part.count(b"\\")
            is_escaped = part.endswith(b"\\")
            part = part.replace(rb"\"", b"__")
        pieces = part.split(b'"')
        outside = b"".join(pieces[is_inside::2])
        is_inside ^= len(pieces) % 2 == 0
        quotes += len(pieces) - 1
        opened += outside.count(b"{") + outside.count(b"[")
        marks += outside.count(b",")
        blanks += len(outside) - len(outside.translate(None, b" \t\r\n"))
        if opened + quotes // 2 > most_values or marks > most_marks:
            break
    return JsonSize(opened + quotes // 2, marks, blanks)
