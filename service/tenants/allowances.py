"""How much of a quota is left: units a minute, and places at a time. No I/O; callers pass the time.

An allowance gives out receipts. A receipt is corrected once the true number of units is known, and a place is given
back by correcting it to 0.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MINUTE = 60.0
_SLOT = 0.25  # seconds: units of one slot are free again together


@dataclass(slots=True)
class Receipt:
    """Units that were taken."""

    units: int
    slot: Slot | None = None


@dataclass(slots=True)
class Slot:
    """The units that were taken in a quarter of a second."""

    begin: float
    units: int = 0
    is_over: bool = False  # more than a minute ago


class Minute:
    """At most `limit` units within any minute."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._slots: deque[Slot] = deque()

    def take(self, units: int, now: float) -> Receipt | None:
        """Take units, or none if fewer are left."""
        return self.charge(units, now) if units <= self.left(now) else None

    def charge(self, units: int, now: float) -> Receipt:
        """Take units even if fewer are left."""
        if not self._slots or now - self._slots[-1].begin >= _SLOT:
            self._slots.append(Slot(now))
        slot = self._slots[-1]
        slot.units += units
        self.used += units
        return Receipt(units, slot)

    def correct(self, receipt: Receipt, units: int, now: float) -> None:
        """Set the true units of a receipt: fewer are given back, more are taken now, if they are left or not."""
        more, slot = units - receipt.units, receipt.slot
        receipt.units = units
        if more > 0:
            self.charge(more, now)
        elif slot is not None and not slot.is_over:
            slot.units += more
            self.used += more

    def give_back(self, units: int) -> None:
        """Give back units, those that were taken last."""
        for slot in reversed(self._slots):
            freed = min(units, slot.units)
            slot.units -= freed
            self.used -= freed
            units -= freed

    def shown(self, now: float) -> int:
        """Return what replies say is left."""
        return self.left(now)

    def left(self, now: float) -> int:
        """Return the units that may be taken now; below 0 if corrections took more than there were."""
        while self._slots and now - self._slots[0].begin >= MINUTE + _SLOT:
            slot = self._slots.popleft()
            slot.is_over = True
            self.used -= slot.units
        return self.limit - self.used

    def wait(self, units: int, now: float) -> float:
        """Return the seconds until `units` are left, if nothing else takes any."""
        missing, until = min(units, self.limit) - self.left(now), 0.0
        if missing >= self.used:  # of all units: each reply says it, and there are hundreds of slots
            last = next((slot for slot in reversed(self._slots) if slot.units), None)
            return last.begin + MINUTE + _SLOT - now if last is not None else 0.0
        for slot in self._slots:
            if missing <= 0:
                break
            missing -= slot.units
            until = slot.begin + MINUTE + _SLOT - now
        return until


class Places:
    """At most `limit` units at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, units: int, now: float) -> Receipt | None:
        """Take units, or none if fewer are left."""
        if units > self.left(now):
            return None
        self.used += units
        return Receipt(units)

    def correct(self, receipt: Receipt, units: int, now: float) -> None:
        """Set the units of a receipt; 0 gives them back."""
        self.used += units - receipt.units
        receipt.units = units

    def shown(self, now: float) -> int:
        """Return what replies say is left."""
        return self.left(now)

    def left(self, now: float) -> int:
        """Return the units that may be taken now."""
        return self.limit - self.used

    def wait(self, units: int, now: float) -> float:
        """Return a second if there are too few: when a request ends is not known."""
        return 1.0 if units > self.left(now) else 0.0
