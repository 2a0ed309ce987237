"""SIGUSR1 prints what each thread of a process is doing.

`kill -USR1 PID`, with the service's process, writes the stacks of all its processes to standard error.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path

_SIGNAL = signal.SIGUSR1


def print_stacks_on_signal(*, of_descendants: bool = False) -> None:
    """Print the stacks of this process's threads on SIGUSR1; `of_descendants`: pass the signal on to those.

    The stacks are printed even if the interpreter is busy. The signal is passed on once Python code runs again.
    Only the main thread may ask for descendants.
    """
    if of_descendants:
        signal.signal(_SIGNAL, lambda number, frame: _signal_descendants())
    faulthandler.register(_SIGNAL, all_threads=True, chain=of_descendants)


def _signal_descendants() -> None:
    """Send the signal to each descendant in Python that handles it: it ends any other process, HAProxy too."""
    python = Path("/proc/self/exe").readlink()
    for process in descendants():
        with suppress(OSError):
            if Path(f"/proc/{process}/exe").readlink() == python and _handles_signal(process):
                os.kill(process, _SIGNAL)


def _handles_signal(process: int) -> bool:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        name, _, mask = line.partition(":")
        if name == "SigCgt":
            return bool(int(mask, 16) >> (_SIGNAL - 1) & 1)
    return False


def descendants() -> list[int]:
    """Return the ids of all running descendants, without zombies."""
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
