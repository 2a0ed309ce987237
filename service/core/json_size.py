"""Counts the values of a JSON text without building them: the cost of reading it follows from their number.

Parsers make an object of each name, text, list and object, in one call that lets no other thread run. A body of 2 MB
may hold 600,000 of them, or a single text. The count is exact for valid JSON; what is not valid, the parser refuses.
"""

from __future__ import annotations

from typing import NamedTuple

_PART = 65_536  # bytes counted in one step, between which other threads run


class JsonSize(NamedTuple):
    """The number of values of a JSON text, or of its beginning where that has too many."""

    values: int  # names, texts, lists and objects
    marks: int  # commas, as many as numbers or more, and escapes in texts


def json_size(raw: bytes, most_values: int, most_marks: int) -> JsonSize:
    """Count the values of `raw`, and stop after a part in which a maximum is exceeded."""
    opened = quotes = marks = 0
    is_inside = is_escaped = False  # of a text, at the beginning of a part
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
        if opened + quotes // 2 > most_values or marks > most_marks:
            break
    return JsonSize(opened + quotes // 2, marks)
