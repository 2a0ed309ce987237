"""Bounds how deep the objects and lists of JSON may be nested, and says where they are too deep."""

from __future__ import annotations

import json
import re
from typing import Final

from service.core.errors import ApiError, invalid

BODY_LEVELS: Final = 200  # of a body; Pydantic's parser reads no more
VALUE_LEVELS: Final = 190  # of a value within a body, such as a schema: a native body has some levels around it

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]', re.DOTALL)


def deep_place(raw: bytes, most: int) -> list[int | str] | None:
    """Return the place of a JSON text, as names and indices, at which there are more than `most` levels."""
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
