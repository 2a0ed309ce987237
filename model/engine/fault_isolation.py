"""Steps that raise: who is to blame, a request, a model or the engine. Stdlib only.

A batch that breaks is tried again one part at a time, so that a request on which the model breaks fails alone and a
batch that was too large for the memory goes through in pieces. Parts write the same values to the same places as the
whole did, so trying again is harmless. Where no part works, the smallest possible pass decides: if that breaks too, so
has the engine, and its loop must end. What raises around a batch, in one model's own bookkeeping, costs that model its
sequences (`Engine.recover`), unless it happens too often.
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
    """`execute(parts)`, or if that raises, of each part alone; None for a part that raises alone.

    Raises what `probe` raises where nothing works.
    """
    try:
        return [(parts, execute(parts))]
    except Exception:
        logger.exception("a step of %d parts broke", len(parts))
    alone = [_alone(part, execute) for part in parts] if len(parts) > 1 else [None]
    if all(one is None for one in alone):
        probe()
    return [([part], one) for part, one in zip(parts, alone, strict=True)]


def _alone(part: Part, execute: Callable[[Sequence[Part]], Result]) -> Result | None:
    try:
        return execute([part])
    except Exception as error:
        logger.error("one of the parts broke alone: %s", type(error).__name__)
        return None
