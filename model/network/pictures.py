"""A picture of any size to rows for a decoder: patches, the layers of a tower, and the merger."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from triptych.model.attention.base import AttentionBackend, AttentionMetadata
from triptych.model.config.pictures import GridPositions, MergerConfig, PatchConfig, PicturesConfig
from triptych.model.linear.base import Linear, LinearSpec, Part
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.activations import ACTIVATIONS
from triptych.model.network.adapters import RowAdapters
from triptych.model.network.inputs import packed_input
from triptych.model.network.norms import build_norm
from triptych.model.network.stack import Stack, StackPass
from triptych.model.system.devices import to_device


class Pictures(nn.Module):
    """What is before and after the layers of a tower. Each picture is computed alone; its bits depend on no other."""

    def __init__(self, config: PicturesConfig, width: int, linear: LinearFactory) -> None:
        """`width` is that of the decoder's rows."""
        super().__init__()
        self.config = config
        patches, size = config.patches, config.tower.hidden_size
        self.project = linear(LinearSpec("project", patches.elements, (Part(size),), patches.bias))
        self.first = nn.Parameter(torch.empty(size)) if patches.first else None
        self.table: nn.Parameter | None = None
        if patches.grid is not None:
            self.table = nn.Parameter(torch.empty(patches.table_rows, size))
        self.merger = Merger(config.merger, patches.merge**2, size, width, linear.within("merger"))
        self.deep = nn.ModuleList(
            Merger(config.deep_merger, patches.merge**2, size, width, linear.within(f"deep.{place}"))
            for place, _ in enumerate(config.deep)
            if config.deep_merger is not None
        )

    def begin(
        self, tower: Stack, pixels: Tensor, backend: AttentionBackend, adapters: RowAdapters | None = None
    ) -> PicturePass:
        """Begin with the normalised pixels `[C, H, W]` of a picture, whose sides are multiples of a block's."""
        patches = self.config.patches
        rows, columns = pixels.shape[1] // patches.size, pixels.shape[2] // patches.size
        pixels = 2 * (pixels - 0.5) if patches.centred else pixels
        places, x = patch_places(rows, columns, patches.merge), patch_rows(pixels, patches)  # [2, N], [N, P]
        order, lengths = None, None
        if self.config.window is not None:
            blocks = (rows // patches.merge, columns // patches.merge)
            order, lengths = windows(*blocks, self.config.window)
            places, x = (_in_order(one, order, patches.merge**2) for one in (places.T, x))
            places = places.T
        x = self.project(x)  # [N, d]
        first = [] if self.first is None else [self.first[None].to(x.dtype)]
        if self.table is not None:
            x = x + positions_of(self.table[len(first) :], patches, places, (rows, columns)).to(x.dtype)
            first = [one + self.table[:1].to(x.dtype) for one in first]
        x = torch.cat([*first, x]) if first else x
        inputs = packed_input([range(len(x))], x.device, causal=False)
        coordinates = None if first else to_device(places, x.device)
        inputs = replace(inputs, coordinates=coordinates, adapters=adapters)
        if lengths is not None:
            lens = tuple(length * patches.merge**2 for length in lengths)
            inputs = replace(inputs, other_pools=(AttentionMetadata(lens, lens, causal=False, device=x.device),))
        return PicturePass(self, StackPass(tower, x, inputs, backend), order)


@dataclass(slots=True)
class PicturePass:
    """A picture on its way through the tower; the way may be interrupted between two layers."""

    pictures: Pictures
    layers: StackPass
    order: Tensor | None  # which block of the picture each block is; None: they are in their places
    deep: list[Tensor] = field(default_factory=list)  # rows of layers before the last

    def advance(self, layers: int) -> None:
        """Compute the next `layers` layers, or all that are left."""
        read = self.pictures.config.deep
        while layers > 0 and len(self.deep) < len(read):
            now = min(layers, read[len(self.deep)] + 1 - self.layers.layers_done)
            self.layers.advance(now)
            layers -= now
            if self.layers.layers_done > read[len(self.deep)]:
                self.deep.append(self.pictures.deep[len(self.deep)](self.layers.hidden))
        if layers > 0:
            self.layers.advance(layers)

    def finish(self) -> Tensor:
        """Return the rows `[n, d]` that take the place of tokens' vectors.

        `[n, d (1 + L)]` where rows of L layers are added later, these after the first.
        """
        self.advance(self.layers.layers_left)
        skipped = int(self.pictures.config.patches.first)
        rows: Tensor = self.pictures.merger(self.layers.finish()[skipped:])
        rows = torch.cat([rows, *self.deep], dim=1) if self.deep else rows
        if self.order is None:
            return rows
        return torch.empty_like(rows).index_copy_(0, to_device(self.order, rows.device), rows)


class Merger(nn.Module):
    """`[N, d] -> [N / count, width]`: the rows of each block become one."""

    def __init__(self, config: MergerConfig, count: int, size: int, width: int, linear: LinearFactory) -> None:
        super().__init__()
        self.config, self.count = config, count
        joined = size if config.mean else count * size
        self.standard_bias, self.standard_scale = (
            nn.Parameter(torch.empty(size)) if config.standardised else None for _ in range(2)
        )
        self.norm = build_norm(config.norm, joined if config.norm_last else size)
        self.fold: Linear | None = None
        if config.folds:
            self.fold = linear(LinearSpec("fold", joined, (Part(size),), bias=False))
            joined = size
        self.inner: Linear | None = None
        if config.inner:
            self.inner = linear(LinearSpec("inner", joined, (Part(config.inner),), config.bias))
        self.out = linear(LinearSpec("out", config.inner or joined, (Part(width),), config.bias))

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        x = x.to(self.out.dtype)  # stacks in C give float32
        x = x if config.norm_last else self.norm(x)
        blocks = x.view(-1, self.count, x.shape[1])
        if config.mean:
            x = self._standardised(blocks.float().mean(dim=1) * config.factor).to(x.dtype)
        elif self.fold is not None:  # its columns are those of a convolution
            x = self.fold(blocks.transpose(1, 2).flatten(1))
        else:
            x = blocks.flatten(1)
        x = self.norm(x) if config.norm_last else x
        x = x if self.inner is None else ACTIVATIONS[config.activation](self.inner(x))
        merged: Tensor = self.out(x)
        return merged

    def _standardised(self, means: Tensor) -> Tensor:
        if self.standard_bias is None or self.standard_scale is None:
            return means
        return (means - self.standard_bias.float()) * self.standard_scale.float()


def patch_places(rows: int, columns: int, merge: int) -> Tensor:
    """Return the row and the column of each patch `[2, rows * columns]`, block by block of `merge` patches a side."""
    places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    blocks = places.view(2, rows // merge, merge, columns // merge, merge)
    return blocks.transpose(2, 3).reshape(2, -1)


def patch_rows(pixels: Tensor, config: PatchConfig) -> Tensor:
    """Return the pixels `[C, H, W]` of a picture as patches `[N, elements]`, in the order of their places."""
    (channels, height, width), size, merge = pixels.shape, config.size, config.merge
    cut = pixels.reshape(channels, height // config.cell, merge, size, width // config.cell, merge, size)
    if config.channels_last:
        return cut.permute(1, 4, 2, 5, 3, 6, 0).flatten(0, 3).flatten(1)
    cut = cut.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)  # [N, C, size, size]
    return cut[:, :, None].expand(-1, -1, config.frames, -1, -1).flatten(1)


def windows(rows: int, columns: int, side: int) -> tuple[Tensor, list[int]]:
    """Return the blocks of a picture window by window, and how many each window has; those at the edges have fewer."""
    place = torch.arange(rows * columns)
    window = place // columns // side * -(-columns // side) + place % columns // side
    return window.argsort(stable=True), torch.unique(window, return_counts=True)[1].tolist()


def _in_order(patches: Tensor, blocks: Tensor, count: int) -> Tensor:
    """Return patches `[N, ...]` in an order of their blocks of `count`."""
    return patches.unflatten(0, (-1, count))[to_device(blocks, patches.device)].flatten(0, 1)


def positions_of(table: Tensor, config: PatchConfig, places: Tensor, sides: tuple[int, int]) -> Tensor:
    """Return what is added to the patches at places `[2, N]` of a picture with `sides` patches, `[N, d]`."""
    assert config.grid is not None
    row, column = places
    match config.positions:
        case GridPositions.RESAMPLED:
            return resampled(table, config.grid, places, sides)
        case GridPositions.NEAREST:
            row, column = (_part(at, side, config.grid) for at, side in zip(places, sides, strict=True))
        case GridPositions.FIXED:
            if sides != (config.grid, config.grid):
                raise ValueError(f"pictures have {config.grid} patches a side, found {sides}")
        case GridPositions.SUMMED:
            if max(sides) > config.grid:
                raise ValueError(f"pictures have at most {config.grid} patches a side, found {sides}")
            of_column, of_row = (to_device(at, table.device) for at in (column, config.grid + row))
            return table[of_column] + table[of_row]
    return table[to_device(row * config.grid + column, table.device)]


def _part(at: Tensor, side: int, grid: int) -> Tensor:
    """Return in which of `grid` equal parts of a side the patches begin, in float32 as the reference computes it."""
    bounds = torch.arange(1 / grid, 1.0, 1 / grid)
    return torch.bucketize((at.float() * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6), bounds, right=True)


def resampled(table: Tensor, grid: int, places: Tensor, sides: tuple[int, int]) -> Tensor:
    """Return the table's vectors `[N, d]` in float32 at places `[2, N]` of a picture with `sides` patches.

    The corners of the table are at the corners of the picture; between its rows and columns it is bilinear.
    """
    taps, weights = [], []
    for at, side in zip(places, sides, strict=True):
        where = at.float() * (grid - 1) / max(side - 1, 1)
        low = where.floor()
        taps.append((low.long(), (low.long() + 1).clamp(max=grid - 1)))
        weights.append((1 - (where - low), where - low))
    whole = table.float()
    found = torch.zeros(places.shape[1], table.shape[1], device=table.device)
    for row, by_row in zip(taps[0], weights[0], strict=True):
        for column, by_column in zip(taps[1], weights[1], strict=True):
            factors = to_device(by_row * by_column, table.device)
            found += whole[to_device(row * grid + column, table.device)] * factors[:, None]
    return found
