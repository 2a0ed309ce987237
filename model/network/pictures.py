"""A picture of any size to rows for a decoder: patches, the layers of a tower, and the merger."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from triptych.model.attention.base import AttentionBackend
from triptych.model.config.pictures import MergerConfig, PatchConfig, PicturesConfig
from triptych.model.linear.base import LinearSpec, Part
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
        self.table = nn.Parameter(torch.empty(patches.grid**2, size)) if patches.grid is not None else None
        self.merger = Merger(config.merger, patches.merge**2, size, width, linear.within("merger"))

    def begin(
        self, tower: Stack, pixels: Tensor, backend: AttentionBackend, adapters: RowAdapters | None = None
    ) -> PicturePass:
        """Begin with the normalised pixels `[C, H, W]` of a picture, whose sides are multiples of a block's."""
        patches = self.config.patches
        rows, columns = pixels.shape[1] // patches.size, pixels.shape[2] // patches.size
        places = patch_places(rows, columns, patches.merge)  # [2, N]
        x: Tensor = self.project(patch_rows(pixels, patches))  # [N, d]
        if self.table is not None:
            assert patches.grid is not None
            x = x + resampled(self.table, patches.grid, places, (rows, columns)).to(x.dtype)
        inputs = packed_input([range(len(x))], x.device, causal=False)
        inputs = replace(inputs, coordinates=to_device(places, x.device), adapters=adapters)
        return PicturePass(StackPass(tower, x, inputs, backend), self.merger)


@dataclass(slots=True)
class PicturePass:
    """A picture on its way through the tower; the way may be interrupted between two layers."""

    layers: StackPass
    merger: Merger

    def advance(self, layers: int) -> None:
        """Compute the next `layers` layers, or all that are left."""
        self.layers.advance(layers)

    def finish(self) -> Tensor:
        """Return the rows `[n, d]` that take the place of tokens' vectors."""
        rows: Tensor = self.merger(self.layers.finish())
        return rows


class Merger(nn.Module):
    """`[N, d] -> [N / count, width]`: the rows of each block become one."""

    def __init__(self, config: MergerConfig, count: int, size: int, width: int, linear: LinearFactory) -> None:
        super().__init__()
        self.config, self.count = config, count
        self.norm = build_norm(config.norm, count * size if config.norm_last else size)
        self.inner = linear(LinearSpec("inner", count * size, (Part(config.inner),)))
        self.out = linear(LinearSpec("out", config.inner, (Part(width),)))
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.inner.dtype)  # stacks in C give float32
        joined = x.view(len(x) // self.count, -1)
        joined = self.norm(joined) if self.config.norm_last else self.norm(x).view(joined.shape)
        merged: Tensor = self.out(self.activation(self.inner(joined)))
        return merged


def patch_places(rows: int, columns: int, merge: int) -> Tensor:
    """Return the row and the column of each patch `[2, rows * columns]`, block by block of `merge` patches a side."""
    places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    blocks = places.view(2, rows // merge, merge, columns // merge, merge)
    return blocks.transpose(2, 3).reshape(2, -1)


def patch_rows(pixels: Tensor, config: PatchConfig) -> Tensor:
    """Return the pixels `[C, H, W]` of a picture as patches `[N, elements]`, in the order of their places."""
    (channels, height, width), size, merge = pixels.shape, config.size, config.merge
    cut = pixels.reshape(channels, height // config.cell, merge, size, width // config.cell, merge, size)
    cut = cut.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)  # [N, C, size, size]
    return cut[:, :, None].expand(-1, -1, config.frames, -1, -1).flatten(1)


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
