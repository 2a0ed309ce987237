"""The cache of each layer as data, and the pools that their blocks are taken from. Frozen, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_SCALE_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class PagedSpec:
    """Keys and values of one layer, in pages `[block_size, kv_heads, dim]`."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str  # int8 has a float32 scale for each key and each value
    window: int | None = None  # tokens that a query reads, its own and those before it; None: all

    @property
    def token_bytes(self) -> int:
        scales = 2 * _SCALE_BYTES if self.dtype == "int8" else 0
        return self.kv_heads * ((self.key_dim + self.value_dim) * ITEM_BYTES[self.dtype] + scales)


class PoolSize(NamedTuple):
    """How many blocks a pool has."""

    num_blocks: int
    window: int | None = None  # of the layers that it belongs to


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The layers that read equally far back: a sequence has one table of blocks for all of them."""

    window: int | None
    layers: tuple[int, ...]
    token_bytes: int  # of all these layers


def pools_of(layers: Sequence[PagedSpec]) -> tuple[PoolSpec, ...]:
    """One pool for each window: first that of the layers that read everything, then the largest window first."""
    windows = sorted({spec.window for spec in layers}, key=lambda window: -(window or 1 << 62))
    return tuple(
        PoolSpec(
            window,
            tuple(index for index, spec in enumerate(layers) if spec.window == window),
            sum(spec.token_bytes for spec in layers if spec.window == window),
        )
        for window in windows
    )
