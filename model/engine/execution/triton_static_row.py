"""A Triton kernel that fills the row of a recorded step. Import this module only if Triton is installed."""

from __future__ import annotations

import triton
from torch import Tensor
from triton import language as tl

from triptych.model.engine.execution.batch import BatchLayout
from triptych.model.system.held_kernels import held

_BLOCK = 1024
_SIZES = ["count", "before", "tables", "used_blocks", "blocks", "segments", "used_source_blocks", "source_blocks"]


@held
@triton.jit(do_not_specialize=[*_SIZES, "num_tokens", "placeholders"])
def fill_kernel(
    row,  # the recorded layout's integers, int64
    packed,  # the step's integers, int64
    sampled,  # [N] int64, tokens that the previous step sampled; or None
    count,  # integers of `packed`
    before,  # integers before the tables
    tables,  # pools times segments
    used_blocks,  # columns of the step's tables
    blocks,  # columns of the recorded layout's tables
    segments,  # lengths of sources
    used_source_blocks,
    source_blocks,
    num_tokens,  # token ids, which come first
    placeholders,  # where their placeholders begin
    BLOCK: tl.constexpr,
):
    """Copy a step with narrower tables, and put in the tokens that its placeholders stand for. Grid: blocks of it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    values = tl.load(packed + at, mask=there, other=0)
    if sampled is not None:
        is_id = at < num_tokens
        place = tl.load(packed + placeholders + at, mask=is_id, other=-1)
        values = tl.where(place >= 0, tl.load(sampled + place, mask=place >= 0, other=0), values)
    table = at - before
    to = tl.where(table < 0, at, before + table // used_blocks * blocks + table % used_blocks)
    lens = table - tables * used_blocks
    to = tl.where(lens >= 0, before + tables * blocks + lens, to)
    source = lens - segments
    columns = tl.maximum(used_source_blocks, 1)
    source_to = before + tables * blocks + segments + source // columns * source_blocks + source % columns
    to = tl.where((lens >= 0) & (source >= 0), source_to, to)
    tl.store(row + to, values, mask=there)


def fill(row: Tensor, layout: BatchLayout, packed: Tensor, used: BatchLayout, sampled: Tensor | None) -> None:
    """Fill a recorded `layout`'s row with the step `packed` by `used`, which has as many tokens and segments."""
    count = len(packed)
    fill_kernel[(triton.cdiv(count, _BLOCK),)](
        row,
        packed,
        sampled,
        count,
        used.before_tables,
        used.pools * used.segments,
        used.blocks,
        layout.blocks,
        used.segments,
        used.source_blocks,
        layout.source_blocks,
        used.tokens,
        sum(used.sizes[:4]),
        BLOCK=_BLOCK,
        num_warps=4,
    )
