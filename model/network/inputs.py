"""What a forward pass reads: packed rows, and where each sequence begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from model.attention.base import AttentionMetadata
from model.cache.paged import LayerCache
from model.cache.states import StateSpan
from model.network.adapters import RowAdapters
from model.system.transfer import device_tensor, to_device


@dataclass(frozen=True, slots=True)
class StackInput:
    """What a stack reads: one row a token."""

    input_ids: Tensor  # [T]
    positions: Tensor  # [T]
    metadata: AttentionMetadata  # by the tables of the cache's first pool, if there is a cache
    token_types: Tensor | None = None  # [T]; None: all of segment 0
    pixels: Tensor | None = None  # [B, channels, size, size] instead of token ids, normalised
    frames: Tensor | None = None  # [B, mel bins, frames] instead of token ids, log-mel energies
    other_pools: tuple[AttentionMetadata, ...] = ()  # the same by the tables of the others
    read_rows: Tensor | None = None  # [T'] the rows that are keys, without a cache; None: all
    adapters: RowAdapters | None = None  # None: no row has one
    contexts: Tensor | None = None  # [T] tokens that each row's request may come to; None: those of its segment
    states: tuple[StateSpan, ...] = ()  # which states the rows of recurrent layers go on from, if there is a cache
    # Of a recorded step the same on the device: each row's number, and the slots that it reads and writes.
    single_states: Tensor | None = None  # [3, T]

    def metadata_of(self, cache: LayerCache | None) -> AttentionMetadata:
        """What a layer with this cache attends by."""
        return self.metadata if cache is None or not cache.pool else self.other_pools[cache.pool - 1]


@dataclass(frozen=True, slots=True)
class CrossInput:
    """What a decoder attends to: the memory itself, or nothing where its keys and values are in the pool."""

    metadata: AttentionMetadata
    encoder_output: Tensor | None = None  # [S, d]
    other_pools: tuple[AttentionMetadata, ...] = ()  # as in `StackInput`
    queries: Mapping[int, Tensor] | None = None  # by layer, where its queries are kept: [T, H, D] float32

    def metadata_of(self, cache: LayerCache | None) -> AttentionMetadata:
        """What a layer with this cache attends by."""
        return self.metadata if cache is None or not cache.pool else self.other_pools[cache.pool - 1]


def with_unread_rows(inputs: StackInput, lengths: Sequence[tuple[int, int]], device: torch.device) -> StackInput:
    """The same for segments of `(rows, keys)`, whose rows behind so many keys read the others and are read by none.

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
) -> StackInput:
    """Whole segments, one after the other, attending to themselves without a cache."""
    lens = tuple(map(len, segments))

    def flat(rows: Sequence[Sequence[int]]) -> Tensor:
        return to_device(torch.from_numpy(np.fromiter(chain.from_iterable(rows), np.int64, sum(lens))), device)

    types = flat(token_types) if token_types is not None else None
    return StackInput(
        input_ids=flat(segments),
        positions=flat([range(length) for length in lens]),
        metadata=AttentionMetadata(lens, lens, causal=causal, device=device),
        token_types=types,
    )
