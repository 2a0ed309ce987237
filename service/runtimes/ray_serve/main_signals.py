"""SIGTERM and SIGINT for a main thread that works in Ray, and a bound on that work."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from service.runtimes.local import exit_code

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


os.register_at_fork(after_in_child=_unblock_signals)  # what Ray starts must not inherit `MainSignals.held`


class MainSignals:
    """SIGTERM and SIGINT: the first ends whatever the main thread does by `SystemExit`, even in the middle of Ray."""

    def __init__(self) -> None:
        self._received: int | None = None
        self.drained = False

    def take(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._stop)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Signals wait for the end of the block: inside `ray.init` the handlers of Ray's C++ part would abort us."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            yield
        finally:
            self.take()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def ignore(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def exit_code(self, stopped: SystemExit) -> int:
        """As `service.runtimes.local.exit_code`; raises `stopped` again if there was no signal."""
        if self._received is None:
            raise stopped
        return exit_code(self._received, drained=self.drained)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        raise SystemExit(128 + number)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` in the block when it takes longer. Only in the main thread, as it is by a signal."""

    def expired(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
