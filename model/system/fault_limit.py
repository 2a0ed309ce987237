"""A limit on the number of faults within a time window. Stdlib only."""

from __future__ import annotations

import time
from collections import deque


class FaultLimit:
    """Counts faults and tells when more than `max_faults` happened within `seconds`."""

    def __init__(self, max_faults: int, seconds: float) -> None:
        self.max_faults = max_faults
        self.seconds = seconds
        self._times: deque[float] = deque()

    def record_fault(self) -> bool:
        """Count a fault that happens now; return whether the limit is exceeded."""
        now = time.monotonic()
        self._times.append(now)
        while self._times[0] < now - self.seconds:
            self._times.popleft()
        return len(self._times) > self.max_faults
