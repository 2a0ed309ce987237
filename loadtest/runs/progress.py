"""How a run goes, on standard error: one line that is rewritten on a terminal, else a plain line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from loadtest.generator.fleet import Gathered
from loadtest.records import Outcome, Record
from loadtest.settings import Settings

PLAIN_LINE_S = 5.0
RECENT_S = 5.0  # the figures shown are of what ended since


class Progress:
    """Shows what the workers told; `quiet` shows nothing."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._live: Live | None = None
        self._printed = 0.0

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(Text(text), soft_wrap=True)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The rewritten line is there, on a terminal."""
        self._printed = time.monotonic()
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, transient=True, auto_refresh=False) as self._live:
            yield
        self._live = None

    def update(self, loads: Sequence[tuple[str, Settings, Gathered]], at: float) -> None:
        """Name, settings and what its workers told of each load of the run; `at`: seconds since the run's start."""
        if self._live is not None:
            self._live.update(_lines(loads, at), refresh=True)
        elif time.monotonic() - self._printed >= PLAIN_LINE_S:
            self._printed = time.monotonic()
            self._console.print(_lines(loads, at), soft_wrap=True)


def _lines(loads: Sequence[tuple[str, Settings, Gathered]], at: float) -> Text:
    """One for each load, behind its name."""
    width = max(len(name) for name, _, _ in loads)
    lines = [
        Text(f"{name:{width}}  " if width else "").append(_line(settings, gathered, at))
        for name, settings, gathered in loads
    ]
    return Text("\n").join(lines)


def _line(settings: Settings, gathered: Gathered, at: float) -> Text:
    records = gathered.records
    recent = [record for record in _newest(records) if record.ended > at - RECENT_S]
    span = min(RECENT_S, max(at, 0.1))
    ok = [record for record in recent if record.outcome is Outcome.OK]
    line = Text(f"{_bar(settings, len(records), at)}  {at:5.1f} s  ")
    line.append(f"{len(records)} done  {sum(gathered.in_flight)} under way  ")
    line.append(f"{len(ok) / span:.1f} req/s  {sum(record.output_tokens for record in ok) / span:.0f} tok/s  ", "bold")
    firsts = [record.ttft for record in ok if record.ttft is not None]
    if firsts:
        line.append(f"TTFT p50 {1e3 * float(np.median(firsts)):.0f} ms  ")
    elif ok:
        line.append(f"p50 {1e3 * float(np.median([record.e2e for record in ok])):.0f} ms  ")
    for outcome in (Outcome.REJECTED, Outcome.ERROR):
        if count := sum(record.outcome is outcome for record in records):
            line.append(f"{count} {outcome.value}  ", "yellow" if outcome is Outcome.REJECTED else "red")
    return line


def _newest(records: list[Record]) -> list[Record]:
    """Enough of the last ones to hold those of `RECENT_S` at any rate that one host can make."""
    return records[-20_000:]


def _bar(settings: Settings, done: int, at: float) -> str:
    width = 16
    share = done / settings.requests if settings.requests else at / settings.duration_s if settings.duration_s else 0
    filled = round(width * min(1.0, max(0.0, share)))
    return "━" * filled + "─" * (width - filled)
