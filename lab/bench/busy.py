"""CPU use of other processes during a measurement, in cores.

It is the busy time of all CPUs minus that of this process, and includes time stolen by other virtual machines. It is
known only on Linux.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

QUIET_CORES = 0.15  # others may use this much in a quiet run
_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class CpuClock:
    """Holds elapsed seconds, busy seconds of all CPUs, and CPU seconds of this process and its children."""

    wall: float
    busy: float | None
    own: float

    @classmethod
    def now(cls) -> CpuClock:
        used = os.times()
        return cls(time.perf_counter(), _busy_seconds(), used.user + used.system + used.children_user)

    def foreign_cores(self, since: CpuClock) -> float | None:
        """Return how many cores other processes used since a reading, on average; None: not known."""
        if self.busy is None or since.busy is None or self.wall <= since.wall:
            return None
        return max(0.0, (self.busy - since.busy - (self.own - since.own)) / (self.wall - since.wall))


def _busy_seconds() -> float | None:
    try:
        line = _STAT.read_text().splitlines()[0]
    except OSError:
        return None
    return busy_ticks(line) / os.sysconf("SC_CLK_TCK")


def busy_ticks(line: str) -> int:
    """Return the busy ticks in the first line of /proc/stat: user, nice, system, irq, softirq, steal."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
    return user + nice + system + irq + softirq + steal
