"""Parts of a scheduled step that can be executed separately, for fault isolation. No torch."""

from __future__ import annotations

from itertools import chain

from model.engine.scheduling.scheduled_step import ScheduledSequence, SchedulerOutput
from model.engine.scheduling.sequence import SequenceState

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
