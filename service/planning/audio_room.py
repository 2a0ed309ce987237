"""Bounds of what is held of audio: files that are transcribed, and their bytes with those that are being sent.

A file that is being sent counts with the bytes that have come, and takes no place before it is whole: a slow client
keeps nobody else from being served. Once decoded it counts with its samples, until its reply has been sent. Several
front processes have one room: its counts are shared.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from service.core.errors import ApiError


class AudioCounts(Protocol):
    """Counts files as sequences and their bytes as waiting tokens: those of models can be shared, and these with them
    (`model.client.counts`).
    """

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from counting inside the block, which must not wait for anything."""

    @property
    def sequences(self) -> int: ...

    @property
    def waiting_tokens(self) -> int: ...

    def add(self, sequences: int, waiting_tokens: int) -> None:
        """Add to both totals; negative numbers take away."""


class _OwnCounts:
    """The counts of a single front process."""

    def __init__(self) -> None:
        self.sequences = 0
        self.waiting_tokens = 0

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def add(self, sequences: int, waiting_tokens: int) -> None:
        self.sequences += sequences
        self.waiting_tokens += waiting_tokens


class AudioRoom:
    """Counts audio files and their bytes; what is too much is refused with a 429."""

    def __init__(self, most_files: int, most_bytes: int) -> None:
        self._most_files = most_files
        self._most_bytes = most_bytes
        self.counts: AudioCounts = _OwnCounts()  # a worker of several front processes sets those of all

    @property
    def num_files(self) -> int:
        return self.counts.sequences

    @property
    def num_bytes(self) -> int:
        return self.counts.waiting_tokens

    def enter(self, declared: int = 0) -> HeldAudio:
        """Return what holds one more audio; raises a 429 if a file, or one of `declared` bytes, had no room now."""
        self._check_files()
        self._check_bytes(declared)
        return HeldAudio(self)

    def _check_files(self) -> None:
        if self.num_files >= self._most_files:
            raise _full(f"{self._most_files} audio files are being transcribed", "audio_files")

    def _check_bytes(self, more: int) -> None:
        """Raise for bytes beyond the limit; a file alone is taken, since it has limits of its own."""
        if self.num_bytes and self.num_bytes + more > self._most_bytes:
            raise _full(f"the audio that is held has {self._most_bytes} bytes", "audio_bytes")


class HeldAudio:
    """What one request holds of audio: nothing at first."""

    def __init__(self, room: AudioRoom) -> None:
        self._room = room
        self._has_place = False
        self._num_bytes = 0
        self._file = b""

    def hold(self, num_bytes: int) -> None:
        """Hold so many bytes from now on, in place of those before; raises a 429 if that is too many."""
        counts = self._room.counts
        with counts.locked():
            counts.add(0, -self._num_bytes)
            self._num_bytes = 0
            self._room._check_bytes(num_bytes)
            counts.add(0, num_bytes)
            self._num_bytes = num_bytes

    def put(self, file: bytes) -> None:
        """Take a place for a file that is whole, and keep it until it is decoded; raises a 429 without a place."""
        self.hold(len(file))
        if not self._has_place:
            with self._room.counts.locked():
                self._room._check_files()
                self._room.counts.add(1, 0)
            self._has_place = True
        self._file = file

    def take(self) -> bytes:
        """Return the file, which is then kept no more; its bytes count until `hold` says otherwise."""
        file, self._file = self._file, b""
        return file

    def release(self) -> None:
        """Hold nothing. Idempotent."""
        self._room.counts.add(-self._has_place, -self._num_bytes)
        self._has_place, self._num_bytes, self._file = False, 0, b""


def _full(what: str, reason: str) -> ApiError:
    message = f"{what}, which is the most at a time; try again later"
    return ApiError(
        *(429, message), type="overloaded_error", code="queue_full", headers={"Retry-After": "5"}, reason=reason
    )
