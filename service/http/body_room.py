"""Bounds what the bodies of all connections take together, while they come and until their replies begin.

Small bodies are always taken: their number is bounded by the connections, and who sends large ones slowly keeps no
others out. Files of the audio routes have a room of their own (`AudioRoom`).
"""

from __future__ import annotations

from service.core.errors import no_room

FREE_BYTES = 65_536  # of a body that is not counted


class BodyRoom:
    """Counts the bytes of large bodies; what is too much is refused with a 429."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.num_bytes = 0

    def enter(self) -> HeldBody:
        return HeldBody(self)

    def replace(self, before: int, now: int) -> None:
        """Count a body's bytes now, in place of those before; raises a 429 if it is not alone and has no room."""
        others = self.num_bytes - before
        if others and others + now > self._most_bytes:
            what = f"the bodies that are being read or answered have max_held_body_bytes ({self._most_bytes})"
            raise no_room(what, "body_bytes")
        self.num_bytes = others + now


class HeldBody:
    """What one request's body holds: nothing at first."""

    __slots__ = ("_num_bytes", "_room")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._num_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Hold the body's bytes so far; raises a 429 if there is no room for them."""
        if num_bytes > FREE_BYTES:
            self._room.replace(self._num_bytes, num_bytes)
            self._num_bytes = num_bytes

    def release(self) -> None:
        """Hold nothing. Idempotent."""
        self._room.num_bytes -= self._num_bytes
        self._num_bytes = 0
