"""How much memory this process can still take. Stdlib only."""

from __future__ import annotations

import os
from pathlib import Path

_GROUPS = (  # limit and use of the container, by version of Linux' control groups
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat", "inactive_file"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
        "sys/fs/cgroup/memory/memory.stat",
        "total_inactive_file",
    ),
)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes: of the machine or, where that is less, of the container. What only caches files counts as available."""
    found = [left for group in _GROUPS if (left := _left_to_group(root, *group)) is not None]
    machine = _fields(root / "proc/meminfo").get("MemAvailable:")  # in KiB
    if machine is None:
        return min([os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *found])
    return min([machine * 1024, *found])


def _left_to_group(root: Path, limit: str, use: str, stat: str, cached: str) -> int | None:
    """None where there is no such group or it has no limit, which is the word "max" or a number beyond any memory."""
    try:
        most, used = (root / limit).read_text().strip(), int((root / use).read_text())
    except (OSError, ValueError):
        return None
    return max(0, int(most) - used + _fields(root / stat).get(cached, 0)) if most.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number; what else there is in a line is not looked at."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
