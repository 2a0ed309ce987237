"""Signal handling for a main thread that is inside calls to Ray, and a time limit for such calls."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from service.runtimes.assembly import exit_code

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


os.register_at_fork(
    after_in_child=_unblock_signals
)  # processes that Ray starts must not inherit the mask of `MainSignals.blocked`


class MainSignals:
    """Handles SIGTERM and SIGINT: raises `SystemExit` in the main thread, even inside a call to Ray."""

    def __init__(self) -> None:
        self._received: int | None = None
        self.drained = False

    def install(self) -> None:
        """Install the handlers."""
        for number in _SIGNALS:
            signal.signal(number, self._stop)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Block signals inside the block: during `ray.init` the handlers of Ray's C++ part would abort the process."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            yield
        finally:
            self.install()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def ignore(self) -> None:
        """Ignore further signals."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def exit_code(self, stopped: SystemExit) -> int:
        """Return the exit code of the signal received; raises `stopped` again if there was none."""
        if self._received is None:
            raise stopped
        return exit_code(self._received, drained=self.drained)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        raise SystemExit(128 + number)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` inside a block that takes longer. Works by a signal, so only in the main thread."""

    def expired(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
