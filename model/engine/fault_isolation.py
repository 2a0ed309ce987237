"""Fault isolation retries the parts of a failed batch one by one. Stdlib only.

A step that raises is run again part by part. So a request on which the model raises fails alone, and a batch that was
too large for the memory succeeds in parts. A part writes the same values to the same KV slots as the whole batch did,
so running it again is safe. If every part raises, `probe` runs the smallest possible forward pass; if that raises too,
the model is lost. An exception outside a batch, in one model's bookkeeping, ends that model's sequences
(`Engine.recover`), unless it happens too often (`FaultLimit`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

Part = TypeVar("Part")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


def run_isolated(
    parts: Sequence[Part], execute: Callable[[Sequence[Part]], Result], probe: Callable[[], object]
) -> list[tuple[Sequence[Part], Result | None]]:
    """Return `execute(parts)`, or, if that raises, the result of each part alone; None for a part that raises.

    Raises what `probe` raises, if every part raised.
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
