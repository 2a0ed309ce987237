"""The results of all scenarios as a Markdown table, which can be written into a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.faults.outcomes import LOST, Ending
from triptych.loadtest.errors import UsageError

BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


@dataclass(frozen=True, slots=True)
class Row:
    """Holds one scenario's result. Times are seconds after the fault; 0: no interruption, None: no recovery."""

    name: str
    runtime: str
    rate: float  # requests a second
    ends: dict[str, int]
    ready_again_s: float | None
    served_again_s: float | None
    first_token_ms: tuple[float | None, float | None]  # p95 before the fault, and from then on
    memory_mb: tuple[float | None, float | None]  # before and after; None: the service has ended
    remark: str
    problems: tuple[str, ...]  # deviations from what is allowed

    @classmethod
    def failed(cls, name: str, runtime: str, why: str) -> Row:
        """Return the row of a scenario that could not run."""
        return cls(name, runtime, 0.0, {}, None, None, (None, None), (None, None), "", (f"PROBLEM: {why}",))

    @property
    def lost(self) -> int:
        return sum(self.ends.get(end, 0) for end in LOST)


def markdown(rows: Sequence[Row], about: str) -> str:
    columns: tuple[str, ...] = (
        "fault",
        "runtime",
        "load, req/s",
        "complete",
        "error event",
        "cut, reset",
        "503",
        "429",
        "no connection",
    )
    columns += ("lost", "ready again, s", "served again, s", "first token p95, ms", "memory, MiB", "seen")
    lines = [about, "", _line(columns), _line(["---"] * len(columns)), *(_line(_cells(row)) for row in rows)]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Replace the text between the marks in `path`. Raises `UsageError`."""
    before, after = around(path)
    path.write_text(f"{before}\n{text}{after}", encoding="utf-8")


def around(path: Path) -> tuple[str, str]:
    """Return the text of `path` up to the first mark, and from the second on. Raises `UsageError` without marks."""
    try:
        found = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--write: {path}: {error.strerror}") from None
    before, begin, rest = found.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"--write: {path}: expected the lines {BEGIN} and {END}")
    return before + begin, end + after


def _cells(row: Row) -> list[str]:
    ends = {end: row.ends.get(end, 0) for end in Ending}
    cut = ends[Ending.CUT] + ends[Ending.RESET] + ends[Ending.HUNG]
    counts = (
        ends[Ending.COMPLETE],
        ends[Ending.ERROR_EVENT],
        cut,
        ends[Ending.UNAVAILABLE],
        ends[Ending.BUSY],
        ends[Ending.REFUSED],
    )
    before, after = (_number(value, 0) for value in row.first_token_ms)
    memory = " → ".join(_number(value, 0) for value in row.memory_mb)
    seen = "; ".join(filter(None, (row.remark, *row.problems)))
    times = (_since(row.ready_again_s), _since(row.served_again_s))
    return [
        *(row.name, row.runtime, f"{row.rate:.1f}", *map(str, counts), str(row.lost), *times),
        *(f"{before} → {after}", memory, seen),
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _since(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}" if seconds else "always"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
