"""What others did on this machine while something ran, in cores.

Busy ticks of all processors less the process's own; those of a hypervisor's other guests are among them. Linux only:
elsewhere nothing is known, and nothing is called quiet or busy.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

QUIET_CORES = 0.15  # others may take this much of one core
_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class Clock:
    """A moment: seconds of the wall, of all processors' work, of this process's and its children's."""

    wall: float
    busy: float | None
    own: float

    @classmethod
    def now(cls) -> Clock:
        used = os.times()
        return cls(time.perf_counter(), _busy_seconds(), used.user + used.system + used.children_user)

    def foreign_cores(self, since: Clock) -> float | None:
        """How many cores others kept busy from `since` on, on average; None: not known."""
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
    """Ticks of the first line of /proc/stat in which a processor worked: user, nice, system, irq, softirq, steal."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
    return user + nice + system + irq + softirq + steal
