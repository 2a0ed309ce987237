"""Records features that fell back to a slower path because the GPU failed, and limits faults within a time window.

Stdlib only.
"""

from __future__ import annotations

import logging
import time
from collections import deque

# -- Record of features that fell back to a slower path because something on the GPU failed. Stdlib only. The code that
# falls back notes it here. The banner, /info and the log show the notes; with `slow_fallbacks: refuse` the engine does
# not start with any.

_reasons: dict[str, str] = {}  # by feature

logger = logging.getLogger(__name__)


def note(what: str, error: BaseException) -> None:
    """Record and log the fallback `what`, a short sentence, with its cause `error`."""
    _reasons[what] = summary(error)
    logger.warning("%s: %s", what, _reasons[what], exc_info=error)


def found() -> tuple[str, ...]:
    """Return all recorded fallbacks, each with its reason."""
    return tuple(f"{what}: {why}" for what, why in _reasons.items())


def noted(what: str) -> bool:
    """Return whether the fallback `what` was recorded."""
    return what in _reasons


def forget() -> None:
    """Remove all records, for tests."""
    _reasons.clear()


def summary(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# -- A limit on the number of faults within a time window. Stdlib only.


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
