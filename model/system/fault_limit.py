"""Counts faults within a span of time."""

from __future__ import annotations

import time
from collections import deque


class FaultLimit:
    """Says when something has gone wrong more than `most` times within `seconds`."""

    def __init__(self, most: int, seconds: float) -> None:
        self.most = most
        self.seconds = seconds
        self._times: deque[float] = deque()

    def exceeded(self) -> bool:
        """Count a fault that happens now; whether it is one too many."""
        now = time.monotonic()
        self._times.append(now)
        while self._times[0] < now - self.seconds:
            self._times.popleft()
        return len(self._times) > self.most
