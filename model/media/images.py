"""Image preprocessing for vision models, as the checkpoint's preprocessor_config.json describes it.

Decoding is bounded: format, pixel count and frame count are checked in the header before any pixel is decoded.
`prepare` runs in the front process and needs Pillow, no torch. It returns 8 bits a channel; the engine normalises them
on the model's device with `scale` and `shift`.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from model.config.model import ImageConfig
from model.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image  # imported where an image is read: text models do not need it

_BILINEAR = 2  # Pillow's number of the filter, also in preprocessor_config.json

FORMATS = ("JPEG", "PNG")
MAX_PIXELS = 32_000_000  # of the file; decoded they take three to four bytes each


class ImageError(ValueError):
    """An image file was refused; the message says why."""


@dataclass(frozen=True, slots=True)
class ImageProcessing:
    """Resizing, a centre crop, then `(pixel * rescale - mean) / std` for each channel."""

    size: int  # pixels a side of the model's input
    resize: tuple[int, int] | None  # height, width; None: no resizing to a fixed size
    shortest_edge: int | None  # resize the shorter side to this, keeping the proportions
    resample: int  # Pillow's number of the filter
    crop: bool  # centre crop of `size` a side
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def scale(self) -> tuple[float, ...]:
        return tuple(self.rescale / std for std in self.std)

    @property
    def shift(self) -> tuple[float, ...]:
        return tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True))

    def prepare(self, data: bytes) -> bytes:
        """Return an image file's RGB pixels `[3, size, size]`, 8 bits each; raises `ImageError`."""
        from PIL import Image

        image = decode(data)
        if self.resize is not None:
            image = image.resize(self.resize[::-1], Image.Resampling(self.resample))
        elif self.shortest_edge is not None:
            width, height = _scale_shortest(image.size, self.shortest_edge)
            if width * height > MAX_PIXELS:  # resizing a very thin image upwards
                raise ImageError(f"the image has {image.width} x {image.height} pixels, which is too long and thin")
            image = image.resize((width, height), Image.Resampling(self.resample))
        if self.crop:
            image = _center_crop(image, self.size)
        if image.size != (self.size, self.size):
            raise ImageError(
                f"the image has {image.width} x {image.height} pixels, the model reads {self.size} squared"
            )
        return np.asarray(image, dtype=np.uint8).transpose(2, 0, 1).tobytes()


def decode(data: bytes) -> Image.Image:
    """Decode a JPEG or PNG file of one frame and at most `MAX_PIXELS` to RGB; raises `ImageError`."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # checked against MAX_PIXELS instead
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise ImageError(
                    f"the image has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,} are not taken"
                )
            # A camera's JPEG may contain further pictures (thumbnails), which are no animation.
            if image.format == "PNG" and getattr(image, "n_frames", 1) > 1:
                raise ImageError("an animated image is not taken")
            return image.convert("RGB")
    except Image.DecompressionBombError:
        raise ImageError(f"the image has more than {MAX_PIXELS:,} pixels, which are not taken") from None
    except UnidentifiedImageError:
        raise ImageError(f"not an image file of {' or '.join(FORMATS)}") from None
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError("the image file is broken") from None


def read_image_processing(raw: Mapping[str, Any], image: ImageConfig) -> ImageProcessing:
    """Read preprocessor_config.json, with ViT's defaults for missing fields; raises `ConfigError`."""
    size, crop_size = raw.get("size", image.size), raw.get("crop_size", image.size)
    crop = bool(raw.get("do_center_crop", False))
    if crop and _sides(crop_size) != (image.size, image.size):
        raise ConfigError(f"preprocessor_config.json: crop_size must be {image.size}, found {crop_size}")
    sides = _sides(size) if raw.get("do_resize", True) else None
    shortest = size.get("shortest_edge") if isinstance(size, Mapping) and raw.get("do_resize", True) else None
    mean, std = raw.get("image_mean", [0.5] * image.channels), raw.get("image_std", [0.5] * image.channels)
    if not raw.get("do_normalize", True):
        mean, std = [0.0] * image.channels, [1.0] * image.channels
    if image.channels != 3 or len(mean) != 3 or len(std) != 3:
        raise ConfigError("images of three channels are served, others are not")
    return ImageProcessing(
        size=image.size,
        resize=sides,
        shortest_edge=shortest,
        resample=raw.get("resample", _BILINEAR),
        crop=crop,
        rescale=raw.get("rescale_factor", 1 / 255) if raw.get("do_rescale", True) else 1.0,
        mean=tuple(mean),
        std=tuple(std),
    )


def _sides(size: Any) -> tuple[int, int] | None:
    """Return the height and width of a size in preprocessor_config.json; None if it gives only the shorter side."""
    if isinstance(size, Mapping):
        return (size["height"], size["width"]) if "height" in size else None
    if isinstance(size, (list, tuple)):
        return size[0], size[1]
    return size, size


def _scale_shortest(size: tuple[int, int], shortest: int) -> tuple[int, int]:
    """Scale `size` (width, height) so that its shorter side is `shortest`; the longer one is rounded down."""
    width, height = size
    if width <= height:
        return shortest, int(shortest * height / width)
    return int(shortest * width / height), shortest


def _center_crop(image: Image.Image, size: int) -> Image.Image:
    """Return the centre of `size` a side; pixels beyond the image are black."""
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))
