"""Chooses how many threads compute: at most the processors that this process may use. Stdlib only.

`OMP_NUM_THREADS` of this process holds the choice for its children: the engine, its ranks, and the packing of weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from triptych.model.system.control_group import group_folders

VARIABLE = "OMP_NUM_THREADS"
MOST_THREADS = 1024

_NODES = Path("/sys/devices/system/node")


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many CPUs the control groups of this process allow (versions 1 and 2); None without a limit.

    A group is also held by the limits of the groups that it is in.
    """
    return min(_quotas(root), default=None)


def usable_cpus() -> int:
    """Return the number of processors that this process may use: of its affinity and of its control groups."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def usable_sockets() -> int:
    """Return the number of memory nodes (NUMA), usually sockets, of the processors that this process may use."""
    allowed = os.sched_getaffinity(0)
    used = 0
    for path in _NODES.glob("node*/cpulist"):
        with suppress(OSError):
            used += not allowed.isdisjoint(cpu_list(path.read_text()))
    return max(1, min(used, usable_cpus()))


def threads_of(environment: Mapping[str, str]) -> int:
    """Return the number of threads of a process with this environment that computes."""
    return given_threads(environment) or usable_cpus()


def given_threads(environment: Mapping[str, str]) -> int | None:
    """Return the number of threads that an environment names: the first of `4` or `4,2`; None if it is none above 0."""
    first = environment.get(VARIABLE, "").partition(",")[0].strip()
    return min(int(first), MOST_THREADS) or None if first.isascii() and first.isdigit() else None


def set_threads(threads: int | None) -> None:
    """Choose the number of threads of this process's children; None: as its environment says."""
    if threads is not None:
        os.environ[VARIABLE] = str(threads)


def cpu_list(text: str) -> set[int]:
    """Parse a list of processors such as `0-3,8`; empty if it is none."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        try:
            found.update(range(int(first), int(last or first) + 1))
        except ValueError:
            return set()
    return found


def _quotas(root: Path) -> Iterator[float]:
    for folder in group_folders("cpu", root):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):
                limit, period = " ".join((folder / name).read_text() for name in names).split()
                if limit not in ("max", "-1"):
                    yield int(limit) / int(period)
