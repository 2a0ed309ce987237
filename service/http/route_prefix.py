"""The path prefix of an application, which the server in front of it removes from forwarded paths.

The application works as if it were at the root; only its own URLs in replies need the prefix.
"""

from __future__ import annotations

from typing import Final

from starlette.types import Scope

_PREFIX: Final = "triptych.prefix"
_BARE: Final = "triptych.bare"


def unprefixed(scope: Scope) -> Scope:
    """Return the `scope` of a request without `root_path`, which Starlette would remove from the path again."""
    prefix = scope.get("root_path", "").rstrip("/")
    path = scope["path"].removeprefix(prefix)
    return {**scope, "path": path or "/", "root_path": "", _PREFIX: prefix, _BARE: not path}


def prefix_of(scope: Scope) -> str:
    """Return the prefix, such as `/chat`; empty at the root."""
    found: str = scope.get(_PREFIX, "")
    return found


def is_bare(scope: Scope) -> bool:
    """Return whether the path is the prefix without a slash, which would break relative URLs in a page."""
    found: bool = scope.get(_BARE, False)
    return found
