"""Long work on a thread that has something more urgent to do: the work gives way to it, part by part. Stdlib only.

`give_way` ends a part of the work. If others' turn has come, it returns when they have had it: they run on the same
thread, within this call. So nothing runs at the same time, and the work takes neither cores nor the interpreter's lock
from others at moments that nobody chooses. Parts should be short: a millisecond or less. What waits for a file or a
process runs in another thread meanwhile (`wait_for`).

Without such an urgent owner both do nothing beside, so code that calls them can also be all that a process does. Code
that changes the state of its thread, as torch's modes do, must not call them while it is changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

_Result = TypeVar("_Result")


class GivenUpError(Exception):
    """Nobody wants the work any more."""


class Owner(Protocol):
    """What the work gives way to."""

    def give_way(self) -> None:
        """Run what is urgent; raises `GivenUpError`."""

    def wait_for(self, call: Callable[[], _Result]) -> _Result:
        """Return what `call` returns, which runs in another thread, and run what is urgent until then."""


class _Thread(threading.local):
    owner: Owner | None = None


_thread = _Thread()


@contextmanager
def giving_way_to(owner: Owner | None) -> Iterator[None]:
    """Let the block give way to `owner`; None: to nobody."""
    before, _thread.owner = _thread.owner, owner
    try:
        yield
    finally:
        _thread.owner = before


def gives_way() -> bool:
    """Return whether others wait for the parts of this work, so that they should be short."""
    return _thread.owner is not None


def give_way() -> None:
    """End a part of the work; raises `GivenUpError` if nobody wants the rest."""
    if _thread.owner is not None:
        _thread.owner.give_way()


def wait_for(call: Callable[[], _Result]) -> _Result:
    """Return what `call` returns, which waits for something and computes next to nothing; raises what it raises."""
    return call() if _thread.owner is None else _thread.owner.wait_for(call)
