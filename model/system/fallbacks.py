"""Records features that fell back to a slower path because something on the GPU failed. Stdlib only.

The code that falls back notes it here. The banner, /info and the log show the notes; with `slow_fallbacks: refuse` the
engine does not start with any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

_reasons: dict[str, str] = {}  # by feature

logger = logging.getLogger(__name__)


def note(what: str, error: BaseException) -> None:
    """Record and log the fallback `what`, a short sentence, with its cause `error`."""
    _reasons[what] = summary(error)
    logger.warning("%s: %s", what, _reasons[what], exc_info=error)


def note_once(what: str, error: BaseException) -> None:
    """Record and log the fallback `what`, unless it was recorded before: its first cause stays."""
    if not noted(what):
        note(what, error)


def attempt(what: str, launch: Callable[..., Any], *arguments: object) -> Any:
    """Launch a kernel and return its result; `NotImplemented` if that fails, which is recorded as the fallback `what`.

    Errors for want of memory are raised.
    """
    try:
        return launch(*arguments)
    except Exception as error:  # a compiler's own, too
        if type(error).__name__ == "OutOfMemoryError":  # torch's
            raise
        note(what, error)
        return NotImplemented


def found() -> tuple[str, ...]:
    """Return all recorded fallbacks, each with its reason."""
    return tuple(f"{what}: {why}" for what, why in _reasons.items())


def noted(what: str) -> bool:
    """Return whether the fallback `what` was recorded."""
    return what in _reasons


def forget() -> None:
    """Remove all records, for tests."""
    _reasons.clear()


def summary(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
