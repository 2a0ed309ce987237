"""Image files as requests send them: base64 or a data URL. An address is never followed."""

from __future__ import annotations

import base64
from collections.abc import Awaitable
from typing import TypeVar

from triptych.model.api.request import Source, image_source
from triptych.model.vision.decoding import ImageError
from triptych.model.vision.pictures import PictureProcessing
from triptych.model.vision.processing import ImageProcessing
from triptych.service.core.errors import ApiError, invalid, shorten, unavailable
from triptych.service.images.image_pool import RequestImages
from triptych.service.sandbox.process_pool import WorkerError

T = TypeVar("T")

_SCHEME = 32  # characters in which an address has its scheme
_ESCAPED = {"%2B": "+", "%2F": "/", "%3D": "="}  # in URLs; decoding all escapes takes 0.1 s of a body of 2 MB
_SPACES = {ord(one): None for one in " \t\r\n"}  # programs break lines of base64


def file_bytes(value: str, param: str) -> bytes:
    """Return the bytes of an image in base64 or a data URL; raises a 400 that names `param`."""
    if value[:1].isspace():
        value = value.lstrip()
    head, separator, data = value.partition(",") if value[:5].lower() == "data:" else ("", ",", value)
    if head and not (separator and head.lower().endswith(";base64")):
        raise _refused(f"{param}: a data URL must have the form data:image/png;base64,DATA", param)
    if head and "%" in data:
        for code, one in _ESCAPED.items():
            data = data.replace(code, one).replace(code.lower(), one)
    if "://" in value[:_SCHEME]:
        found = shorten(value[:80])
        raise _refused(f"{param}: the service follows no addresses, found {found}; send the file in base64", param)
    try:
        return base64.b64decode(data.translate(_SPACES), validate=True)
    except ValueError:
        raise _refused(f"{param} is not base64", param) from None


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
    data = file_bytes(value, param)
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
        raise _refused(f"{param}: {error}", param) from None


def _refused(message: str, param: str) -> ApiError:
    return invalid(message, param, "invalid_image")
