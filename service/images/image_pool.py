"""Decodes the image files of requests in sandboxed processes, within bounds of pixels and time."""

from __future__ import annotations

from dataclasses import asdict

from triptych.model.vision.decoding import ImageError
from triptych.model.vision.processing import ImageProcessing
from triptych.service.sandbox.process_pool import ForkingWorker, WorkerError, WorkerPool

_WORKERS = 2


class ImageWorker(ForkingWorker):
    """One process, started on first use, that forks for each file. Not thread-safe."""

    def __init__(self, seconds: float, all_pixels: int) -> None:
        variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        super().__init__(seconds, "triptych.service.images.image_main", variables=variables)
        self._all_pixels = all_pixels

    def prepare(self, data: bytes, processing: ImageProcessing, most_pixels: int) -> tuple[bytes, int]:
        """Decode a file; return the pixels that the model reads, and the number of the file's pixels.

        Raises `ImageError` if the file is at fault, else `WorkerError`.
        """
        request = {"processing": asdict(processing), "most_pixels": most_pixels, "all_pixels": self._all_pixels}
        try:
            reply, pixels = self.ask_with_bytes(request, data)
        except WorkerError as error:
            if error.kind in ("refused", "memory"):
                raise ImageError(str(error)) from None
            if error.kind == "time":
                raise ImageError(f"decoding the image takes {error}") from None
            if error.kind == "crashed":
                raise ImageError("the image file is broken: its decoder failed") from None
            raise
        return bytes(pixels), reply["pixels"]


class ImagePool:
    """Decodes two files at once outside the event loop, each within `seconds`; a request has `all_pixels` at most."""

    def __init__(self, seconds: float, all_pixels: int, workers: int = _WORKERS) -> None:
        self._all_pixels = all_pixels
        self._pool = WorkerPool(lambda: ImageWorker(seconds, all_pixels), seconds, workers, "triptych-image")

    def request(self, processing: ImageProcessing) -> RequestImages:
        """Return a decoder for the files of one request."""
        return RequestImages(self._pool, processing, self._all_pixels)

    def close(self) -> None:
        """Wait for files in progress and end all processes; a later request starts new ones."""
        self._pool.close()


class RequestImages:
    """Decodes the files of one request, one after the other, until they have too many pixels."""

    def __init__(self, pool: WorkerPool[ImageWorker], processing: ImageProcessing, most_pixels: int) -> None:
        self._pool = pool
        self._processing = processing
        self._left = most_pixels

    async def prepare(self, data: bytes) -> bytes:
        """Decode the next file and return the pixels that the model reads (`ImageProcessing.prepare`).

        Raises `ImageError` for a file that is refused, `WorkerError` if no process starts or becomes free.
        """
        pixels, found = await self._pool.run(lambda worker: worker.prepare(data, self._processing, self._left))
        self._left -= found
        return pixels
