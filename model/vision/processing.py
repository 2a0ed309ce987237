"""Image preprocessing for vision models, as the checkpoint's preprocessor_config.json describes it.

The service runs `prepare` in a process of its own (`triptych.service.images.image_main`); it needs Pillow, no torch.
It returns 8 bits a channel; the engine normalises them on the model's device with `scale` and `shift`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from triptych.model.config.model import ImageConfig
from triptych.model.errors import ConfigError
from triptych.model.vision.decoding import MAX_PIXELS, ImageError, decode

if TYPE_CHECKING:
    from PIL import Image  # imported where an image is read: text models do not need it

_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3  # Pillow's numbers of the filters, also in preprocessor_config.json

_OPENAI_MEAN, _OPENAI_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_OPENAI = {"resample": _BICUBIC, "image_mean": _OPENAI_MEAN, "image_std": _OPENAI_STD, "default_to_square": False}
# What a class of processor has for fields that its file lacks, where that is not ViT's.
_CLASSES: dict[str, Mapping[str, Any]] = {
    "CLIP": {**_OPENAI, "size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": 224},
    "Bit": {**_OPENAI, "size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": 224},
    "DeiT": {"resample": _BICUBIC, "size": 256, "do_center_crop": True, "crop_size": 224},
    "Siglip": {"resample": _BICUBIC, "size": {"height": 224, "width": 224}, "default_to_square": False},
    "Llava": {**_OPENAI, "size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": 224},
    "Gemma3": {"size": {"height": 224, "width": 224}},
    "Siglip2": {"max_num_patches": 256},
    "Gemma4": {
        **{"resample": _BICUBIC, "do_normalize": False, "image_mean": [0.0] * 3, "image_std": [1.0] * 3},
        "max_soft_tokens": 280,
    },
    "Qwen2VL": {**_OPENAI, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},
    "Pixtral": {**_OPENAI, "size": {"longest_edge": 1024}},
    "Idefics3": {"resample": _LANCZOS, "size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
}
_CLASSES["SmolVLM"] = _CLASSES["Idefics3"]
# The class of a model type, where a file names none.
_TYPES = {
    **{
        "clip": "CLIP",
        "siglip": "Siglip",
        "siglip2": "Siglip2",
        "llava": "CLIP",
        "gemma3": "Gemma3",
        "gemma4": "Gemma4",
    },
    **{"mistral3": "Pixtral", "idefics3": "Idefics3", "smolvlm": "SmolVLM"},
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "Qwen2VL"),
}
LONGEST_SIDE = 16_384  # pixels that a processor may resize a side to


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
        return np.asarray(self.resized(decode(data)), dtype=np.uint8).transpose(2, 0, 1).tobytes()

    def resized(self, image: Image.Image) -> Image.Image:
        """Return an image as a square of `size`; raises `ImageError`."""
        from PIL import Image

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
        return image


def processor_class(raw: Mapping[str, Any], model_type: str) -> str:
    """Return the name of the class that prepares images, without what follows it (`CLIP`); "" where nothing says it."""
    name = str(raw.get("image_processor_type") or raw.get("feature_extractor_type") or "")
    return re.sub("(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", name) or _TYPES.get(model_type, "")


def unknown_class(raw: Mapping[str, Any], model_type: str) -> str:
    """Return the name of a class that prepares images in a way that is not known; "" for one that is."""
    name = processor_class(raw, model_type)
    return "" if name in ("", "ViT", *_CLASSES) else name


def with_defaults(raw: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return a processor's settings with the defaults of the class that the file names, or of the model's type.

    A single number is the shorter edge for the classes that keep proportions (CLIP's older files). A null is the
    default, but of what is done or not: it is not.
    """
    kind = processor_class(raw, model_type)
    written = {key: value for key, value in raw.items() if value is not None or key.startswith("do_")}
    found = {**_CLASSES.get(kind, {}), **written}
    size = found.get("size")
    if isinstance(size, int) and not isinstance(size, bool) and found.get("default_to_square") is False:
        found["size"] = {"shortest_edge": size}
    return found


def prepared_size(raw: Mapping[str, Any], where: str) -> int | None:
    """Return the pixels a side that an image processor makes; None: it keeps proportions, or does not say."""
    crops = raw.get("do_center_crop", False)
    size = raw.get("crop_size") if crops else raw.get("size") if raw.get("do_resize", True) else None
    if size is None or (isinstance(size, Mapping) and "shortest_edge" in size):
        return None
    height, width = _sides(size, f"{where}: {'crop_size' if crops else 'size'}")
    return height if height == width else None


def read_image_processing(
    raw: Mapping[str, Any], image: ImageConfig, where: str = "preprocessor_config.json"
) -> ImageProcessing:
    """Read an image processor's settings, with ViT's defaults for missing fields; raises `ConfigError`.

    `where` is the place that they were read from.
    """
    crop = bool(raw.get("do_center_crop", False))
    crop_size = raw.get("crop_size", image.size)
    if crop and _sides(crop_size, f"{where}: crop_size") != (image.size, image.size):
        raise ConfigError(f"{where}: crop_size must be {image.size}, found {crop_size}")
    size = raw.get("size", image.size) if raw.get("do_resize", True) else None
    shortest = size.get("shortest_edge") if isinstance(size, Mapping) else None
    others = ("longest_edge", "height", "width")
    if isinstance(size, Mapping) and shortest is not None and any(size.get(key) is not None for key in others):
        raise ConfigError(f"{where}: size must have shortest_edge alone, or height and width, found {size!r}"[:300])
    mean, std = (_channels(raw, name, image.channels, where) for name in ("image_mean", "image_std"))
    if not raw.get("do_normalize", True):
        mean, std = (0.0,) * image.channels, (1.0,) * image.channels
    if image.channels != 3 or len(mean) != 3 or len(std) != 3:
        found = f"num_channels = {image.channels}, {len(mean)} in image_mean and {len(std)} in image_std"
        raise ConfigError(f"images of three channels are served, found {found}")
    resample, rescale = raw.get("resample", _BILINEAR), raw.get("rescale_factor", 1 / 255)
    if not isinstance(resample, int) or isinstance(resample, bool) or not 0 <= resample <= 5:
        raise ConfigError(f"{where}: resample must be the number of a filter of Pillow, 0 to 5, found {resample!r}")
    if not _is_number(rescale):
        raise ConfigError(f"{where}: rescale_factor must be a number, found {rescale!r}")
    return ImageProcessing(
        size=image.size,
        resize=None if size is None or shortest is not None else _sides(size, f"{where}: size"),
        shortest_edge=None if shortest is None else _side(shortest, f"{where}: size.shortest_edge"),
        resample=resample,
        crop=crop,
        rescale=rescale if raw.get("do_rescale", True) else 1.0,
        mean=mean,
        std=std,
    )


def _channels(raw: Mapping[str, Any], name: str, count: int, where: str) -> tuple[float, ...]:
    """Return a field of one number for each channel, or one for all of them."""
    value = raw.get(name, 0.5)
    values = [value] * count if _is_number(value) else value
    if not isinstance(values, list) or not all(map(_is_number, values)) or (name == "image_std" and 0 in values):
        raise ConfigError(f"{where}: {name} must be numbers, one for each channel, found {value!r}")
    return tuple(float(one) for one in values)


def _is_number(value: object) -> bool:
    """Whether it is a number that a picture can be computed with: NaN and infinities are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e30 < value < 1e30


def _side(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= LONGEST_SIDE:
        raise ConfigError(f"{where} must be a number of pixels from 1 to {LONGEST_SIDE}, found {value!r}")
    return value


def _sides(size: Any, where: str) -> tuple[int, int]:
    """Return the height and width of a size. Raises `ConfigError` for one that does not say both."""
    if isinstance(size, Mapping) and {"height", "width"} <= size.keys():
        size = [size["height"], size["width"]]
    if isinstance(size, list | tuple) and len(size) == 2:
        return _side(size[0], where), _side(size[1], where)
    if isinstance(size, Mapping | list | tuple):
        raise ConfigError(f"{where} must have height and width, or shortest_edge, found {size!r}"[:300])
    return _side(size, where), _side(size, where)


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
