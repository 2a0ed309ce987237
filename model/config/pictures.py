"""How a decoder reads pictures, as data: patches, a stack of layers over them, and the merger after it.

A picture is a `Source` of pixels. Its rows come out of the tower and the merger, and take the place of the vectors of
the prompt's image tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from triptych.model.config.attention import NormConfig
from triptych.model.config.bounds import require_positive
from triptych.model.config.layer import Activation
from triptych.model.config.stack import StackConfig
from triptych.model.errors import ConfigError


class GridPositions(StrEnum):
    """Which vector of a learned table is added to a patch; the table has `grid` rows and as many columns."""

    RESAMPLED = "resampled"  # bilinearly, the table's corners at the picture's (Qwen)
    FIXED = "fixed"  # pictures have as many rows and columns as the table (CLIP, SigLIP)
    NEAREST = "nearest"  # that of the table's part in which the patch begins (Idefics 3)
    SUMMED = "summed"  # that of its column and that of its row, of a table of `grid` of either (Gemma 4)


@dataclass(frozen=True, slots=True)
class PatchConfig:
    """A picture of any size as a sequence of square patches, each multiplied with one matrix.

    `merge` patches a side make a block. The patches of a block follow each other, and the merger makes one row of them.
    """

    size: int  # pixels a side
    merge: int = 1
    channels: int = 3
    frames: int = 1  # a picture counts as this number of equal frames of a film, read by one product (Qwen)
    bias: bool = True
    grid: int | None = None  # positions a side of a learned table; None: there is none
    positions: GridPositions = GridPositions.RESAMPLED
    first: bool = False  # a learned vector goes before the patches, with the table's first position (CLIP)
    channels_last: bool = False  # a patch has all channels of a pixel, then the next pixel's (Gemma 4)
    centred: bool = False  # what pixels are after their normalisation, from 0 to 1, is read as -1 to 1 (Gemma 4)

    def __post_init__(self) -> None:
        require_positive(size=self.size, merge=self.merge, channels=self.channels, frames=self.frames)

    @property
    def elements(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.frames * self.size**2

    @property
    def table_rows(self) -> int:
        """Vectors of the learned table."""
        grid = self.grid or 0
        return 2 * grid if self.positions is GridPositions.SUMMED else grid**2 + self.first

    @property
    def cell(self) -> int:
        """Pixels a side of a block."""
        return self.size * self.merge

    def rows_and_columns(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the rows and columns of blocks of a picture of `shape` (channels, height, width)."""
        return shape[1] // self.cell, shape[2] // self.cell


@dataclass(frozen=True, slots=True)
class MergerConfig:
    """The rows of a block become one: `out(act(inner([norm(x_1); ...; norm(x_n)])))`.

    What stands before the patches is left out.
    """

    norm: NormConfig | None
    activation: Activation = Activation.GELU
    inner: int = 0  # width between the two products; 0: there is one product alone, without an activation
    norm_last: bool = False  # over the joined rows, not over each
    bias: bool = True  # of the products
    mean: bool = False  # the rows of a block are not joined, their mean is taken (Gemma 3)
    factor: float = 1.0  # of means
    standardised: bool = False  # means are then (x - bias) * scale, both learned (Gemma 4)
    folds: bool = False  # joined rows come down to the tower's width first, by a matrix without a bias (Mistral 3)


@dataclass(frozen=True, slots=True)
class PicturesConfig:
    """The pictures of a decoder."""

    token_id: int  # of each place that a row of a picture takes
    patches: PatchConfig
    tower: StackConfig
    merger: MergerConfig
    both_ways: bool = False  # the tokens of one picture see each other both ways (Gemma 3)
    in_windows: bool = False  # they do so in layers with windows alone (Gemma 4)
    layer_token: int | None = None  # the token whose vectors for every layer the rows of a picture get (Gemma 4)
    window: int | None = None  # blocks a side of the windows that `windowed` layers see (Qwen2.5-VL)
    # Layers of the tower whose outputs are merged too, each by its own matrices, and added to a picture's rows after
    # the decoder's first layers, one after each (Meng et al. 2024: DeepStack).
    deep: tuple[int, ...] = ()
    deep_merger: MergerConfig | None = None

    def __post_init__(self) -> None:
        if self.patches.channels != 3:
            raise ConfigError(f"pictures of 3 channels are read, found {self.patches.channels}")
        if self.tower.causal:
            raise ConfigError("the patches of a picture see each other both ways")
        if any(attention.windowed for attention in self.tower.attentions) != (self.window is not None):
            raise ConfigError("layers that see windows of a picture need their size")
        if bool(self.deep) != (self.deep_merger is not None) or any(
            not 0 <= at < len(self.tower.layers) for at in self.deep
        ):
            raise ConfigError(f"outputs of layers {list(self.deep)} are merged, of {len(self.tower.layers)} layers")
