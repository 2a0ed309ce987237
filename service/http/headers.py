"""Headers of a request, as ASGI has them: pairs of bytes, names in lower case."""

from __future__ import annotations

from collections.abc import Iterable

Headers = Iterable[tuple[bytes, bytes]]


def header_of(headers: Headers, name: bytes) -> str | None:
    """Return the first header of this name, which is in lower case."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


def all_of(headers: Headers, name: bytes) -> str:
    """Return the values of all headers of this name, which is in lower case, as one list; empty if there is none."""
    return ",".join(value.decode("latin-1") for key, value in headers if key == name)
