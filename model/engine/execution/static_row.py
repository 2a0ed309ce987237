"""Fills the row of integers that a recorded step reads, and puts in the tokens that the host does not know yet."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych.model.engine.execution.batch import BatchLayout, StepBatch
from triptych.model.system import fallbacks
from triptych.model.system.devices import has_triton

_KERNEL = "the row of a recorded step is filled in several kernels"


def fill_row(static: Tensor, layout: BatchLayout, packed: Tensor, used: BatchLayout, tokens: Tensor | None) -> None:
    """Copy a step with shorter tables to the recorded `layout` of a static row; the rest of a table is never read.

    `tokens` are those that the previous step sampled, which placeholders stand for; None if there are none.
    """
    if not (packed.is_cuda and _filled_by_kernel(static, layout, packed, used, tokens)):
        step = _copied(static[: sum(layout.sizes)], layout, packed, used)
        if tokens is not None:
            fill_placeholders(step, tokens)


def fill_placeholders(step: StepBatch, tokens: Tensor) -> None:
    """Replace placeholders by the tokens that the previous step sampled, on the device."""
    known = step.placeholders < 0
    step.ids.copy_(torch.where(known, step.ids, tokens[step.placeholders.clamp(min=0)]))


def _filled_by_kernel(
    static: Tensor, layout: BatchLayout, packed: Tensor, used: BatchLayout, tokens: Tensor | None
) -> bool:
    """Fill the row by one kernel, and return whether that worked: torch takes ten, some 250 us on the host."""
    if fallbacks.noted(_KERNEL) or not has_triton(packed.device):
        return False
    from triptych.model.engine.execution import triton_static_row

    with torch.cuda.device_of(packed):
        filled = fallbacks.attempt(_KERNEL, triton_static_row.fill, static, layout, packed, used, tokens)
    return filled is not NotImplemented


def use_torch(error: Exception) -> None:
    """Fill rows by torch from now on, as the kernel is broken."""
    fallbacks.note_once(_KERNEL, error)


def _copied(row: Tensor, layout: BatchLayout, packed: Tensor, used: BatchLayout) -> StepBatch:
    step, new = layout.split(row), used.split(packed)
    row[: layout.before_tables].copy_(packed[: layout.before_tables])
    step.tables[..., : used.blocks].copy_(new.tables)
    step.source_lens.copy_(new.source_lens)
    if layout.source_blocks:
        step.source_tables[..., : used.source_blocks].copy_(new.source_tables)
    return step
