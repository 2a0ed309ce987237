"""The path below which the application answers, where a server has taken it off the addresses that it routes here.

Inside, the application is what it is at the root; only what it says of its own addresses asks for the prefix.
"""

from __future__ import annotations

from typing import Final

from starlette.types import Scope

_PREFIX: Final = "triptych.prefix"
_BARE: Final = "triptych.bare"


def unprefixed(scope: Scope) -> Scope:
    """A request's `scope` without its `root_path`, which would take the same word off the application's own paths."""
    prefix = scope.get("root_path", "").rstrip("/")
    path = scope["path"].removeprefix(prefix)
    return {**scope, "path": path or "/", "root_path": "", _PREFIX: prefix, _BARE: not path}


def prefix_of(scope: Scope) -> str:
    """`/chat`; empty at the root."""
    found: str = scope.get(_PREFIX, "")
    return found


def is_bare(scope: Scope) -> bool:
    """Whether the prefix was asked for without a slash: relative addresses in a page would miss the application."""
    found: bool = scope.get(_BARE, False)
    return found
