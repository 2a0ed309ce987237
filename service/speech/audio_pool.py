"""Holds the audio of requests within its bounds, and decodes files in sandboxed processes."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from triptych.model.speech.audio_file import AudioError, AudioLimits
from triptych.service.core.errors import no_room
from triptych.service.sandbox.process_pool import ForkingWorker, WorkerError, WorkerPool

# -- Worker processes that decode audio files of strangers; `triptych.service.speech.audio_main` says why they are
# processes.

_WORKERS = 2


class AudioWorker(ForkingWorker):
    """Runs one process, started on first use, with a process of its own for each file. Not thread-safe."""

    def __init__(self, seconds: float, limits: AudioLimits) -> None:
        variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        super().__init__(seconds, "triptych.service.speech.audio_main", variables=variables)
        self._limits = limits

    def decode(self, data: bytes, sampling_rate: int) -> NDArray[np.float32]:
        """Return mono samples; raises `AudioError` for what the file is to blame for, else `WorkerError`."""
        if len(data) > self._limits.file_bytes:
            raise AudioError(f"the audio file has {len(data)} bytes, more than {self._limits.file_bytes} are not taken")
        request = {"sampling_rate": sampling_rate, "limits": asdict(self._limits)}
        try:
            _, samples = self.ask_with_bytes(request, data, 4 * int(self._limits.seconds * sampling_rate))
            return np.frombuffer(samples[: len(samples) & ~3], "<f4")
        except WorkerError as error:
            if error.kind in ("refused", "memory"):
                raise AudioError(str(error)) from None
            if error.kind == "time":
                raise AudioError(f"decoding the audio takes {error}") from None
            if error.kind == "crashed":
                raise AudioError("the audio file is broken: its decoder failed") from None
            raise


class AudioPool:
    """Decodes several files at a time outside the event loop, each within `seconds` and `limits`."""

    def __init__(self, seconds: float, limits: AudioLimits, workers: int = _WORKERS) -> None:
        self._pool = WorkerPool(lambda: AudioWorker(seconds, limits), seconds, workers, "triptych-audio")

    async def decode(self, data: bytes, sampling_rate: int) -> NDArray[np.float32]:
        """Return mono samples `[n]` in float32 at `sampling_rate`, read-only.

        Raises `AudioError` for a file that is not taken, `WorkerError` where no process starts or becomes free.
        """
        return await self._pool.run(lambda worker: worker.decode(data, sampling_rate))

    def close(self) -> None:
        """Wait for files in progress and end all processes; a later `decode` starts new ones."""
        self._pool.close()


# -- Bounds the audio files in transcription, and their bytes with those of uploads in progress. An upload counts with
# the bytes that have arrived. It takes one of the places for files only once it is complete, so a slow client does not
# block others. A decoded file counts with its samples until its reply has been sent.


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
