"""Retries the parts of a failed batch one by one, so that only the request that causes the fault fails. No torch.

So a batch that was too large for the memory succeeds in parts, too. A part writes the same values to the same KV slots
as the whole batch did, so running it again is safe. If every part raises, `probe` runs the smallest possible forward
pass; if that raises too, the model is lost. An exception outside a batch, in one model's bookkeeping, ends that model's
sequences (`GenerateEngine.recover`), unless it happens too often (`FaultLimit`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

from triptych.model.engine.scheduling.scheduled_step import ScheduledSequence, SchedulerOutput
from triptych.model.engine.scheduling.sequence import SequenceState

Part = TypeVar("Part")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


def run_isolated(
    parts: Sequence[Part], execute: Callable[[Sequence[Part]], Result], probe: Callable[[], object]
) -> list[tuple[Sequence[Part], Result | None]]:
    """Return `execute(parts)`, or, if that raises, the result of each part alone; None for a part that raises.

    If every part raised, `probe` is called; its exception is raised.
    """
    try:
        return [(parts, execute(parts))]
    except Exception:
        logger.exception("a step of %d parts broke", len(parts))
    results = [_run_part(part, execute) for part in parts] if len(parts) > 1 else [None]
    if all(result is None for result in results):
        probe()
    return [([part], result) for part, result in zip(parts, results, strict=True)]


def _run_part(part: Part, execute: Callable[[Sequence[Part]], Result]) -> Result | None:
    try:
        return execute([part])
    except Exception as error:
        logger.error("one of the parts broke alone: %s", type(error).__name__)
        return None


# -- Parts of a scheduled step that can be executed separately, for fault isolation. No torch.

Unit = list[ScheduledSequence]  # the smallest part of a step to retry: a sequence, or all beams of a search


def select(output: SchedulerOutput, steps: list[ScheduledSequence]) -> SchedulerOutput:
    """Return some of a step's sequences with the block copies that they need."""
    copies = output.copies
    if copies and len(steps) < len(output.scheduled):
        filled = {(pool, block) for step in steps for pool, table in enumerate(step.sequence.tables) for block in table}
        copies = [copy for copy in copies if (copy.pool, copy.target) in filled]
    return SchedulerOutput(steps, copies)


def uses_any(sequence: SequenceState, blocks: set[tuple[int, int]]) -> bool:
    """Return whether a sequence's tables contain one of these blocks, given as (pool, block)."""
    pairs = zip(sequence.tables, sequence.source_tables, strict=True)
    return any((pool, block) in blocks for pool, tables in enumerate(pairs) for block in chain(*tables))


def group_units(output: SchedulerOutput) -> list[Unit]:
    """Divide a step into units: a sequence each, or the beams of a search together."""
    units: dict[int, Unit] = {}
    for step in output.scheduled:
        units.setdefault(id(step.sequence.beams or step.sequence), []).append(step)
    return list(units.values())
