"""Image files of requests, decoded to the pixels that a model reads."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from triptych.model.api.request import Source, image_source
from triptych.model.vision.decoding import ImageError
from triptych.model.vision.pictures import PictureProcessing
from triptych.model.vision.processing import ImageProcessing
from triptych.service.core.coded_files import file_bytes
from triptych.service.core.errors import invalid, unavailable
from triptych.service.images.image_pool import RequestImages
from triptych.service.sandbox.process_pool import WorkerError

T = TypeVar("T")

BAD_IMAGE = "invalid_image"  # the code of errors


def as_data_url(value: str) -> str:
    """Return an image in base64 or a data URL as a data URL."""
    return value if value[:5].lower() == "data:" else f"data:application/octet-stream;base64,{value}"


async def source_of(
    value: str,
    param: str,
    images: RequestImages,
    processing: ImageProcessing,
    shape: tuple[int, int, int],
    num_positions: int,
) -> Source:
    """Return an image as the pixels that the model reads, of `shape` unless it keeps its proportions.

    Raises a 400 that names `param`, or a 503.
    """
    data = file_bytes(value, param, BAD_IMAGE)
    if isinstance(processing, PictureProcessing):  # images of their own proportions
        made = await decoded(images.prepare_picture(data, processing, "auto"), param)
        return image_source(made.features, made.shape, made.num_positions)
    pixels = await decoded(images.prepare(data, processing), param)
    return image_source(pixels, shape, num_positions)


async def decoded(work: Awaitable[T], param: str) -> T:
    """Return the result of decoding the file that is the field `param`; raises a 400 that names it, or a 503."""
    try:
        return await work
    except WorkerError as error:
        raise unavailable(f"no process is free to decode images: {error}; try again", "image_busy", 2) from None
    except ImageError as error:
        raise invalid(f"{param}: {error}", param, BAD_IMAGE) from None
