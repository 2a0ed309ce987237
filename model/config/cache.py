"""The cache of each layer as data, and the pools that their blocks are taken from. Frozen, without torch.

Layers with attention keep keys and values of every token, in pages; recurrent ones a state of fixed size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from triptych.model.config.attention import AttentionConfig
from triptych.model.config.formats import NumberKind
from triptych.model.config.stack import StackConfig

SCALED_KINDS = ("int8", "float8_e4m3fn")  # with a float32 scale for each key and each value
_FLOAT32_BYTES = 4
NO_STATE = -1  # in place of a slot: zeros are read, as before the first token; nothing is written


@dataclass(frozen=True, slots=True)
class PagedSpec:
    """Keys and values of one layer, in pages `[block_size, kv_heads, dim]`."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    window: int | None = None  # tokens that a query reads, its own and earlier ones; None: all

    @property
    def elements(self) -> int:
        """The numbers of one token, without scales."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def token_bytes(self) -> int:
        scales = 2 * _FLOAT32_BYTES * self.kv_heads if self.dtype in SCALED_KINDS else 0
        return self.elements * NumberKind(self.dtype).bits // 8 + scales


def paged_specs(decoder: StackConfig, dtype: str) -> dict[int, PagedSpec]:
    """Return the pages of each decoder layer that computes keys and values, by its index. Cross attention keeps as much
    for each position of a source."""
    return {
        index: PagedSpec(mixer.num_kv_heads, mixer.head_dim, mixer.head_dim, dtype, mixer.window)
        for index, layer in enumerate(decoder.layers)
        if isinstance(mixer := layer.mixer, AttentionConfig) and mixer.keys_of is None
    }


def state_bytes(decoder: StackConfig | None) -> int:
    """Return the bytes of one sequence's float32 states in all recurrent layers; 0 without any."""
    recurrences = decoder.recurrences.values() if decoder is not None else ()
    return _FLOAT32_BYTES * sum(one.state_elements for one in recurrences)


def cached_elements(decoder: StackConfig | None, context: int = 1) -> int:
    """Return how many numbers a sequence of `context` tokens has in the KV cache, over all layers."""
    specs = paged_specs(decoder, "float32") if decoder is not None else {}
    return sum(spec.elements * min(context, spec.window or context) for spec in specs.values())


class PoolSize(NamedTuple):
    """The size of a pool of blocks."""

    num_blocks: int
    window: int | None = None  # of its layers

    @property
    def num_pages(self) -> int:
        """The number of blocks; a windowed pool has one more, of zeros, for blocks that have left the window."""
        return self.num_blocks + (self.window is not None)


class StateSize(NamedTuple):
    """The slots for states of recurrent layers; a running sequence reads one and writes another."""

    num_sequences: int  # that run at a time
    num_snapshots: int  # further slots, for states that other sequences may start from

    @property
    def num_slots(self) -> int:
        return 2 * self.num_sequences + self.num_snapshots


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The layers with the same window, for which a sequence has one table of blocks."""

    window: int | None
    layers: tuple[int, ...]
    token_bytes: int  # of all these layers


def pools_of(layers: Mapping[int, PagedSpec]) -> tuple[PoolSpec, ...]:
    """Return a pool for each window: first that without a window, then the largest window first."""
    return tuple(
        PoolSpec(
            window,
            tuple(index for index, spec in layers.items() if spec.window == window),
            sum(spec.token_bytes for spec in layers.values() if spec.window == window),
        )
        for window in _windows(spec.window for spec in layers.values())
    )


def pool_of_layers(stack: StackConfig) -> tuple[int, ...]:
    """Return the index of each layer's pool, also for steps without a cache; 0 for a recurrent layer, which has none.

    An encoder has no cache; the layers of a tower that see windows of a picture have a second pool's segments.
    """
    if not stack.causal:
        return tuple(int(isinstance(layer.mixer, AttentionConfig) and layer.mixer.windowed) for layer in stack.layers)
    windows = _windows(attention.window for attention in stack.attentions)
    mixers = (layer.mixer for layer in stack.layers)
    return tuple(windows.index(mixer.window) if isinstance(mixer, AttentionConfig) else 0 for mixer in mixers)


def _windows(found: Iterable[int | None]) -> list[int | None]:
    """Return the distinct windows, that which reads furthest back first."""
    return sorted(set(found), key=lambda window: -(window or 1 << 62))
