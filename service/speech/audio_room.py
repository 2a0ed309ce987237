"""Bounds the audio files in transcription, and their bytes with those of uploads in progress.

An upload counts with the bytes that have arrived. It takes one of the places for files only once it is complete, so a
slow client does not block others. A decoded file counts with its samples until its reply has been sent.
"""

from __future__ import annotations

from service.core.errors import no_room


class AudioRoom:
    """Counts audio files and their bytes; raises a 429 for too many."""

    def __init__(self, most_files: int, most_bytes: int) -> None:
        self._most_files = most_files
        self._most_bytes = most_bytes
        self.num_files = 0
        self.num_bytes = 0

    def enter(self, declared: int = 0) -> HeldAudio:
        """Return what holds one more audio; raises a 429 if a file, or one of `declared` bytes, had no room now."""
        self._check_files()
        self._check_bytes(declared)
        return HeldAudio(self)

    def _check_files(self) -> None:
        if self.num_files >= self._most_files:
            raise no_room(f"{self._most_files} audio files are being transcribed", "audio_files")

    def _check_bytes(self, more: int) -> None:
        """Raise for bytes beyond the limit; a file alone is taken, since it has limits of its own."""
        if self.num_bytes and self.num_bytes + more > self._most_bytes:
            raise no_room(f"the audio that is held has {self._most_bytes} bytes", "audio_bytes")


class HeldAudio:
    """What one request holds of audio: nothing at first."""

    def __init__(self, room: AudioRoom) -> None:
        self._room = room
        self._has_place = False
        self._num_bytes = 0
        self._file = b""

    def hold(self, num_bytes: int) -> None:
        """Hold `num_bytes` bytes in place of those before; raises a 429 if that is too many."""
        self._room.num_bytes -= self._num_bytes
        self._num_bytes = 0
        self._room._check_bytes(num_bytes)
        self._room.num_bytes += num_bytes
        self._num_bytes = num_bytes

    def put(self, file: bytes) -> None:
        """Take a place for a file that is whole, and keep it until it is decoded; raises a 429 without a place."""
        self.hold(len(file))
        if not self._has_place:
            self._room._check_files()
            self._room.num_files += 1
            self._has_place = True
        self._file = file

    def take(self) -> bytes:
        """Return the file, which is then kept no more; its bytes count until `hold` says otherwise."""
        file, self._file = self._file, b""
        return file

    def release(self) -> None:
        """Hold nothing. Idempotent."""
        self._room.num_files -= self._has_place
        self._room.num_bytes -= self._num_bytes
        self._has_place, self._num_bytes, self._file = False, 0, b""
