"""Binds processes and threads to CPUs: replicas of one machine compute on CPUs of their own. Stdlib only, Linux.

A replica claims CPUs for as long as it lives, and names them in `VARIABLE`. Its engine and the engine's children run on
these alone (`bind_process`), so what they touch first lies in memory near them. A claim is an abstract socket: it ends
with its process, and all services of the machine see it (of a network namespace).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from triptych.model.system.cpu_threads import cpu_list

VARIABLE = "TRIPTYCH_CPUS"  # a list of CPUs such as 0-3,8, on which the engine and its children run
THREADS_VARIABLE = "TRIPTYCH_BIND_THREADS"  # 1: each thread that computes has a CPU of its own
BINDINGS = ("auto", "off", "threads")

_CPUS = Path("/sys/devices/system/cpu")
_NAME = "\0triptych-cpu-"  # of a claim's socket
_TURN = "\0triptych-cpus"  # of the process that claims CPUs now
_TURN_SECONDS = 2.0


def claim(count: int, allowed: Iterable[int] | None = None) -> tuple[list[int], list[socket.socket]]:
    """Claim `count` of the allowed CPUs that no other process has claimed; return them with what holds the claim.

    They share a cache, or else a memory node, where one has enough left. Nothing is claimed if too few are left.
    """
    cpus = os.sched_getaffinity(0) if allowed is None else set(allowed)
    end = time.monotonic() + _TURN_SECONDS
    while (turn := _bound(_TURN)) is None:
        if time.monotonic() > end:
            return [], []
        time.sleep(0.01)
    with turn:
        held = {cpu: holder for cpu in cpus if (holder := _bound(f"{_NAME}{cpu}")) is not None}
        chosen = choose(count, groups(set(held)))
        for cpu in set(held) - set(chosen):
            held.pop(cpu).close()
        return chosen, list(held.values())


def choose(count: int, free: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Choose CPUs from groups of free ones: nodes of caches of CPUs. Empty: there are too few.

    The smallest cache that has enough is taken, else the smallest node, else as many nodes as needed.
    """
    caches = [list(cache) for node in free for cache in node]
    nodes = [[cpu for cache in node for cpu in cache] for node in free]
    everything = [[cpu for node in sorted(nodes, key=len, reverse=True) for cpu in node]]
    for candidates in (caches, nodes, everything):
        enough = [one for one in candidates if len(one) >= count]
        if enough:
            return sorted(min(enough, key=len)[:count])
    return []


def groups(cpus: set[int]) -> list[list[list[int]]]:
    """Divide CPUs by memory node, then by last-level cache; threads of one core follow each other."""
    nodes: dict[str, dict[str, list[int]]] = {}
    for cpu in sorted(cpus, key=lambda cpu: (min(_listed(cpu, "topology/thread_siblings_list", {cpu})), cpu)):
        folder = _CPUS / f"cpu{cpu}"
        node = next((path.name for path in sorted(folder.glob("node[0-9]*"))), "")
        nodes.setdefault(node, {}).setdefault(_last_cache(cpu), []).append(cpu)
    return [list(caches.values()) for caches in nodes.values()]


def bind_process(environment: Mapping[str, str]) -> None:
    """Run this process, and what it starts from now on, on the CPUs that the environment names, if it does."""
    cpus = cpu_list(environment.get(VARIABLE, ""))
    if cpus:
        with suppress(OSError):  # they have left the control group's set since
            os.sched_setaffinity(0, cpus)


def bind_each_thread(wanted: bool) -> None:
    """Let this process's children compute with a CPU of its own for each thread, if that is wanted."""
    if wanted:
        os.environ[THREADS_VARIABLE] = "1"


def cpus_of_threads(environment: Mapping[str, str], threads: int) -> list[int]:
    """Return a CPU for each thread, if the environment asks for that and this process has enough; else nothing."""
    cpus = [cpu for node in groups(set(os.sched_getaffinity(0))) for cache in node for cpu in cache]
    return cpus[:threads] if environment.get(THREADS_VARIABLE) == "1" and len(cpus) >= threads else []


def shown(cpus: Iterable[int]) -> str:
    """Write CPUs as a list such as `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _bound(name: str) -> socket.socket | None:
    """Return a socket bound to an abstract name; None if another process has it."""
    one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        one.bind(name)
    except OSError:
        one.close()
        return None
    return one


def _last_cache(cpu: int) -> str:
    """Name the CPUs that share the last-level cache of one; without information, all do."""
    found = [(0, "")]
    for index in (_CPUS / f"cpu{cpu}" / "cache").glob("index*"):
        with suppress(OSError, ValueError):
            found.append((int((index / "level").read_text()), (index / "shared_cpu_list").read_text().strip()))
    return max(found)[1]


def _listed(cpu: int, name: str, otherwise: set[int]) -> set[int]:
    try:
        return cpu_list((_CPUS / f"cpu{cpu}" / name).read_text()) or otherwise
    except OSError:
        return otherwise
