"""What the offline bench found: one row a workload and engine, and the tables of them.

A run in which others kept more than `QUIET_CORES` busy is busy. Medians are over the quiet runs, and ratios over the
pairs of which both were quiet; a row without any is of all its runs and says `busy`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from loadtest.bench.batches import Workload
from loadtest.bench.busy import QUIET_CORES

Answers = Sequence[dict[str, Any]]  # of a worker, one a counted run: seconds, first tokens, what others did


@dataclass(frozen=True, slots=True)
class Row:
    """One workload of one model on one engine, medians over the runs; what is None was not measured."""

    model: str
    engine: str
    workload: str
    unable: str | None = None  # why there is no figure
    rate: float | None = None  # output tokens or texts a second
    unit: str = ""
    total_rate: float | None = None  # tokens in and out a second
    seconds: float | None = None
    first_token_ms: float | None = None  # the median request's
    floor_seconds: float | None = None
    of_floor: float | None = None  # floor / seconds
    ratio: float | None = None  # how many times as fast as this peer we were, the median of the pairs
    peak_bytes: int | None = None
    busy: bool = False  # no run of it, or no pair, was quiet
    runs: tuple[dict[str, float | None], ...] = ()  # seconds and foreign cores of each counted run


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step in which `batch` sequences decode."""

    model: str
    batch: int
    milliseconds: float
    floor_milliseconds: float
    of_floor: float
    foreign_cores: float | None


def is_quiet(answer: dict[str, Any]) -> bool:
    """Whether others left the machine alone in that run; where that cannot be known, they did."""
    found = answer["foreign_cores"]
    return found is None or found < QUIET_CORES


def row(model: str, engine: str, workload: Workload, answers: Answers, floor: float, ours: Answers | None) -> Row:
    """The row of an engine's `answers`; `ours` are those of the same turns, None where the row is ours."""
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
        unit="tokens/s" if workload.output_tokens else "texts/s",
        total_rate=(workload.input_tokens + workload.output_tokens) / seconds,
        seconds=seconds,
        first_token_ms=statistics.median(firsts) * 1e3 if firsts and workload.beams == 1 else None,
        floor_seconds=floor,
        of_floor=floor / seconds,
        ratio=ratio,
        peak_bytes=max(answer["peak_bytes"] for answer in answers),
        busy=busy,
        runs=tuple({"seconds": a["seconds"], "foreign_cores": a["foreign_cores"]} for a in answers),
    )


def brief(found: Row) -> str:
    """The row in a line, for who waits."""
    head = " ".join(filter(None, (found.model, found.engine, found.workload)))
    if found.unable is not None:
        return f"{head}: {found.unable}"
    ratio = "" if found.ratio is None else f"ours is {found.ratio:.2f}x, "
    others = _others([run["foreign_cores"] for run in found.runs], found.busy)
    return f"{head}: {found.rate:,.1f} {found.unit}, {found.seconds:.2f} s, {ratio}others {others}"


def table(rows: Sequence[Row]) -> Table:
    columns = ("model", "engine", "workload", "out", "total tokens/s", "seconds", "first token", "of floor")
    made = Table(*columns, "ours is", "peak", "others", title="offline engine", title_justify="left")
    for found in rows:
        made.add_row(found.model, found.engine, found.workload, *_cells(found))
    return made


def steps_table(rows: Sequence[StepRow], context: int) -> Table:
    made = Table("model", "sequences", "ms a step", "floor ms", "of floor", "others", title_justify="left")
    made.title = f"decode steps, context {context}"
    for found in rows:
        cells = (found.milliseconds, found.floor_milliseconds)
        others = _others([found.foreign_cores], (found.foreign_cores or 0.0) >= QUIET_CORES)
        made.add_row(found.model, str(found.batch), *(f"{ms:.2f}" for ms in cells), f"{found.of_floor:.0%}", others)
    return made


def _cells(found: Row) -> tuple[str, ...]:
    if found.unable is not None:
        return (f"-: {found.unable}",)
    assert found.rate and found.total_rate and found.seconds and found.of_floor and found.peak_bytes
    return (
        f"{found.rate:,.1f} {found.unit}",
        f"{found.total_rate:,.0f}",
        f"{found.seconds:.2f}",
        "" if found.first_token_ms is None else f"{found.first_token_ms:,.0f} ms",
        f"{found.of_floor:.0%}",
        "" if found.ratio is None else f"{found.ratio:.2f}x",
        f"{found.peak_bytes / 1e6:,.0f} MB",
        _others([run["foreign_cores"] for run in found.runs], found.busy),
    )


def _others(cores: Sequence[float | None], busy: bool) -> str:
    """Cores that others kept busy in each run."""
    known = " ".join("?" if found is None else f"{found:.2f}" for found in cores)
    return f"{known} busy" if busy else known
