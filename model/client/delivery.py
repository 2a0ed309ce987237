"""Delivery calls the readers of streams back, those of one frame of the engine together.

A stream that has got something to read is called once: when the callbacks that are due have run, so that the frames
that have arrived already are handled together, or, with an interval, when its next delivery is due. Times of delivery
are rounded up to an eighth of the interval, so that streams share timers. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from typing import Protocol

_TICKS = 8  # an interval

logger = logging.getLogger(__name__)


class Deliverable(Protocol):
    """A stream, as delivery sees it."""

    def deliver(self) -> None:
        """Tell the reader that there is something to read."""

    def deliver_due(self) -> None:
        """Make readable what was held for the interval, and tell the reader."""


class Delivery:
    """Schedules the deliveries of all streams of one engine client."""

    def __init__(self, interval: float = 0.0) -> None:
        """`interval`: seconds between two deliveries of a stream; 0: everything is delivered as soon as it comes."""
        self.interval = interval
        self._soon: list[Deliverable] = []
        self._due: dict[int, list[Deliverable]] = {}  # by tick

    def soon(self, stream: Deliverable) -> None:
        """Call `deliver` behind the callbacks that are due now."""
        if not self._soon:
            asyncio.get_running_loop().call_soon(self._deliver_soon)
        self._soon.append(stream)

    def after(self, stream: Deliverable, last: float) -> None:
        """Call `deliver_due` one interval after the delivery at `last`, a time of the event loop."""
        loop = asyncio.get_running_loop()
        seconds = self.interval / _TICKS
        tick = math.ceil((last + self.interval) / seconds)
        waiting = self._due.get(tick)
        if waiting is None:
            waiting = self._due[tick] = []
            loop.call_at(tick * seconds, self._deliver_due, tick)
        waiting.append(stream)

    def _deliver_soon(self) -> None:
        streams, self._soon = self._soon, []
        _call([stream.deliver for stream in streams])

    def _deliver_due(self, tick: int) -> None:
        _call([stream.deliver_due for stream in self._due.pop(tick)])


def _call(calls: Iterable[Callable[[], None]]) -> None:
    """Make all calls, also where one raises what it should not: the others are of other streams."""
    for call in calls:
        try:
            call()
        except Exception:
            logger.exception("a stream could not be delivered")
