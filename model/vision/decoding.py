"""Decodes image files of strangers within bounds: format and pixels are checked in the header, before any is decoded.

The service runs this in a sandbox (`triptych.service.images.image_main`). It needs Pillow, no torch.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from PIL import Image  # imported where an image is read: text models do not need it

T = TypeVar("T")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
MAX_PIXELS = 32_000_000  # of the file; decoded they take three to four bytes each
_MAX_SCANS = 100  # of a JPEG; each pass over the pixels takes a few bytes, and files of cameras have ten
_SCAN = b"\xff\xda"


class ImageError(ValueError):
    """An image file was refused; the message says why."""


def num_pixels(data: bytes) -> int:
    """Return how many pixels a file has by its header; raises `ImageError` as `decode`."""
    return _opened(data, lambda image: image.width * image.height)


def decode(data: bytes) -> Image.Image:
    """Decode the first frame of a file to RGB, turned as its EXIF orientation says; raises `ImageError`.

    This is what `transformers.image_utils.load_image` makes of the file. Transparency is dropped.
    """
    return _opened(data, _as_rgb)


def _as_rgb(image: Image.Image) -> Image.Image:
    from PIL import ImageOps

    ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "RGB":  # converting would copy it
        image.load()
        return image
    return image.convert("RGB")


def _opened(data: bytes, use: Callable[[Image.Image], T]) -> T:
    """Return what `use` makes of a file whose header was read and checked."""
    from PIL import Image, UnidentifiedImageError

    if data[:2] == b"\xff\xd8" and (scans := data.count(_SCAN)) > _MAX_SCANS:
        raise ImageError(f"the JPEG file has {scans:,} scans, more than {_MAX_SCANS} are not taken")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strange files, whose pixels are checked against MAX_PIXELS
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise ImageError(
                    f"the image has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,} are not taken"
                )
            return use(image)
    except Image.DecompressionBombError:
        raise ImageError(f"the image has more than {MAX_PIXELS:,} pixels, which are not taken") from None
    except UnidentifiedImageError:
        raise ImageError(f"not an image file of {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from None
    except (OSError, SyntaxError, ValueError, KeyError, IndexError, TypeError, OverflowError, EOFError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError("the image file is broken") from None
