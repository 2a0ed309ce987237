"""Image files to what a vision model reads, as the checkpoint's preprocessor_config.json says.

Decoding is bounded: format, pixel count and frames are looked at in the header before anything is decoded. `prepare`
needs Pillow and no torch (it runs beside HTTP); what it returns has 8 bits a channel, and `scale` and `shift` turn that
into normalised numbers where the model is.
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
    from PIL import Image  # loaded where an image is read: text models run without

_BILINEAR = 2  # as image files' library and preprocessor_config.json number it

FORMATS = ("JPEG", "PNG")
MAX_PIXELS = 32_000_000  # of the file as it comes; decoded it takes three to four bytes each


class ImageError(ValueError):
    """An image file that is not taken; the message says why."""


@dataclass(frozen=True, slots=True)
class ImageProcessing:
    """Resize, then cut the middle, then `(pixel * rescale - mean) / std` by channel."""

    size: int  # pixels a side of what the model reads
    resize: tuple[int, int] | None  # height, width; None: as it comes
    shortest_edge: int | None  # resize so that the shorter side is this, instead
    resample: int  # Pillow's number of the filter
    crop: bool  # cut the middle of `size` a side
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
        """RGB pixels, channel by channel, of an image file; raises `ImageError`."""
        from PIL import Image

        image = decode(data)
        if self.resize is not None:
            image = image.resize(self.resize[::-1], Image.Resampling(self.resample))
        elif self.shortest_edge is not None:
            width, height = _scaled(image.size, self.shortest_edge)
            if width * height > MAX_PIXELS:  # a line of pixels becomes a strip
                raise ImageError(f"the image has {image.width} x {image.height} pixels, which is too long and thin")
            image = image.resize((width, height), Image.Resampling(self.resample))
        if self.crop:
            image = _middle(image, self.size)
        if image.size != (self.size, self.size):
            raise ImageError(
                f"the image has {image.width} x {image.height} pixels, the model reads {self.size} squared"
            )
        return np.asarray(image, dtype=np.uint8).transpose(2, 0, 1).tobytes()


def decode(data: bytes) -> Image.Image:
    """An RGB image of a JPEG or PNG file of one frame and at most `MAX_PIXELS`."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the bound is ours
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise ImageError(
                    f"the image has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,} are not taken"
                )
            # A camera's JPEG may carry further pictures behind its own, which are no animation.
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


def processing(raw: Mapping[str, Any], image: ImageConfig) -> ImageProcessing:
    """What preprocessor_config.json asks for; ViT's own defaults where it is silent."""
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
    """Height and width of a size as preprocessor_config.json writes it; None where it names the shorter side."""
    if isinstance(size, Mapping):
        return (size["height"], size["width"]) if "height" in size else None
    if isinstance(size, (list, tuple)):
        return size[0], size[1]
    return size, size


def _scaled(size: tuple[int, int], shortest: int) -> tuple[int, int]:
    """`size` in proportion, its shorter side being `shortest`; the longer one is cut to whole pixels."""
    width, height = size
    if width <= height:
        return shortest, int(shortest * height / width)
    return int(shortest * width / height), shortest


def _middle(image: Image.Image, size: int) -> Image.Image:
    """The middle of the image; what lies outside of it is black."""
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))
