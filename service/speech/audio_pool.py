"""Worker processes that decode audio files of strangers; `service.speech.audio_main` says why they are processes."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from model.speech.audio_file import AudioError, AudioLimits
from service.sandbox.process_pool import ForkingWorker, WorkerError, WorkerPool

_WORKERS = 2


class AudioWorker(ForkingWorker):
    """Runs one process, started on first use, with a process of its own for each file. Not thread-safe."""

    def __init__(self, seconds: float, limits: AudioLimits) -> None:
        variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        super().__init__(seconds, "service.speech.audio_main", variables=variables)
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
