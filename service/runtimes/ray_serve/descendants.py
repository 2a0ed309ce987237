"""The processes below this one, ended where those that should have ended them are gone. Linux only, as Ray's use of it.

Ray starts HAProxy and the engines behind three processes of its own. When one of these is killed, what it had started
is nobody's: an HAProxy that goes on listening would keep the next service from its port.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_LOOK_SECONDS = 0.05
_TRIES = 3
_KILLED_SECONDS = 1.0


def adopt_orphans() -> None:
    """From now on, a descendant whose parent ends becomes this process's child, not that of the machine's first."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(grace_s: float) -> list[str]:
    """Wait until no descendant is left, and kill those that are after `grace_s`; their names."""
    if _gone_within(grace_s):
        return []
    killed: dict[int, str] = {}
    for _ in range(_TRIES):  # one that is killed may just have started another
        for pid in _descendants():
            killed[pid] = killed.get(pid) or _name(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if _gone_within(_KILLED_SECONDS):
            break
    return sorted(killed.values())


def _gone_within(seconds: float) -> bool:
    end = time.monotonic() + seconds
    while _descendants():
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _descendants() -> list[int]:
    """All that run; what has ended and was not waited for does not count."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
