"""What is kept of each request. Times are seconds since the run's start, on the one monotonic clock of the host."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class Outcome(StrEnum):
    """How a request ended, as its client saw it."""

    OK = "ok"
    REJECTED = "rejected"  # 429 or 503: refused before any work
    ERROR = "error"
    CANCELLED = "cancelled"  # by the client's own habit
    UNFINISHED = "unfinished"  # under way when the run ended


@dataclass(slots=True)
class Record:
    """One request. `scheduled` is when it was due: latencies count from there, whenever it could be sent."""

    index: int
    turn: int
    habit: str  # "", cancel, slow, retry
    scheduled: float
    planned_prompt_tokens: int
    planned_output_tokens: int
    begun: float = 0.0  # when the generator came to it; minus `scheduled`: its lag
    sent: float = 0.0  # the last attempt
    ended: float = 0.0
    outcome: Outcome = Outcome.UNFINISHED
    status: int = 0  # of HTTP; 0: no answer
    error: str = ""  # a code or a kind of failure
    finish_reason: str = ""
    done: bool = False  # a stream's [DONE] came: it was ended, not cut off
    retry_after: bool = False  # the last refusal said when to come again
    attempts: int = 0
    rejects: list[tuple[int, float]] = field(default_factory=list)  # status and seconds until it, of every attempt
    token_times: list[float] = field(default_factory=list)  # of each event with output
    token_counts: list[int] = field(default_factory=list)  # tokens of each, where the server tells
    silent_tokens: int = 0  # of events without text, where the server tells
    prompt_tokens: int = 0  # of the server's usage, 0 where it sends none
    completion_tokens: int = 0
    cached_tokens: int = 0
    has_usage: bool = False
    queue_ms: float | None = None  # the reply's `timings`, where it has them
    prefill_ms: float | None = None
    decode_ms: float | None = None
    server_ttft_ms: float | None = None
    server_total_ms: float | None = None

    @property
    def lag(self) -> float:
        return self.begun - self.scheduled

    @property
    def first(self) -> float | None:
        return self.token_times[0] if self.token_times else None

    @property
    def ttft(self) -> float | None:
        """Seconds from the scheduled send to the first output."""
        return None if self.first is None else self.first - self.scheduled

    @property
    def e2e(self) -> float:
        return self.ended - self.scheduled

    @property
    def output_tokens(self) -> int:
        """The server's count; of a request without usage, what was seen."""
        if self.has_usage:
            return self.completion_tokens
        return max(sum(self.token_counts), len(self.token_times))

    @property
    def tpot(self) -> float | None:
        """Mean seconds for each token after the first."""
        if len(self.token_times) < 2 or self.output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens; an event that says it holds several shares its gap among them."""
        return self.gaps_from(-math.inf, math.inf)

    def gaps_from(self, start: float, end: float) -> list[float]:
        """Those that began within `start` to `end`."""
        pairs = zip(self.token_times, self.token_times[1:], strict=False)
        told = len(self.token_counts) == len(self.token_times)  # by every event
        counts = self.token_counts[1:] if told else [1] * len(self.token_times[1:])
        within = ((before, after, n) for (before, after), n in zip(pairs, counts, strict=True) if start <= before < end)
        return [(after - before) / n for before, after, n in within for _ in range(n) if n]


_COLUMNS = (
    *("index", "turn", "habit", "outcome", "status", "error", "finish_reason", "attempts", "scheduled", "begun"),
    *("sent", "first", "ended", "ttft", "tpot", "e2e", "planned_prompt_tokens", "planned_output_tokens"),
    *("prompt_tokens", "completion_tokens", "cached_tokens", "queue_ms", "prefill_ms", "decode_ms"),
    *("server_ttft_ms", "server_total_ms"),
)


def write_csv(records: Iterable[Record], path: Path) -> None:
    """A line a request; times in seconds since the start, empty where there is no value."""
    _write(path, _COLUMNS, map(_cells, records))


def write_parts_csv(head: str, parts: Iterable[tuple[str, Iterable[Record]]], path: Path) -> None:
    """The same of the requests of each part (a point of a sweep, a workload of a mix), which stands before them in a
    column `head`; times since the start of the part's run.
    """
    lines = ([part, *_cells(record)] for part, records in parts for record in records)
    _write(path, (head, *_COLUMNS), lines)


def _write(path: Path, head: Iterable[str], lines: Iterable[Iterable[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(lines)


def _cells(record: Record) -> list[object]:
    return [_shown(getattr(record, name)) for name in _COLUMNS]


def _shown(value: object) -> object:
    return f"{value:.6f}" if isinstance(value, float) else "" if value is None else value
