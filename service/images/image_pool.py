"""Decodes the image files of requests in sandboxed processes, within bounds of pixels, time and memory."""

from __future__ import annotations

from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from triptych.model.vision.decoding import MAX_PIXELS, ImageError
from triptych.model.vision.pictures import PictureProcessing, PreparedPicture
from triptych.model.vision.processing import ImageProcessing
from triptych.service.core.errors import no_room
from triptych.service.core.request_context import current
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
        reply, pixels = self._decoded(data, processing, most_pixels, {})
        return pixels, reply["pixels"]

    def prepare_picture(
        self, data: bytes, processing: PictureProcessing, most_pixels: int, detail: str
    ) -> tuple[PreparedPicture, int]:
        """Decode a picture of a prompt, as `prepare` does."""
        reply, pixels = self._decoded(data, processing, most_pixels, {"detail": detail})
        found = reply["picture"]
        shape, tiles = tuple(found.pop("shape")), tuple(found.pop("tiles"))
        return PreparedPicture(**found, features=pixels, shape=shape, tiles=tiles), reply["pixels"]

    def _decoded(
        self, data: bytes, processing: ImageProcessing, most_pixels: int, more: dict[str, Any]
    ) -> tuple[dict[str, Any], bytes]:
        request = {"processing": asdict(processing), "most_pixels": most_pixels, "all_pixels": self._all_pixels, **more}
        try:
            reply, pixels = self.ask_with_bytes(request, data, 3 * MAX_PIXELS)
        except WorkerError as error:
            if error.kind in ("refused", "memory"):
                raise ImageError(str(error)) from None
            if error.kind == "time":
                raise ImageError(f"decoding the image takes {error}") from None
            if error.kind == "crashed":
                raise ImageError("the image file is broken: its decoder failed") from None
            raise
        return reply, bytes(pixels)


class ImagePool:
    """Decodes two files at once outside the event loop, each within `seconds`; a request has `all_pixels` at most.

    The decoded images of all requests together have `most_bytes` at most.
    """

    def __init__(self, seconds: float, all_pixels: int, most_bytes: int, workers: int = _WORKERS) -> None:
        self._all_pixels = all_pixels
        self._most_bytes = most_bytes
        self.held_bytes = 0
        self._pool = WorkerPool(lambda: ImageWorker(seconds, all_pixels), seconds, workers, "triptych-image")

    def request(self) -> RequestImages:
        """Return a decoder for the files of one request, which holds their pixels until it is closed."""
        return RequestImages(self, self._all_pixels)

    async def prepare(self, data: bytes, processing: ImageProcessing, most_pixels: int) -> tuple[bytes, int]:
        """Do what `ImageWorker.prepare` does with a free worker; raises what it raises."""
        return await self._pool.run(lambda worker: worker.prepare(data, processing, most_pixels))

    async def prepare_picture(
        self, data: bytes, processing: PictureProcessing, most_pixels: int, detail: str
    ) -> tuple[PreparedPicture, int]:
        """Do what `ImageWorker.prepare_picture` does with a free worker; raises what it raises."""
        return await self._pool.run(lambda worker: worker.prepare_picture(data, processing, most_pixels, detail))

    def hold(self, num_bytes: int) -> None:
        """Count bytes of decoded images; raises a 429 beyond the limit, unless no other images are held."""
        if self.held_bytes and self.held_bytes + num_bytes > self._most_bytes:
            raise no_room(f"the decoded images of requests have {self._most_bytes} bytes", "image_bytes")
        self.held_bytes += num_bytes

    def close(self) -> None:
        """Wait for files in progress and end all processes; a later request starts new ones."""
        self._pool.close()


class RequestImages:
    """Decodes the files of one request, one after the other, until they have too many pixels."""

    def __init__(self, pool: ImagePool, most_pixels: int) -> None:
        self._pool = pool
        self._left = most_pixels
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def hold(self, num_bytes: int) -> None:
        """Make room for the pixels of files, before they are decoded; raises a 429 if there is none."""
        self._pool.hold(num_bytes)
        self._held += num_bytes

    def close(self) -> None:
        """Give the room back. Idempotent."""
        self._pool.held_bytes -= self._held
        self._held = 0

    async def prepare(self, data: bytes, processing: ImageProcessing) -> bytes:
        """Decode the next file and return the pixels that the model reads (`ImageProcessing.prepare`).

        Raises `ImageError` for a file that is refused, `WorkerError` if no process starts or becomes free.
        """
        pixels, found = await self._pool.prepare(data, processing, self._left)
        self._count(found)
        return pixels

    async def prepare_picture(self, data: bytes, processing: PictureProcessing, detail: str) -> PreparedPicture:
        """Decode the next file as a picture of a prompt, and hold its pixels; raises as `prepare`, or a 429."""
        picture, found = await self._pool.prepare_picture(data, processing, self._left, detail)
        self._count(found)
        self.hold(len(picture.features))
        return picture

    def _count(self, num_pixels: int) -> None:
        """Count a file that was decoded."""
        self._left -= num_pixels
        if (context := current()) is not None:
            context.images += 1
