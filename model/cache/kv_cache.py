"""The KV cache of a model: pages of keys and values by layer, and the states of recurrent layers by slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from triptych.model.config.attention import AttentionConfig, GatedDeltaConfig
from triptych.model.config.cache import NO_STATE, SCALED_KINDS, PagedSpec, paged_specs, pools_of
from triptych.model.config.stack import StackConfig
from triptych.model.system import huge_pages
from triptych.model.system.devices import device_tensor, to_device
from triptych.model.system.mapped_file import resident_bytes

# -- States of recurrent layers, by slots: a summary of all tokens of a sequence, of fixed size (`GatedDeltaConfig`).
#
#     recurrent: [slots, value heads, key_dim, value_dim]      convolution: [slots, kernel - 1, channels]      float32
#
# A span of rows reads one slot and writes another, so a step can be run again.
# `triptych.model.engine.scheduling.state_slots` decides which sequence has which slot.


class StateSpan(NamedTuple):
    """Rows `[first, last)` of one sequence, which start from the state in slot `source` and write slot `target`."""

    first: int
    last: int
    source: int
    target: int


def whole_segments(lengths: Sequence[int]) -> tuple[StateSpan, ...]:
    """Return the spans of packed segments of these lengths, which start from zeros and keep no state."""
    spans, first = [], 0
    for length in lengths:
        spans.append(StateSpan(first, first + length, NO_STATE, NO_STATE))
        first += length
    return tuple(spans)


def independent_spans(spans: Iterable[StateSpan]) -> list[list[StateSpan]]:
    """Divide spans into lists of independent ones; a span that starts from another's state is in a later list."""
    found: list[list[StateSpan]] = []
    written: dict[int, int] = {}  # the index of the list after the one that writes a slot
    for span in spans:
        at = written.get(span.source, 0) if span.source != NO_STATE else 0
        if at == len(found):
            found.append([])
        found[at].append(span)
        if span.target != NO_STATE:
            written[span.target] = at + 1
    return found


class Segment(NamedTuple):
    """Consecutive spans of one sequence: rows `[first, last)`, which start from the state in slot `source`."""

    first: int
    last: int
    source: int
    kept: dict[int, int]  # by row: the slot for the state before that row


def segments(spans: Iterable[StateSpan]) -> list[Segment]:
    """Join each span to the one before it, if it starts from the state of that one."""
    found: list[Segment] = []
    before: StateSpan | None = None
    for span in spans:
        follows = before is not None and span.source != NO_STATE and span.source == before.target
        if follows and span.first == found[-1].last:
            found[-1] = found[-1]._replace(last=span.last)
        else:
            found.append(Segment(span.first, span.last, span.source, {}))
        if span.target != NO_STATE:
            found[-1].kept[span.last] = span.target
        before = span
    return found


@dataclass(frozen=True, slots=True)
class StateTables:
    """Which rows of a step start from which states, on the device; a negative slot means no slot."""

    singles: Tensor | None  # [3, S] segments of one token: row, slot read, slot written
    segments: Tensor | None = None  # [3, B] longer segments: first chunk, end of chunks, slot read
    chunks: Tensor | None = None  # [5, N] their chunks: first row, end; segment's first row; slots read, written

    @classmethod
    def of(cls, spans: Iterable[StateSpan], chunk: int, device: torch.device) -> StateTables:
        """Build the tables of a step's spans in chunks of at most `chunk` tokens; each kept state ends a chunk."""
        singles: list[tuple[int, ...]] = []
        longer: list[tuple[int, ...]] = []
        chunks: list[tuple[int, ...]] = []
        for one in segments(spans):
            if one.last - one.first == 1:
                singles.append((one.first, one.source, one.kept.get(one.last, NO_STATE)))
                continue
            begun, begin = len(chunks), one.first
            while begin < one.last:
                end = min(begin + chunk, *(row for row in (*one.kept, one.last) if row > begin))
                chunks.append((begin, end, one.first, one.source, one.kept.get(end, NO_STATE)))
                begin = end
            longer.append((begun, len(chunks), one.source))
        tables = [np.array(rows, dtype=np.int64).T for rows in (singles, longer, chunks)]
        packed = to_device(torch.from_numpy(np.concatenate([table.ravel() for table in tables])), device)
        parts = packed.split([table.size for table in tables])
        return cls(*(part.view(table.shape) if table.size else None for part, table in zip(parts, tables, strict=True)))


@dataclass(frozen=True, slots=True)
class StateCache:
    """One layer's states."""

    recurrent: Tensor  # [slots, value heads, key_dim, value_dim]
    convolution: Tensor  # [slots, kernel - 1, channels]

    @classmethod
    def zeros(cls, config: GatedDeltaConfig, num_slots: int, device: torch.device) -> StateCache:
        shapes = [(num_slots, *shape) for shape in config.state_shapes]
        if device.type == "cpu":
            return cls(*(huge_pages.zeros(shape, torch.float32) for shape in shapes))
        return cls(*(torch.zeros(shape, dtype=torch.float32, device=device) for shape in shapes))

    @property
    def nbytes(self) -> int:
        return self.recurrent.nbytes + self.convolution.nbytes

    def read(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the recurrent states `[B, H, K, V]` and the convolution's `[B, kernel - 1, C]` in these slots."""
        at = self._tensor([max(slot, 0) for slot in slots])
        found = self.recurrent[at], self.convolution[at]
        empty = [place for place, slot in enumerate(slots) if slot == NO_STATE]
        if empty:
            for states in found:
                states[self._tensor(empty)] = 0.0
        return found

    def write(self, slots: Sequence[int], recurrent: Tensor, convolution: Tensor) -> None:
        """Write states, shaped as `read` returns them, to these slots; those without a slot are dropped."""
        kept = [place for place, slot in enumerate(slots) if slot != NO_STATE]
        if not kept:
            return
        at = self._tensor([slots[place] for place in kept])
        for there, states in ((self.recurrent, recurrent), (self.convolution, convolution)):
            there[at] = states if len(kept) == len(slots) else states[self._tensor(kept)]

    def _tensor(self, values: list[int]) -> Tensor:
        return device_tensor(values, self.recurrent.device, torch.int64)


# -- Pages of keys and values, by layer: `block_size` tokens each, self and cross attention alike.
#
#     keys, values: [num_pages, block_size, K, D] of each layer      slot = block * block_size + offset
#
# Here are only the tensors. `triptych.model.engine.scheduling.block_manager` decides which sequence has which block.

_LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's pages `[num_pages, block_size, K, D]`; of int8 and float8 with a scale for each token and head."""

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None = None  # of keys and values, [num_pages, block_size, K] float32
    pool: int = 0  # whose tables and slots it is read and written by

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write `key` and `value` `[T, K, D]` to `slots` `[T]`, quantised if the pages are."""
        for pages, rows, scales in zip(
            (self.keys, self.values), (key, value), self.scales or (None, None), strict=True
        ):
            if scales is not None:
                most = rows.float().abs().amax(dim=-1)  # [T, K]
                # A tensor: a GPU would multiply by the reciprocal of a number.
                levels = torch.full_like(most, _LARGEST[pages.dtype])
                scales.view(-1, scales.shape[-1]).index_copy_(0, slots, most / levels)
                rows = rows.float() * (levels / most.clamp(min=1e-30))[..., None]
                if pages.dtype is torch.int8:
                    rows = rows.round()
            plain(pages).view(-1, *pages.shape[2:]).index_copy_(0, slots, plain(rows.to(pages.dtype)))

    def read(self, block_tables: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values `[B, length, K, D]` of the sequences with `block_tables` `[B, M]`."""
        block_size = self.keys.shape[1]
        blocks = block_tables[:, : -(-length // block_size)]
        shape = (blocks.shape[0], blocks.shape[1] * block_size, *self.keys.shape[2:])
        keys, values = (plain(pages)[blocks].view(pages.dtype) for pages in (self.keys, self.values))
        if self.scales is not None:
            keys, values = (
                x.to(s.dtype) * s[blocks][..., None] for x, s in zip((keys, values), self.scales, strict=True)
            )
        return keys.view(shape)[:, :length], values.view(shape)[:, :length]


class KVCache:
    """The caches of a decoder's layers, each of its own shape: `pages` of those with attention, `states` of recurrent
    ones, by layer.

    Layers of one window share the blocks of one pool (`triptych.model.config.cache.pools_of`), and equal layers of a
    pool one tensor, so that a block is copied for all of them at once. A layer that reads another one's keys has that
    one's pages. A state's slot is the same in all recurrent layers.
    """

    def __init__(
        self,
        decoder: StackConfig,
        num_pages: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_states: int = 0,
    ) -> None:
        """`num_pages`: of each pool; `num_states`: slots for states."""
        specs = paged_specs(decoder, str(dtype).removeprefix("torch."))
        self.pools = pools_of(specs)
        self.num_pages = tuple(num_pages)
        self.block_size = block_size
        self.device = device
        self._tensors: list[list[Tensor]] = []  # of each pool
        layers: dict[int, LayerCache] = {}
        for at, (pool, pages) in enumerate(zip(self.pools, num_pages, strict=True)):
            self._tensors.append([])
            for spec in dict.fromkeys(specs[layer] for layer in pool.layers):
                equal = [index for index in pool.layers if specs[index] == spec]
                layers |= zip(equal, self._make_layers(at, spec, len(equal), pages), strict=True)
        for index, layer in enumerate(decoder.layers):
            if isinstance(layer.mixer, AttentionConfig) and layer.mixer.keys_of is not None:
                layers[index] = layers[layer.mixer.keys_of]
        self.pages = dict(sorted(layers.items()))
        self.states = {
            index: StateCache.zeros(config, num_states, device) for index, config in decoder.recurrences.items()
        }
        _CACHES.add(self)

    def _make_layers(self, pool: int, spec: PagedSpec, count: int, pages: int) -> list[LayerCache]:
        shape = (count, pages, self.block_size, spec.kv_heads)
        dtype = getattr(torch, spec.dtype)
        keys, values = (_zeros((*shape, dim), dtype, self.device) for dim in (spec.key_dim, spec.value_dim))
        self._tensors[pool] += [keys, values]
        scales: Sequence[tuple[Tensor, Tensor] | None] = [None] * count
        if spec.dtype in SCALED_KINDS:
            key_scales, value_scales = (_zeros(shape, torch.float32, self.device) for _ in range(2))
            self._tensors[pool] += [key_scales, value_scales]
            scales = list(zip(key_scales, value_scales, strict=True))
        return [LayerCache(*pages, pool) for pages in zip(keys, values, scales, strict=True)]

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        """The pages of all layers with attention, in order."""
        return tuple(self.pages.values())

    def of_layer(self, index: int) -> LayerCache | StateCache:
        return self.pages[index] if index in self.pages else self.states[index]

    @property
    def nbytes(self) -> int:
        """The memory of all pools and states."""
        pages = sum(tensor.nbytes for tensors in self._tensors for tensor in tensors)
        return pages + sum(states.nbytes for states in self.states.values())

    def _on_host(self) -> list[Tensor]:
        """All tensors, if they are in a CPU's memory."""
        states = [tensor for states in self.states.values() for tensor in (states.recurrent, states.convolution)]
        found = [*(tensor for tensors in self._tensors for tensor in tensors), *states]
        return [tensor for tensor in found if tensor.device.type == "cpu"]

    def commit(self) -> None:
        """Make the memory of an empty cache resident now; on a CPU it otherwise becomes so as it is written."""
        for tensor in self._on_host():
            huge_pages.commit(tensor)

    @property
    def promised(self) -> int:
        """The bytes on a CPU that are reserved and not resident yet."""
        return sum(max(0, tensor.nbytes - resident_bytes(tensor)) for tensor in self._on_host())

    def copy_blocks(self, pool: int, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Copy whole blocks within a pool; all are read before any is written."""
        target, source = (device_tensor(list(blocks), self.device, torch.int64) for blocks in (targets, sources))
        for tensor in map(plain, self._tensors[pool]):
            tensor[:, target] = tensor[:, source]


_CACHES = WeakSet[KVCache]()  # of this process


def promised_memory() -> int:
    """Return the bytes that Linux counts as available and the KV caches of this process will take."""
    return sum(cache.promised for cache in _CACHES)


def plain(numbers: Tensor) -> Tensor:
    """Return the same memory in a dtype that torch's indexing accepts: not all of its functions take float8."""
    return numbers.view(torch.uint8) if numbers.dtype is torch.float8_e4m3fn else numbers


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":  # blocks are taken from all over the pool, the longest unused first
        return huge_pages.zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
