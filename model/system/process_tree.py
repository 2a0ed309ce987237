"""The processes that this one has started, directly or through others. Linux only."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


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
