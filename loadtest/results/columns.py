"""Records as columns of a JSON document, from which reports are drawn and comparisons are resampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from loadtest.records import Outcome, Record

Json = dict[str, Any]

_COLUMNS: dict[str, Callable[[Record], object]] = {
    "scheduled_s": lambda record: round(record.scheduled, 4),
    "ended_s": lambda record: round(record.ended, 4),
    "first_s": lambda record: _rounded(record.first, 1, 4),
    "outcome": lambda record: record.outcome.value,
    "slow": lambda record: record.habit == "slow",
    "prompt_tokens": lambda record: record.prompt_tokens or record.planned_prompt_tokens,
    "output_tokens": lambda record: record.output_tokens,
    "ttft_ms": lambda record: _rounded(record.ttft, 1e3, 2),
    "tpot_ms": lambda record: _rounded(record.tpot, 1e3, 3),
    "e2e_ms": lambda record: round(1e3 * record.e2e, 2),
    "gaps_ms": lambda record: [round(1e3 * gap, 2) for gap in record.gaps],
}


def of(records: Sequence[Record]) -> Json:
    """Return a list for each column, in the order of `records`."""
    return {name: [value(record) for record in records] for name, value in _COLUMNS.items()}


def answered(columns: Json, name: str, warmup_s: float) -> list[list[float]]:
    """Return one figure of each request that counts for latencies: with a reply, not slow by plan, not warm-up."""
    kept = (
        value
        for value, outcome, slow, at in zip(
            columns[name], columns["outcome"], columns["slow"], columns["scheduled_s"], strict=True
        )
        if outcome == Outcome.OK and not slow and at >= warmup_s and value is not None
    )
    return [value if isinstance(value, list) else [value] for value in kept]


def _rounded(value: float | None, scale: float, digits: int) -> float | None:
    return None if value is None else round(scale * value, digits)
