"""Progress of a run on standard error: a rewritten line on a terminal, else a plain line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from triptych.loadtest.generator.fleet import Collected
from triptych.loadtest.records import Outcome, Record
from triptych.loadtest.settings import Settings

PLAIN_LINE_S = 5.0
RECENT_S = 5.0  # the figures are of requests that ended within this time


class Progress:
    """Shows the workers' reports; `quiet` shows nothing."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._live: Live | None = None
        self._printed = 0.0

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self._console.print(Text(text), soft_wrap=True)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the rewritten line inside the block, on a terminal."""
        self._printed = time.monotonic()
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, transient=True, auto_refresh=False) as self._live:
            yield
        self._live = None

    def update(self, loads: Sequence[tuple[str, Settings, Collected]], at: float) -> None:
        """Show name, settings and reports of each load; `at`: seconds since the run's start."""
        if self._live is not None:
            self._live.update(_lines(loads, at), refresh=True)
        elif time.monotonic() - self._printed >= PLAIN_LINE_S:
            self._printed = time.monotonic()
            self._console.print(_lines(loads, at), soft_wrap=True)


def _lines(loads: Sequence[tuple[str, Settings, Collected]], at: float) -> Text:
    """Return one line for each load, after its name."""
    width = max(len(name) for name, _, _ in loads)
    lines = [
        Text(f"{name:{width}}  " if width else "").append(_line(settings, collected, at))
        for name, settings, collected in loads
    ]
    return Text("\n").join(lines)


def _line(settings: Settings, collected: Collected, at: float) -> Text:
    records = collected.records
    recent = [record for record in _newest(records) if record.ended > at - RECENT_S]
    span = min(RECENT_S, max(at, 0.1))
    ok = [record for record in recent if record.outcome is Outcome.OK]
    line = Text(f"{_bar(settings, len(records), at)}  {at:5.1f} s  ")
    line.append(f"{len(records)} done  {sum(collected.in_flight)} in progress  ")
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
    """Return the last records, enough to include those of `RECENT_S` at any rate of one host."""
    return records[-20_000:]


def _bar(settings: Settings, done: int, at: float) -> str:
    width = 16
    share = done / settings.requests if settings.requests else at / settings.duration_s if settings.duration_s else 0
    filled = round(width * min(1.0, max(0.0, share)))
    return "━" * filled + "─" * (width - filled)
