"""Pictures of a prompt: an image file to the patches that a tower reads, and the text that stands for them.

A tower reads patches in blocks of `merge` x `merge`, and each block becomes one position of the prompt. The service
runs `prepare_picture` in a process of its own, as `prepare` of `triptych.model.vision.processing`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from triptych.model.api.request import ImageSpan, Source, image_source, sent_once
from triptych.model.config.model import ImageConfig
from triptych.model.errors import ConfigError, listed
from triptych.model.vision.decoding import MAX_PIXELS, ImageError, decode
from triptych.model.vision.processing import (
    LONGEST_SIDE,
    ImageProcessing,
    prepared_size,
    processor_class,
    read_image_processing,
    with_defaults,
)

if TYPE_CHECKING:
    from PIL import Image  # imported where an image is read: text models do not need it

_MOST_RATIO = 200  # of the longer side to the shorter, of `Way.AREA`
_LONGEST_TILED = 4_096  # pixels of the longer side, of `Way.TILES`
MOST_ROWS = 4_096  # positions of a picture, or of a tile
_BUDGETS = (70, 140, 280, 560, 1_120)  # positions that `Way.BUDGET` may have
_STEP, _LARGEST = 1e-5, 100.0  # of the factors among which `Way.PATCHES` searches
_LOW = 512  # pixels a side that the detail "low" leaves


class Way(StrEnum):
    """How a picture gets its size."""

    SQUARE = "square"  # one size for all (CLIP, SigLIP)
    AREA = "area"  # its own proportions, between two numbers of pixels (Qwen)
    LONGEST = "longest"  # its own proportions, up to a longest side (Pixtral)
    BUDGET = "budget"  # its own proportions, as large as a number of positions allows (Gemma 4)
    PATCHES = "patches"  # its own proportions, as large as a number of patches allows, rounded up (SigLIP 2)
    TILES = "tiles"  # squares of one size, then the whole as one more (Idefics 3)


_CLASSES = {
    **dict.fromkeys(("CLIP", "Siglip", "Llava", "Gemma3", "ViT", "Bit", "DeiT"), Way.SQUARE),
    **{
        "Gemma4": Way.BUDGET,
        "Siglip2": Way.PATCHES,
        "Qwen2VL": Way.AREA,
        "Pixtral": Way.LONGEST,
        "Idefics3": Way.TILES,
        "SmolVLM": Way.TILES,
    },
}


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """A picture as its tower reads it: one part, or each tile and then the whole."""

    features: bytes  # of all parts, one after the other: 8 bits a channel, row-major
    shape: tuple[int, int, int]  # of a part: channels, height, width
    num_positions: int  # of the prompt, for a part
    row_length: int = 0  # positions after which a token ends the row; 0: no token does
    tiles: tuple[int, int] = (0, 0)  # rows and columns of tiles before the whole

    @property
    def parts(self) -> list[bytes]:
        """The features of each part."""
        size = math.prod(self.shape)
        return [self.features[start : start + size] for start in range(0, len(self.features), size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureProcessing(ImageProcessing):
    """How the pictures of one model are resized and cut, and what stands for them in a prompt.

    `least` and `most` are pixels (`AREA`), those of the longest side (`LONGEST`, `TILES`), or positions (`BUDGET`,
    `PATCHES`).
    """

    way: Way
    patch: int  # pixels a side
    merge: int  # patches a side that become one position
    most: int = 0
    least: int = 0
    tile: int = 0  # pixels a side of a tile
    splits: bool = False  # pictures are cut into tiles
    mark: str  # what a chat template writes for a picture
    token: str  # what stands at each position of it
    before: str = ""
    after: str = ""
    row_end: str = ""  # after each row of positions but the last

    def prepare_picture(self, data: bytes, detail: str = "auto") -> PreparedPicture:
        """Return the pixels of an image file, fewer of them for the detail "low"; raises `ImageError`."""
        made = self._low() if detail == "low" else self
        images, tiles = made._images(decode(data))
        side = self.patch * self.merge
        height, width = (length // side * side for length in (images[0].height, images[0].width))
        parts = [np.asarray(image, dtype=np.uint8)[:height, :width].transpose(2, 0, 1) for image in images]
        return PreparedPicture(
            features=b"".join(part.tobytes() for part in parts),
            shape=(3, height, width),
            num_positions=height * width // side**2,
            row_length=width // side if self.row_end else 0,
            tiles=tiles,
        )

    def placeholder(self, prepared: PreparedPicture) -> str:
        """Return the text that a prompt has for a picture; each `token` in it is one position."""
        whole, row = self.token * prepared.num_positions, prepared.row_length
        if row:
            whole = self.row_end.join([self.token * row] * (prepared.num_positions // row))
        rows, columns = prepared.tiles
        lines = [
            "".join(f"{self.after}<row_{row + 1}_col_{column + 1}>{whole}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join(lines) + ("\n" if lines else "") + self.before + whole + self.after

    @property
    def most_rows(self) -> int:
        """Positions of a prompt that a part of a picture takes at most."""
        side = self.patch * self.merge
        sides = {Way.SQUARE: self.size, Way.TILES: self.tile, Way.LONGEST: self.most + side - 1}
        if self.way in sides:
            return (sides[self.way] // side) ** 2
        return self.most if self.way in (Way.BUDGET, Way.PATCHES) else self.most // side**2

    def bounded(self) -> PictureProcessing:
        """Return the processing that makes no more than `MOST_ROWS` of a picture, whose memory has to be there."""
        side = self.patch * self.merge
        bounds = {Way.AREA: MOST_ROWS * side**2, Way.LONGEST: math.isqrt(MOST_ROWS) * side, Way.BUDGET: MOST_ROWS}
        most = min(self.most, bounds.get(self.way, self.most))
        return replace(self, most=most, least=min(self.least, most))

    def _low(self) -> PictureProcessing:
        """Return the processing of pictures that are to take few positions."""
        most = {Way.AREA: _LOW**2, Way.LONGEST: _LOW, Way.BUDGET: _BUDGETS[0]}.get(self.way)
        most = self.most if most is None else min(self.most, most)
        least = min(self.least, most) if self.way == Way.AREA else self.least
        return replace(self, most=most, least=least, splits=False)

    def _images(self, image: Image.Image) -> tuple[list[Image.Image], tuple[int, int]]:
        """Return what the tower reads, resized: the picture or its tiles, with the rows and columns of tiles."""
        if self.way == Way.TILES:
            return self._tiled(image)
        ways = {Way.AREA: self._by_area, Way.LONGEST: self._by_longest}
        sides = (ways | {Way.BUDGET: self._by_budget, Way.PATCHES: self._by_patches}).get(self.way)
        return [self.resized(image) if sides is None else self._at(image, *sides(image.width, image.height))], (0, 0)

    def _at(self, image: Image.Image, width: int, height: int) -> Image.Image:
        from PIL import Image

        if not 0 < width * height <= MAX_PIXELS:
            raise ImageError(f"the image has {image.width} x {image.height} pixels, which is too long and thin")
        return image.resize((width, height), Image.Resampling(self.resample))

    def _by_area(self, width: int, height: int) -> tuple[int, int]:
        """Multiples of a block's side, with the picture's proportions and a number of pixels within the bounds."""
        if max(width, height) > _MOST_RATIO * min(width, height):
            raise ImageError(
                f"the image has {width} x {height} pixels; a side may be {_MOST_RATIO} times as long as the other"
            )
        side = self.patch * self.merge
        new = round(width / side) * side, round(height / side) * side
        if new[0] * new[1] > self.most:
            factor = math.sqrt((height * width) / self.most)
            return max(side, math.floor(width / factor / side) * side), max(
                side, math.floor(height / factor / side) * side
            )
        if new[0] * new[1] < self.least:
            factor = math.sqrt(self.least / (height * width))
            return math.ceil(width * factor / side) * side, math.ceil(height * factor / side) * side
        return new

    def _by_budget(self, width: int, height: int) -> tuple[int, int]:
        """Multiples of a block's side, with the picture's proportions and as many blocks as there may be positions."""
        side = self.patch * self.merge
        factor = math.sqrt(self.most * side**2 / (height * width))
        columns, rows = math.floor(factor * width / side), math.floor(factor * height / side)
        if not rows:
            rows, columns = 1, min(width // height, self.most)
        elif not columns:
            columns, rows = 1, min(height // width, self.most)
        return columns * side, rows * side

    def _by_patches(self, width: int, height: int) -> tuple[int, int]:
        """Return the largest sides, rounded up to a patch's, with no more patches than allowed; searched by halving."""

        def scaled(scale: float, length: int) -> int:
            return max(self.patch, math.ceil(length * scale / self.patch) * self.patch)

        low, high = _STEP / 10, _LARGEST
        while high - low >= _STEP:
            middle = (low + high) / 2
            patches = scaled(middle, height) // self.patch * (scaled(middle, width) // self.patch)
            low, high = (middle, high) if patches <= self.most else (low, middle)
        return scaled(low, width), scaled(low, height)

    def _by_longest(self, width: int, height: int) -> tuple[int, int]:
        """Return the picture's sides, or less, rounded up to a block's."""
        ratio = max(height / self.most, width / self.most)
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        side = self.patch * self.merge
        return ((width - 1) // side + 1) * side, ((height - 1) // side + 1) * side

    def _tiled(self, image: Image.Image) -> tuple[list[Image.Image], tuple[int, int]]:
        """Return the tiles of a picture by rows, then the whole as one more; a small one is the whole alone."""
        tile = self.tile
        image = self._at(image, *self._longest(*image.size))
        if not self.splits:
            return [self._at(image, tile, tile)], (0, 0)
        width, height, aspect = image.width, image.height, image.width / image.height
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / aspect) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * aspect) / tile) * tile
        image = self._at(image, width, height)
        rows, columns = height // tile, width // tile
        if rows * columns == 1:
            return [image], (0, 0)
        corners = [(column * tile, row * tile) for row in range(rows) for column in range(columns)]
        cut = [image.crop((left, top, left + tile, top + tile)) for left, top in corners]
        return [*cut, self._at(image, tile, tile)], (rows, columns)

    def _longest(self, width: int, height: int) -> tuple[int, int]:
        """Return the sides at the longest side, in proportion, the other one even; if that is too long, reduced."""
        aspect, most = width / height, self.most
        if width >= height:
            width, height = most, int(most / aspect)
            height = max(1, height + height % 2)
        else:
            width, height = int(most * aspect), most
            width = max(1, width + width % 2)
        aspect = width / height
        if max(width, height) <= _LONGEST_TILED:
            return width, height
        if width >= height:
            return _LONGEST_TILED, max(1, int(_LONGEST_TILED / aspect))
        return max(1, int(_LONGEST_TILED * aspect)), _LONGEST_TILED


_SPELLED = {
    **{"image_token": "<image>", "boi_token": "<|image>", "eoi_token": "<image|>"},
    **{"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    **{"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"},
}
_TILED = dict(
    token="{image_token}",
    mark="{image_token}",
    before="{fake_image_token}{global_image_token}",
    after="{fake_image_token}",
)
# What stands for a picture, and the default spelling of its tokens, by the class that prepares it.
_TEXTS: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "": (dict(token="{image_token}", mark="{image_token}"), {}),
    "Qwen2VL": (dict(token="{image_token}", mark="{image_token}"), {"image_token": "<|image_pad|>"}),
    "Gemma3": (
        dict(token="{image_token}", mark="{boi_token}", before="\n\n{boi_token}", after="{eoi_token}\n\n"),
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "Gemma4": (
        dict(token="{image_token}", mark="{image_token}", before="{boi_token}", after="{eoi_token}"),
        {"image_token": "<|image|>"},
    ),
    "Pixtral": (
        dict(token="{image_token}", mark="{image_token}", row_end="{image_break_token}", after="{image_end_token}"),
        {"image_token": "[IMG]"},
    ),
    "Idefics3": (_TILED, {}),
    "SmolVLM": (_TILED, {}),
}
MARKS = tuple(_SPELLED)  # the names of the tokens that a folder may spell in its own way


def picture_processing(
    raw: Mapping[str, Any], model_type: str, patch: int, merge: int, spelled: Mapping[str, str], where: str
) -> PictureProcessing:
    """Read how a folder prepares pictures; raises `ConfigError`.

    `raw` are the settings of its image processor, read from `where`. `patch` and `merge` are those of the model, and
    `spelled` the tokens of `MARKS` that the folder names.
    """
    kind, settings = processor_class(raw, model_type), with_defaults(raw, model_type)
    way = _CLASSES.get(kind)
    if way is None:
        raise ConfigError(f"{where}: pictures of the class {kind or None}ImageProcessor are not served")
    texts, defaults = _TEXTS.get(kind) or _TEXTS.get(processor_class({}, model_type), _TEXTS[""])
    tokens = {**_SPELLED, **defaults, **spelled}
    written: dict[str, Any] = {key: text.format(**tokens) for key, text in texts.items()}
    if way is Way.SQUARE:
        if kind == "Gemma3":  # whose class does not crop, whatever its file says
            settings["do_center_crop"] = False
        if settings.get("do_pad"):
            raise ConfigError(f"{where}: do_pad = true is not served for pictures of one size")
        size = prepared_size(settings, where)
        if size is None:
            raise ConfigError(f"{where}: pictures must be cropped or resized to squares of one size")
        _check_rows(size, patch * merge, where)
        base = read_image_processing(settings, ImageConfig(size, min(patch, size)), where)
        return PictureProcessing(**asdict(base), way=way, patch=patch, merge=merge, **written)
    for key in ("do_resize", "do_rescale"):
        if not settings.get(key, True):
            raise ConfigError(f"{where}: {key} = false is not served for pictures of any size")
    if settings.get("do_center_crop"):
        raise ConfigError(f"{where}: do_center_crop = true is not served for pictures of any size")
    _check_patches(settings, way, patch, merge, where)
    base = read_image_processing({**settings, "do_resize": False}, ImageConfig(patch, patch), where)
    bounds = _bounds(way, settings, patch * merge, merge, where)
    return PictureProcessing(**asdict(base), way=way, patch=patch, merge=merge, **bounds, **written)


def _check_patches(settings: Mapping[str, Any], way: Way, patch: int, merge: int, where: str) -> None:
    """Raise `ConfigError` for patches of another size than the model's, where the settings have one."""
    found = settings.get("patch_size", patch)
    if isinstance(found, Mapping):
        found = found.get("height")
    if found != patch and not (way is Way.LONGEST and found == patch * merge):  # Pixtral's files may have a block's
        raise ConfigError(f"{where}: patch_size is {found}, config.json has {patch}")
    for key in ("merge_size", "pooling_kernel_size"):
        if settings.get(key, merge) != merge:
            raise ConfigError(f"{where}: {key} is {settings[key]}, config.json has {merge}")


def _bounds(way: Way, settings: Mapping[str, Any], side: int, merge: int, where: str) -> dict[str, Any]:
    """Return the fields that bound the size of pictures which keep their proportions."""
    if way is Way.BUDGET:
        if (most := settings.get("max_soft_tokens")) not in _BUDGETS:
            counts = listed(map(str, _BUDGETS))
            raise ConfigError(f"{where}: max_soft_tokens must be one of {counts}, found {most!r}"[:300])
        return {"most": most}
    if way is Way.PATCHES:
        return {"most": _number(settings, "max_num_patches", MOST_ROWS, where)}
    size = settings.get("size")
    size = dict(size) if isinstance(size, Mapping) else {}
    if way is Way.AREA:
        size |= {key: settings[old] for key, old in _OLDER.items() if old in settings}
        least, most = (_number(size, key, MAX_PIXELS, f"{where}: size") for key in _OLDER)
        if most < side**2:
            raise ConfigError(f"{where}: size.longest_edge must be {side**2} pixels or more, found {most}")
        return {"least": least, "most": most}
    most = _number(size, "longest_edge", LONGEST_SIDE, f"{where}: size")
    if way is Way.LONGEST:
        return {"most": most}
    tile = _number(settings.get("max_image_size"), "longest_edge", LONGEST_SIDE, f"{where}: max_image_size")
    _check_rows(tile, side, where)
    if tile % side:
        raise ConfigError(f"{where}: max_image_size must be a multiple of {side}, found {tile}")
    return {"most": most, "tile": tile, "splits": bool(settings.get("do_image_splitting", True))}


def _check_rows(size: int, side: int, where: str) -> None:
    """Raise `ConfigError` for pictures or tiles of a size that takes more memory than is planned."""
    if (size // side) ** 2 > MOST_ROWS:
        raise ConfigError(f"{where}: {size} pixels a side are more than {math.isqrt(MOST_ROWS)} x {side}")


_OLDER = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}


def _number(values: Any, key: str, most: int, where: str) -> int:
    found = values.get(key) if isinstance(values, Mapping) else values
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found <= most:
        raise ConfigError(f"{where}: {key} must be a number from 1 to {most:,}, found {found!r}"[:300])
    return found


def image_spans(token_ids: Sequence[int], token_id: int, pictures: Sequence[PreparedPicture]) -> tuple[ImageSpan, ...]:
    """Return where each part of the pictures stands in a prompt, whose places for them have the id `token_id`.

    Of equal pictures only the first has its pixels. Raises `ValueError` where the prompt has another number of places.
    """
    spans: list[ImageSpan] = []
    sources: dict[int, list[Source]] = {}  # of each picture
    places = [place for place, token in enumerate(token_ids) if token == token_id]
    first = 0
    for picture in pictures:
        if id(picture) not in sources:
            parts = picture.parts
            sources[id(picture)] = [image_source(part, picture.shape, picture.num_positions) for part in parts]
        for source in sources[id(picture)]:
            if first + picture.num_positions > len(places):
                raise ValueError(f"the prompt has {len(places)} places for pictures, which need more")
            spans.append(ImageSpan(places[first], source, picture.row_length))
            first += picture.num_positions
    if first != len(places):
        raise ValueError(f"the prompt has {len(places)} places for pictures, which need {first}")
    return sent_once(spans)
