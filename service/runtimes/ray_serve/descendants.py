"""Termination of all descendant processes, also of those whose parents were killed. Linux only.

Ray starts HAProxy and the engines through three processes of its own. If one of these is killed, its children become
orphans, and an orphaned HAProxy that keeps listening would block the port for the next service.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from model.system.process_tree import descendants

_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_POLL_SECONDS = 0.05
_TRIES = 3
_KILL_WAIT_SECONDS = 1.0


def adopt_orphans() -> None:
    """Make this process the parent of all its descendants whose own parent ends, in place of process 1."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(grace_s: float) -> list[str]:
    """Wait `grace_s` for all descendants to end, kill those that have not, and return the names of the killed."""
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
