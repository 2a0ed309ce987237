"""The cache of each layer as data, and the pools that their blocks are taken from. Frozen, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from model.config.model import StackConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
SCALED_KINDS = ("int8", "float8_e4m3fn")  # that have a float32 scale for each key and each value
_SCALE_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class PagedSpec:
    """Keys and values of one layer, in pages `[block_size, kv_heads, dim]`."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    window: int | None = None  # tokens that a query reads, its own and those before it; None: all

    @property
    def elements(self) -> int:
        """Numbers of one token, without scales."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def token_bytes(self) -> int:
        scales = 2 * _SCALE_BYTES * self.kv_heads if self.dtype in SCALED_KINDS else 0
        return self.elements * ITEM_BYTES[self.dtype] + scales


def paged_specs(decoder: StackConfig, dtype: str) -> tuple[PagedSpec, ...]:
    """The cache of each layer of a decoder, whose cross attention keeps as much for each position of a source."""
    mixers = (layer.mixer for layer in decoder.layers)
    return tuple(PagedSpec(one.num_kv_heads, one.head_dim, one.head_dim, dtype, one.window) for one in mixers)


def cached_elements(decoder: StackConfig | None, context: int = 1) -> int:
    """Numbers that a sequence of `context` tokens keeps of its self attention, over all layers; 0 without a decoder."""
    specs = paged_specs(decoder, "float32") if decoder is not None else ()
    return sum(spec.elements * min(context, spec.window or context) for spec in specs)


class PoolSize(NamedTuple):
    """How many blocks sequences can have of a pool."""

    num_blocks: int
    window: int | None = None  # of the layers that it belongs to

    @property
    def num_pages(self) -> int:
        """Blocks that there are: a windowed pool has one of zeros, for the places of tables behind the window."""
        return self.num_blocks + (self.window is not None)


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The layers that read equally far back: a sequence has one table of blocks for all of them."""

    window: int | None
    layers: tuple[int, ...]
    token_bytes: int  # of all these layers


def pools_of(layers: Sequence[PagedSpec]) -> tuple[PoolSpec, ...]:
    """One pool for each window: first that of the layers that read everything, then the largest window first."""
    return tuple(
        PoolSpec(
            window,
            tuple(index for index, spec in enumerate(layers) if spec.window == window),
            sum(spec.token_bytes for spec in layers if spec.window == window),
        )
        for window in _windows(spec.window for spec in layers)
    )


def pool_of_layers(stack: StackConfig) -> tuple[int, ...]:
    """The index of each layer's pool, also of steps without a cache; an encoder, which never has one, has one pool."""
    if not stack.causal:
        return (0,) * stack.num_layers
    windows = _windows(layer.mixer.window for layer in stack.layers)
    return tuple(windows.index(layer.mixer.window) for layer in stack.layers)


def _windows(found: Iterable[int | None]) -> list[int | None]:
    """The different ones, that which reads furthest back first."""
    return sorted(set(found), key=lambda window: -(window or 1 << 62))
