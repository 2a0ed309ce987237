"""Long work in a thread beside others: it can be given up, at the points where it says so. Stdlib only.

The work calls `give_way` between its parts. Outside of a `BackgroundWork` that does nothing, so the same code can be
the only work of its process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_thread = threading.local()


class GivenUpError(Exception):
    """The work was given up from another thread."""


class BackgroundWork:
    """The work of one thread, which another thread can give up."""

    def __init__(self) -> None:
        self._given_up = False

    def give_up(self) -> None:
        """Raise `GivenUpError` from the work's next `give_way`."""
        self._given_up = True

    def check(self) -> None:
        """Raise `GivenUpError` if the work was given up."""
        if self._given_up:
            raise GivenUpError

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """Make the block this work."""
        _thread.work = self
        try:
            yield
        finally:
            del _thread.work


def give_way() -> None:
    """End a part of the work; raises `GivenUpError` if nobody wants the rest."""
    work: BackgroundWork | None = getattr(_thread, "work", None)
    if work is not None:
        work.check()
