"""The main process under Ray: its signals, a time limit for calls to Ray, and the end of all its descendants.

Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from triptych.model.system.stacks import descendants
from triptych.service.runtimes.assembly import exit_code

# -- Signal handling while the main thread is inside calls to Ray, and a time limit for such calls.

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


# Processes that Ray starts must not inherit the mask of `MainSignals.blocked`.
os.register_at_fork(after_in_child=_unblock_signals)


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
        """Block signals inside the block, because during `ray.init` Ray's C++ handlers would abort the process."""
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
        """Return the exit code for the received signal; raises `stopped` again if there was none."""
        if self._received is None:
            raise stopped
        return exit_code(self._received, drained=self.drained)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        raise SystemExit(128 + number)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` inside a block that takes longer. It uses a signal, so it works in the main thread only."""

    def expired(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


# -- Termination of all descendant processes, including those whose parents were killed. There are three processes of
# Ray between this one and HAProxy or the engines. If one of these is killed, its children become orphans, and an
# orphaned HAProxy that keeps listening would block the port for the next service.

_PR_SET_CHILD_SUBREAPER = 36  # an option of prctl(2)
_POLL_SECONDS = 0.05
_TRIES = 3
_KILL_WAIT_SECONDS = 1.0


def adopt_orphans() -> None:
    """Make this process, in place of process 1, the new parent of its descendants whose parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(grace_s: float) -> list[str]:
    """Wait `grace_s` for all descendants to end, kill the others, and return the names of the killed ones."""
    if _gone_within(grace_s):
        return []
    killed: dict[int, str] = {}
    for _ in range(_TRIES):  # a killed process may just have started another
        for pid in descendants():
            killed[pid] = killed.get(pid) or _name(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if _gone_within(_KILL_WAIT_SECONDS):
            break
    return sorted(killed.values())


def _gone_within(seconds: float) -> bool:
    end = time.monotonic() + seconds
    while descendants():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
