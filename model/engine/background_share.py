"""Background work: requests of batches, which get only the time that other requests leave.

Such work has steps of its own, and a pacer of its own, so that its costs are not taken for those of other work. While
there is other work it gets a small share of the time, so that it always goes on.
"""

from __future__ import annotations

from triptych.model.engine.step_pacer import StepPacer

SHARE = 0.03  # of the time of other steps, which background steps may take
_MAX_SECONDS = 0.05  # of a step: a request that comes meanwhile waits for its end


class BackgroundShare:
    """Decides whether the next step is one of background work."""

    def __init__(self) -> None:
        self.pacer = StepPacer(max_step_seconds=_MAX_SECONDS)
        self._credit = 0.0  # seconds that background steps may take
        self._last = 0.0  # seconds of the last background step

    def is_due(self) -> bool:
        """Return whether a background step may run although there is other work."""
        return self._credit > 0 and self._credit >= self._last

    def observe(self, seconds: float, *, background: bool, contended: bool) -> None:
        """Count a step; `contended`: there was work of both kinds."""
        if background:
            self._last = seconds
        if not contended:
            self._credit = 0.0
        elif background:
            self._credit -= seconds
        else:
            self._credit = min(self._credit + SHARE * seconds, max(self._last, SHARE * seconds))
