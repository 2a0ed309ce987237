"""A step's numbers in one row of integers: filled on the host, moved to the device by one copy, read there as views.

Shapes: T packed tokens of B segments, M blocks of the longest table. A step may be packed larger than it is, for a
recorded graph whose shapes are fixed: the segments beyond have one token each, no keys, and no slot to write to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.engine.scheduling.block_manager import BlockManager
from model.engine.scheduling.block_table import BlockTable
from model.engine.scheduling.scheduler import ScheduledSequence

NO_SLOT = -1  # a slot that nothing is written to; a token that is not waited for


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How many of everything."""

    tokens: int  # T
    segments: int  # B
    blocks: int  # M of the self tables
    cross_blocks: int = 0  # M of the cross tables; 0: there is no encoder

    @classmethod
    def of(cls, steps: Sequence[ScheduledSequence]) -> BatchLayout:
        """What just holds these."""
        return cls(
            tokens=sum(step.num_tokens for step in steps),
            segments=len(steps),
            blocks=max(len(step.sequence.block_table) for step in steps),
            cross_blocks=max(len(step.sequence.cross_block_table) for step in steps),
        )

    @property
    def sizes(self) -> list[int]:
        """Of each field of `StepBatch`, in its order."""
        t, b = self.tokens, self.segments
        return [t, t, t, t, b + 1, b, b * self.blocks, b, b * self.cross_blocks]

    @property
    def before_tables(self) -> int:
        """Integers in front of the tables: they lie alike whatever the tables' lengths."""
        return sum(self.sizes[:6])

    def split(self, flat: Tensor) -> StepBatch:
        """Views of a row of so many integers."""
        ids, positions, slots, placeholders, cu_seqlens, kv_lens, tables, cross_lens, cross_tables = flat.split(
            self.sizes
        )
        b = self.segments
        tables, cross_tables = tables.view(b, self.blocks), cross_tables.view(b, self.cross_blocks)
        return StepBatch(ids, positions, slots, placeholders, cu_seqlens, kv_lens, tables, cross_lens, cross_tables)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step as the network reads it."""

    ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T] of the pool, for its keys and values
    placeholders: Tensor  # [T] row of the previous step whose token this is, not known on the host; else NO_SLOT
    cu_seqlens: Tensor  # [B + 1]
    kv_lens: Tensor  # [B]
    tables: Tensor  # [B, M]
    cross_lens: Tensor  # [B]
    cross_tables: Tensor  # [B, M]


def pack(
    layout: BatchLayout,
    steps: Sequence[ScheduledSequence],
    blocks: BlockManager,
    placeholders: Mapping[int, int],
    *,
    pinned: bool = False,
) -> Tensor:
    """The row of integers of a step, on the host; `placeholders` has rows of the step before by the sequence's `id`.

    `pinned` memory is what a device copies from while the host goes on.
    """
    sizes = layout.sizes
    row = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=pinned)
    flat, count = row.numpy(), layout.segments
    ids, positions, slots, rows, cu_seqlens, kv_lens, tables, cross_lens, cross_tables = _cut(flat, sizes)
    slots[:] = rows[:] = NO_SLOT
    if layout.tokens == count:  # one token each, which is what nearly all steps are
        _pack_single(steps, blocks.block_size, placeholders, (ids, positions, slots, rows))
        cu_seqlens[:] = np.arange(count + 1)
    else:
        _pack_runs(steps, blocks.block_size, placeholders, (ids, positions, slots, rows))
        cu_seqlens[1:] = np.cumsum([step.num_tokens for step in steps])
    kv_lens[: len(steps)] = [step.start + step.num_tokens for step in steps]
    _fill_tables(tables, layout.blocks, [step.sequence.block_table for step in steps])
    if layout.cross_blocks:
        cross_lens[: len(steps)] = [len(step.sequence.source_ids) for step in steps]
        _fill_tables(cross_tables, layout.cross_blocks, [step.sequence.cross_block_table for step in steps])
    return row


def _cut(flat: NDArray[np.int64], sizes: Sequence[int]) -> Iterator[NDArray[np.int64]]:
    begin = 0
    for size in sizes:
        yield flat[begin : begin + size]
        begin += size


def _fill_tables(flat: NDArray[np.int64], width: int, tables: Sequence[BlockTable]) -> None:
    """Rows of `width`; what is beyond a table stays block 0, which no length reaches."""
    begin = 0
    for table in tables:
        flat[begin : begin + len(table)] = table.row
        begin += width


_Columns = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def _pack_single(
    steps: Sequence[ScheduledSequence], size: int, placeholders: Mapping[int, int], columns: _Columns
) -> None:
    ids, positions, slots, rows = columns
    count = len(steps)
    ids[:count] = [step.sequence.token_ids[step.start] for step in steps]
    positions[:count] = at = np.array([step.start for step in steps], dtype=np.int64)
    slots[:count] = [step.sequence.block_table[step.start // size] * size for step in steps]
    slots[:count] += at % size
    if placeholders:
        rows[:count] = [placeholders.get(id(step.sequence), NO_SLOT) for step in steps]


def _pack_runs(
    steps: Sequence[ScheduledSequence], size: int, placeholders: Mapping[int, int], columns: _Columns
) -> None:
    ids, positions, slots, rows = columns
    begin = 0
    for step in steps:
        end, stop = begin + step.num_tokens, step.start + step.num_tokens
        ids[begin:end] = step.sequence.token_ids[step.start : stop]
        positions[begin:end] = at = np.arange(step.start, stop)
        slots[begin:end] = step.sequence.block_table.row[at // size] * size + at % size
        rows[end - 1] = placeholders.get(id(step.sequence), NO_SLOT)
        begin = end
