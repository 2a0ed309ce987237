"""Rows and tables of the offline benchmark: one row for each workload and engine.

A run is busy if other processes used more than `QUIET_CORES`. Medians are over quiet runs, and ratios over pairs of
quiet runs; a row without any uses all its runs and is marked `busy`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from lab.bench.batches import Workload
from lab.bench.busy import QUIET_CORES

Answers = Sequence[dict[str, Any]]  # of an engine process, one for each counted run


@dataclass(frozen=True, slots=True)
class Row:
    """Holds one workload of one model on one engine, as medians over runs; None: not measured."""

    model: str
    engine: str
    workload: str
    unable: str | None = None  # the reason for missing figures
    rate: float | None = None  # output tokens, texts or pictures a second
    unit: str = ""
    total_rate: float | None = None  # input and output tokens a second
    seconds: float | None = None
    first_token_ms: float | None = None  # of the median request
    roofline_seconds: float | None = None
    of_roofline: float | None = None  # roofline / seconds
    ratio: float | None = None  # speed of triptych relative to this peer, the median over pairs
    cosine: float | None = None  # the lowest of an encoder's vectors to those in float32
    peak_bytes: int | None = None
    busy: bool = False  # no run, or no pair, was quiet
    runs: tuple[dict[str, float | None], ...] = ()  # seconds and foreign cores of each counted run


@dataclass(frozen=True, slots=True)
class StepRow:
    """Holds the time of a step in which `batch` sequences decode."""

    model: str
    batch: int
    milliseconds: float
    roofline_milliseconds: float
    of_roofline: float
    foreign_cores: float | None


def is_quiet(answer: dict[str, Any]) -> bool:
    """Return whether other processes were idle in that run; if unknown, they count as idle."""
    found = answer["foreign_cores"]
    return found is None or found < QUIET_CORES


def row(
    model: str,
    engine: str,
    workload: Workload,
    answers: Answers,
    roofline: float,
    ours: Answers | None,
    cosine: float | None = None,
    unit: str = "tokens/s",
) -> Row:
    """Return the row of an engine's answers; `ours` are triptych's of the same turns, None for triptych's own row."""
    quiet = [answer for answer in answers if is_quiet(answer)]
    busy = not quiet
    counted = quiet or answers
    ratio = None
    if ours is not None:
        pairs = list(zip(answers, ours, strict=True))
        quiet_pairs = [pair for pair in pairs if all(map(is_quiet, pair))]
        busy = busy or not quiet_pairs
        ratio = statistics.median(theirs["seconds"] / own["seconds"] for theirs, own in quiet_pairs or pairs)
    seconds = statistics.median(answer["seconds"] for answer in counted)
    firsts = [statistics.median(a["first_token_seconds"]) for a in counted if a["first_token_seconds"]]
    return Row(
        model=model,
        engine=engine,
        workload=workload.name,
        rate=(workload.output_tokens or len(workload.asks)) / seconds,
        unit=unit,
        total_rate=(workload.input_tokens + workload.output_tokens) / seconds,
        seconds=seconds,
        first_token_ms=statistics.median(firsts) * 1e3 if firsts and workload.beams == 1 else None,
        roofline_seconds=roofline,
        of_roofline=roofline / seconds,
        ratio=ratio,
        cosine=cosine,
        peak_bytes=max(answer["peak_bytes"] for answer in answers),
        busy=busy,
        runs=tuple({"seconds": a["seconds"], "foreign_cores": a["foreign_cores"]} for a in answers),
    )


def lowest_cosine(found: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> float:
    """Return the lowest cosine of the angles between pairs of vectors."""
    return min(
        sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))
        for a, b in zip(found, wanted, strict=True)
    )


def brief(found: Row) -> str:
    """Return the row as one line, for progress."""
    head = " ".join(filter(None, (found.model, found.engine, found.workload)))
    if found.unable is not None:
        return f"{head}: {found.unable}"
    ratio = "" if found.ratio is None else f"ours is {found.ratio:.2f}x, "
    others = _others([run["foreign_cores"] for run in found.runs], found.busy)
    cosine = "" if found.cosine is None else f"cosine {found.cosine:.5f}, "
    return f"{head}: {found.rate:,.1f} {found.unit}, {found.seconds:.2f} s, {ratio}{cosine}others {others}"


def table(rows: Sequence[Row]) -> Table:
    columns = ("model", "engine", "workload", "out", "total tokens/s", "seconds", "first token", "of roofline")
    made = Table(*columns, "ours is", "cosine", "peak", "others", title="offline engine", title_justify="left")
    for found in rows:
        made.add_row(found.model, found.engine, found.workload, *_cells(found))
    return made


def steps_table(rows: Sequence[StepRow], context: int) -> Table:
    made = Table("model", "sequences", "ms a step", "roofline ms", "of roofline", "others", title_justify="left")
    made.title = f"decode steps, context {context}"
    for found in rows:
        cells = (found.milliseconds, found.roofline_milliseconds)
        others = _others([found.foreign_cores], (found.foreign_cores or 0.0) >= QUIET_CORES)
        made.add_row(found.model, str(found.batch), *(f"{ms:.2f}" for ms in cells), f"{found.of_roofline:.0%}", others)
    return made


def _cells(found: Row) -> tuple[str, ...]:
    if found.unable is not None:
        return (f"-: {found.unable}",)
    assert found.rate and found.total_rate and found.seconds and found.of_roofline and found.peak_bytes
    return (
        f"{found.rate:,.1f} {found.unit}",
        f"{found.total_rate:,.0f}",
        f"{found.seconds:.2f}",
        "" if found.first_token_ms is None else f"{found.first_token_ms:,.0f} ms",
        f"{found.of_roofline:.0%}",
        "" if found.ratio is None else f"{found.ratio:.2f}x",
        "" if found.cosine is None else f"{found.cosine:.5f}",
        f"{found.peak_bytes / 1e6:,.0f} MB",
        _others([run["foreign_cores"] for run in found.runs], found.busy),
    )


def _others(cores: Sequence[float | None], busy: bool) -> str:
    """Return the cores that other processes used in each run."""
    known = " ".join("?" if found is None else f"{found:.2f}" for found in cores)
    return f"{known} busy" if busy else known
