"""Packs a step into one row of integers: filled on the host, copied to the device at once, read there as views.

Shapes: T packed tokens of B segments, M blocks of the longest table, P pools of blocks. A CUDA graph has fixed shapes,
so a step may be padded: each padding segment has one token, no keys, and no slot to write to. A recorded step with
prompts is padded twice: after the sequences with one token, and after the prompts, where all rows are one segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.model.config.cache import NO_STATE
from triptych.model.engine.scheduling.scheduled_step import ScheduledSequence
from triptych.model.engine.scheduling.sequence import BlockTable

NO_SLOT = -1  # no slot to write to; no placeholder


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The dimensions of a packed step."""

    tokens: int  # T
    segments: int  # B
    blocks: int  # M of the tables of tokens, which are equally long in all pools
    source_blocks: int = 0  # M of the tables of sources; 0: there is no encoder
    pools: int = 1  # P
    state_columns: int = 0  # 3: each segment is one token, which reads and writes a state
    prompt_tokens: int = 0  # P: rows for prompts after those of sequences with one token, both padded; 0: not padded so

    @classmethod
    def of(cls, steps: Sequence[ScheduledSequence]) -> BatchLayout:
        """Return the smallest layout that holds these steps."""
        return cls(
            tokens=sum(step.num_tokens for step in steps),
            segments=len(steps),
            blocks=max(len(step.sequence.tables[0]) for step in steps),
            source_blocks=max(len(step.sequence.source_tables[0]) for step in steps),
            pools=len(steps[0].sequence.tables),
        )

    @property
    def sizes(self) -> list[int]:
        """The number of integers of each field of `StepBatch`, in order."""
        t, b, p = self.tokens, self.segments, self.pools
        states = self.state_columns * b
        return [t, t, t, p * t, t, b + 1, b, states, p * b * self.blocks, b, p * b * self.source_blocks]

    @property
    def before_tables(self) -> int:
        """The number of integers before the tables, whose places do not depend on the tables' lengths."""
        return sum(self.sizes[:8])

    def split(self, flat: Tensor) -> StepBatch:
        """Return the fields as views of a packed row."""
        ids, positions, contexts, slots, placeholders, cu_seqlens, kv_lens, states, tables, *of_sources = flat.split(
            self.sizes
        )
        p, b = self.pools, self.segments
        return StepBatch(
            ids,
            positions,
            contexts,
            slots.view(p, self.tokens),
            placeholders,
            cu_seqlens,
            kv_lens,
            states.view(3, -1),
            tables.view(p, b, self.blocks),
            of_sources[0],
            of_sources[1].view(p, b, self.source_blocks),
        )


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The fields of one step, as the network reads them."""

    ids: Tensor  # [T]
    positions: Tensor  # [T]
    contexts: Tensor  # [T] tokens that the keys of the row's sequence are rotated for (LongRoPE)
    slots: Tensor  # [P, T] in each pool, for its keys and values
    placeholders: Tensor  # [T] row of the previous step that samples this token, if the host lacks it; else NO_SLOT
    cu_seqlens: Tensor  # [B + 1]
    kv_lens: Tensor  # [B]
    states: Tensor  # [3, B] rows, and the slots of the states that they read and write; or empty
    tables: Tensor  # [P, B, M]
    source_lens: Tensor  # [B]
    source_tables: Tensor  # [P, B, M]


def pack(
    layout: BatchLayout,
    steps: Sequence[ScheduledSequence],
    block_size: int,
    placeholders: Mapping[int, int],
    *,
    pinned: bool = False,
) -> Tensor:
    """Pack a step into a row of integers on the host.

    `placeholders` maps a sequence's `id` to its row of the previous step. A device copies from `pinned` memory while
    the host goes on.
    """
    sizes = layout.sizes
    row = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=pinned)
    flat, count = row.numpy(), layout.segments
    ids, positions, contexts, slots, rows, cu_seqlens, kv_lens, states, tables, source_lens, source_tables = _cut(
        flat, sizes
    )
    slots[:] = rows[:] = NO_SLOT
    slots = slots.reshape(layout.pools, layout.tokens)
    columns, groups = (ids, positions, contexts, slots, rows), [(0, steps)]  # groups by their first segments
    if layout.prompt_tokens:
        decodes = sum(step.num_tokens == 1 for step in steps)
        groups = [(0, steps[:decodes]), (layout.tokens - layout.prompt_tokens, steps[decodes:])]
        _pack_mixed(groups, block_size, placeholders, columns, cu_seqlens)
    elif layout.tokens == count:  # one token each, which is what nearly all steps are
        _pack_single(steps, block_size, placeholders, columns)
        cu_seqlens[:] = np.arange(count + 1)
    else:
        _pack_runs(steps, block_size, placeholders, columns)
        cu_seqlens[1:] = np.cumsum([step.num_tokens for step in steps])
    for first, group in groups:
        kv_lens[first : first + len(group)] = [step.start + step.num_tokens for step in group]
    if layout.state_columns:
        _fill_states(states.reshape(layout.state_columns, count), steps)
    tables = tables.reshape(layout.pools, -1)
    for pool, (first, group) in product(range(layout.pools), groups):
        rows_of_group = tables[pool][first * layout.blocks :]
        _fill_tables(rows_of_group, layout.blocks, [step.sequence.tables[pool] for step in group])
    if layout.source_blocks:
        source_lens[: len(steps)] = [step.sequence.source_length for step in steps]
        source_tables = source_tables.reshape(layout.pools, -1)
        for pool in range(layout.pools):
            _fill_tables(
                source_tables[pool], layout.source_blocks, [step.sequence.source_tables[pool] for step in steps]
            )
    return row


def _cut(flat: NDArray[np.int64], sizes: Sequence[int]) -> Iterator[NDArray[np.int64]]:
    begin = 0
    for size in sizes:
        yield flat[begin : begin + size]
        begin += size


def _fill_tables(flat: NDArray[np.int64], width: int, tables: Sequence[BlockTable]) -> None:
    """Write tables as rows of `width`; the rest of a row stays block 0, which is never read."""
    begin = 0
    for table in tables:
        flat[begin : begin + len(table)] = table.row
        begin += width


def _fill_states(columns: NDArray[np.int64], steps: Sequence[ScheduledSequence]) -> None:
    """Write the rows and the slots that each reads and writes; padding rows have none."""
    columns[0] = np.arange(columns.shape[1])
    columns[1:] = NO_STATE
    columns[1, : len(steps)] = [step.sequence.state_slot for step in steps]
    columns[2, : len(steps)] = [_written_slot(step) for step in steps]


def _written_slot(step: ScheduledSequence) -> int:
    """Return the slot for the state after a step. Slots for drafts that were not proposed may follow it."""
    stop = step.start + step.num_tokens
    return next(slot for tokens, slot in step.sequence.state_writes if tokens == stop)


_Column = NDArray[np.int64]
_Columns = tuple[_Column, _Column, _Column, _Column, _Column]


def _pack_single(
    steps: Sequence[ScheduledSequence], size: int, placeholders: Mapping[int, int], columns: _Columns
) -> None:
    if steps and steps[0].drafts:  # passes of a draft model: the tokens are proposals
        _pack_runs(steps, size, placeholders, columns)
        return
    ids, positions, contexts, slots, rows = columns
    count = len(steps)
    contexts[:count] = [step.sequence.rotary_context for step in steps]
    ids[:count] = [step.sequence.token_ids[step.start] for step in steps]
    positions[:count] = at = np.array([step.start for step in steps], dtype=np.int64)
    for pool, pool_slots in enumerate(slots):
        pool_slots[:count] = [step.sequence.tables[pool][step.start // size] * size for step in steps]
    slots[:, :count] += at % size
    if placeholders:
        rows[:count] = [placeholders.get(id(step.sequence), NO_SLOT) for step in steps]


def _pack_mixed(
    groups: Sequence[tuple[int, Sequence[ScheduledSequence]]],
    size: int,
    placeholders: Mapping[int, int],
    columns: _Columns,
    cu_seqlens: _Column,
) -> None:
    """Pack sequences with one token, and prompts, each in front of its padding."""
    (_, decodes), (first, prompts) = groups
    ids, positions, contexts, slots, rows = columns
    _pack_single(decodes, size, placeholders, columns)
    of_prompts = (ids[first:], positions[first:], contexts[first:], slots[:, first:], rows[first:])
    _pack_runs(prompts, size, placeholders, of_prompts)
    end = first + len(prompts)
    cu_seqlens[: first + 1] = np.arange(first + 1)
    cu_seqlens[first + 1 : end + 1] = first + np.cumsum([step.num_tokens for step in prompts])
    cu_seqlens[end + 1 :] = cu_seqlens[end]
    cu_seqlens[-1] = len(ids)


def _pack_runs(
    steps: Sequence[ScheduledSequence], size: int, placeholders: Mapping[int, int], columns: _Columns
) -> None:
    ids, positions, contexts, slots, rows = columns
    begin = 0
    for step in steps:
        end, stop = begin + step.num_tokens, step.start + step.num_tokens
        ids[begin:end] = [*step.sequence.token_ids[step.start : stop], *step.drafts]
        positions[begin:end] = at = np.arange(step.start, stop)
        contexts[begin:end] = step.sequence.rotary_context
        for pool_slots, table in zip(slots, step.sequence.tables, strict=True):
            pool_slots[begin:end] = table.row[at // size] * size + at % size
        rows[end - 1] = placeholders.get(id(step.sequence), NO_SLOT)
        begin = end
