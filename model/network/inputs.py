"""What a forward pass reads: packed rows, where each sequence begins, and what the layers of a stack share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from triptych.model.attention.base import AttentionBackend, AttentionMetadata
from triptych.model.cache.kv_cache import LayerCache, StateSpan, StateTables, whole_segments
from triptych.model.config.attention import RopeScaling, RotaryConfig
from triptych.model.linear.base import Linear
from triptych.model.network.adapters import RowAdapters
from triptych.model.network.disentangled import RelativeTable
from triptych.model.network.fused_ops import rotary_tables
from triptych.model.network.positions import (
    BucketBias,
    StepBias,
    query_growth,
    section_of_pairs,
    sinusoids_of_distances,
)
from triptych.model.system.devices import device_tensor, to_device


class GivenRows(NamedTuple):
    """Vectors `[N, d]` that replace those of the tokens at some rows `[N]` of a stack's input (pictures)."""

    rows: Tensor
    vectors: Tensor
    layer_token: int | None = None  # the token whose `LayerEmbeddings` these rows get; None: their own
    added: tuple[Tensor, ...] = ()  # `[N, d]` to add to these rows after the first layer, the second, and so on


@dataclass(frozen=True, slots=True)
class StackInput:
    """The input of a stack, one row for each token."""

    input_ids: Tensor  # [T]
    positions: Tensor  # [T] that rotary positions and tables of positions go by
    metadata: AttentionMetadata  # by the tables of the cache's first pool, if there is a cache
    token_types: Tensor | None = None  # [T]; None: all of segment 0
    # Instead of token ids normalised images, [B, channels, size, size] or [channels, height, width] of each.
    pixels: Tensor | Sequence[Tensor] | None = None
    frames: Tensor | None = None  # [B, mel bins, frames] instead of token ids, log-mel energies
    # The metadata by the tables of the other pools; in a tower, that of `windowed` layers.
    other_pools: tuple[AttentionMetadata, ...] = ()
    read_rows: Tensor | None = None  # [T'] the rows that are keys, without a cache; None: all
    adapters: RowAdapters | None = None  # None: no row has one
    contexts: Tensor | None = None  # [T] the length that each row is rotated for (LongRoPE); None: its segment's
    states: tuple[StateSpan, ...] = ()  # which states the rows of recurrent layers go on from, if there is a cache
    # The states of a recorded step, on the device: each row's number, the slot that it reads, the slot that it writes.
    single_states: Tensor | None = None  # [3, T]
    # The coordinates of each row's position, where rotary positions have sections; None: all are its position.
    coordinates: Tensor | None = None  # [coordinates, T]
    given: GivenRows | None = None  # rows of pictures, in the place of tokens' vectors

    def metadata_of(self, cache: LayerCache | None) -> AttentionMetadata:
        """Return the metadata for a layer with this cache."""
        return self.metadata if cache is None or not cache.pool else self.other_pools[cache.pool - 1]


@dataclass(frozen=True, slots=True)
class CrossInput:
    """The encoder output that a decoder attends to; None if its keys and values are in the cache."""

    metadata: AttentionMetadata
    encoder_output: Tensor | None = None  # [S, d]
    other_pools: tuple[AttentionMetadata, ...] = ()  # as in `StackInput`
    queries: Mapping[int, Tensor] | None = None  # by layer, where its queries are kept: [T, H, D] float32
    adapters: RowAdapters | None = None  # of the encoder output's rows

    def metadata_of(self, cache: LayerCache | None) -> AttentionMetadata:
        """Return the metadata for a layer with this cache."""
        return self.metadata if cache is None or not cache.pool else self.other_pools[cache.pool - 1]


def with_unread_rows(inputs: StackInput, lengths: Sequence[tuple[int, int]], device: torch.device) -> StackInput:
    """Return the inputs for segments of `(rows, keys)`: rows after the first `keys` read those, and no row reads them.

    For layers without windows and score biases: those would count from a segment's last row as if it were a key.
    """
    rows, keys = zip(*lengths, strict=True)
    starts = accumulate(rows[:-1], initial=0)
    read = [row for start, count in zip(starts, keys, strict=True) for row in range(start, start + count)]
    metadata = AttentionMetadata(rows, keys, causal=False, device=device)
    return replace(inputs, metadata=metadata, read_rows=device_tensor(read, device, torch.int64))


def packed_input(
    segments: Sequence[Sequence[int]],
    device: torch.device,
    *,
    causal: bool,
    token_types: Sequence[Sequence[int]] | None = None,
    padding: int | None = None,
) -> StackInput:
    """Pack whole segments that attend only to themselves, without a cache.

    `padding` is a token without a position.
    """
    lens = tuple(map(len, segments))

    def flat(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        return np.fromiter(chain.from_iterable(rows), np.int64, sum(lens))

    def moved(values: NDArray[np.int64]) -> Tensor:
        return to_device(torch.from_numpy(values), device)

    ids = flat(segments)
    return StackInput(
        input_ids=moved(ids),
        positions=moved(positions_of(ids, lens, padding)),
        metadata=AttentionMetadata(lens, lens, causal=causal, device=device),
        token_types=moved(flat(token_types)) if token_types is not None else None,
    )


def positions_of(ids: NDArray[np.int64], lens: ArrayLike, padding: int | None) -> NDArray[np.int64]:
    """Return the places of the rows `[T]` in their segments; of `padding` -1, which the rows after it do not count."""
    lengths = np.array(lens, np.int64)
    starts = lengths.cumsum() - lengths
    places = np.arange(len(ids)) - starts.repeat(lengths)
    if padding is None or not (absent := ids == padding).any():
        return places
    counted = absent.cumsum()
    places -= counted - (counted[starts] - absent[starts]).repeat(lengths)
    places[absent] = -1
    return places


# -- What the layers of a stack share in one step: the rows' metadata, and positions that are computed once.


class StepContext:
    """What the layers of a stack share in one step; tensors of positions are computed once."""

    def __init__(
        self,
        inputs: StackInput,
        backend: AttentionBackend,
        cross: CrossInput | None,
        dtype: torch.dtype,
        shared_bias: BucketBias | None = None,
        relative: RelativeTable | None = None,
        key_owners: frozenset[int] = frozenset(),
        layer_vectors: Tensor | None = None,
    ) -> None:
        """`dtype` is that of the rows; `shared_bias` and `relative` are the stack's tables of positions, `key_owners`
        the layers whose keys others read, and `layer_vectors` `[T, L, P]` each row's vectors for the layers."""
        self.inputs, self.backend, self.cross = inputs, backend, cross
        self.shared_bias = StepBias(shared_bias) if shared_bias is not None else None
        self.layer = 0  # the layer that is being computed by its module
        self.key_owners = key_owners
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values `[T, K, D]` of these, without a cache
        self.layer_vectors = layer_vectors
        self._relative = relative
        self._dtype = dtype
        self._rotaries: dict[RotaryConfig, tuple[Tensor, Tensor]] = {}
        self._growths: dict[RotaryConfig, Tensor] = {}
        self._sinusoids: dict[int, Tensor] = {}
        self._state_tables: dict[bool, StateTables] = {}

    def keep_queries(self, query: Tensor) -> None:
        """Keep a layer's queries of cross attention `[T, H, D]`, if an alignment needs them."""
        kept = self.cross.queries if self.cross is not None else None
        if kept is not None and self.layer in kept:
            kept[self.layer].copy_(query)

    @cached_property
    def relative_table(self) -> Tensor:
        """The table of relative positions, `[2 span, d]` (DeBERTa)."""
        assert self._relative is not None
        table: Tensor = self._relative()
        return table

    def project(self, linear: Linear, x: Tensor) -> Tensor:
        """Return `linear(x)`, with what the rows' adapters add to it."""
        y: Tensor = linear(x)
        adapters = self.inputs.adapters
        return y if adapters is None else adapters.added(linear.spec.name, x, y)

    def rotary(self, config: RotaryConfig) -> tuple[Tensor, Tensor]:
        """Return cosine and sine `[T, 1, R]` of the rows' positions, for `triptych.model.network.positions.rotate`."""
        if config not in self._rotaries:
            long = config.scaling is RopeScaling.LONGROPE
            contexts = self._contexts if long else None
            self._rotaries[config] = rotary_tables(config, self._positions(config), self._dtype, contexts)
        return self._rotaries[config]

    def _positions(self, config: RotaryConfig) -> Tensor:
        """Return the positions `[T]`, or `[T, R / 2]` if pairs of dimensions rotate by different coordinates."""
        coordinates, positions = self.inputs.coordinates, self.inputs.positions
        if coordinates is None or not config.sections:
            return positions
        chosen = section_of_pairs(config.sections, config.dim // 2, in_turn=config.in_turn, device=positions.device)
        return coordinates[chosen].T

    def query_growth(self, config: RotaryConfig) -> Tensor:
        """Return the factors of the rows' queries, `[T]` float32."""
        if config not in self._growths:
            self._growths[config] = query_growth(config, self.inputs.positions)
        return self._growths[config]

    @cached_property
    def _contexts(self) -> Tensor:
        """The length that each row is rotated for, `[T]` (LongRoPE)."""
        if self.inputs.contexts is not None:
            return self.inputs.contexts
        metadata = self.inputs.metadata
        rows = [length for length in metadata.q_lens for _ in range(length)]
        return device_tensor(rows, self.inputs.positions.device, torch.int64)

    def state_tables(self, chunk: int, *, kept: bool) -> StateTables:
        """Return which rows start from which states; without a cache (not `kept`) all start from zeros."""
        if kept not in self._state_tables:
            inputs = self.inputs
            if kept and inputs.single_states is not None:
                self._state_tables[kept] = StateTables(inputs.single_states)
            else:
                spans = inputs.states if kept else whole_segments(inputs.metadata.q_lens)
                self._state_tables[kept] = StateTables.of(spans, chunk, inputs.positions.device)
        return self._state_tables[kept]

    def sinusoids(self, length: int, size: int, dtype: torch.dtype) -> Tensor:
        """Return the sinusoids `[2 length - 1, size]` of distances from `1 - length` to `length - 1` (XLNet)."""
        if length not in self._sinusoids:
            self._sinusoids[length] = sinusoids_of_distances(length, size, self.inputs.positions.device).to(dtype)
        return self._sinusoids[length]
