"""What this process runs slower than it could, because something of a GPU did not work: noted where it happens, shown
by the banner, /info and the log, and refused at start where the operator wants that. Stdlib only."""

from __future__ import annotations

import logging

_found: dict[str, str] = {}

logger = logging.getLogger(__name__)


def note(what: str, error: BaseException) -> None:
    """`what` goes on in a slower way because of `error`; called while that is handled."""
    _found[what] = summary(error)
    logger.warning("%s: %s", what, _found[what], exc_info=error)


def found() -> tuple[str, ...]:
    """All of them, each with its reason."""
    return tuple(f"{what}: {why}" for what, why in _found.items())


def noted(what: str) -> bool:
    return what in _found


def forget() -> None:
    _found.clear()


def summary(error: BaseException) -> str:
    """The first line of what an error says, or its name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
