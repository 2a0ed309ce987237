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
