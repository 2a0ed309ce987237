"""The host memory that is available to this process. Stdlib only."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

from triptych.model.system.control_group import group_folders

_GROUP_FILES = (  # limit, usage, and the field of memory.stat for the file cache, for cgroup versions 2 and 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory(root: Path = Path("/"), *, mapped: int = 0) -> int:
    """Return the available bytes of the machine or, if less, of the control group; file cache counts as available.

    `mapped` bytes of the file cache are in use and do not count.
    """
    of_groups = [
        left
        for folder in group_folders("memory", root)
        for files in _GROUP_FILES
        if (left := _left_to_group(folder, mapped, *files)) is not None
    ]
    machine = _read_fields(root / "proc/meminfo").get("MemAvailable:")  # in KiB
    if machine is None:
        return min([os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *of_groups])
    return min([max(0, machine * 1024 - mapped), *of_groups])


def resident_memory(process: int) -> int:
    """Return the bytes that a process has in memory, with the files that it maps; 0 if there is no such process."""
    return 1024 * _read_fields(Path(f"/proc/{process}/status")).get("VmRSS:", 0)


def return_free_memory() -> None:
    """Return freed memory to the system, which glibc would keep for later."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _left_to_group(folder: Path, mapped: int, limit_file: str, usage_file: str, cache_field: str) -> int | None:
    """Return the bytes left to a control group; None without a group or a limit ("max" or a huge number)."""
    try:
        limit, used = (folder / limit_file).read_text().strip(), int((folder / usage_file).read_text())
    except (OSError, ValueError):
        return None
    cached = max(0, _read_fields(folder / "memory.stat").get(cache_field, 0) - mapped)
    return max(0, int(limit) - used + cached) if limit.isdigit() else None


def _read_fields(path: Path) -> dict[str, int]:
    """Read a file of lines with a name and a number; the rest of a line is ignored."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
