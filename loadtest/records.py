"""The record of each request. Times are seconds since the run's start, on the host's monotonic clock."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class Outcome(StrEnum):
    """Says how a request ended, as its client saw it."""

    OK = "ok"
    REJECTED = "rejected"  # 429 or 503: refused before any work
    ERROR = "error"
    CANCELLED = "cancelled"  # by the client, as planned
    UNFINISHED = "unfinished"  # in progress when the run ended


@dataclass(slots=True)
class Record:
    """Records one request. `scheduled` is the planned time of sending, from which latencies are measured."""

    index: int
    turn: int
    habit: str  # "", cancel, slow, retry
    scheduled: float
    planned_prompt_tokens: int
    planned_output_tokens: int
    begun: float = 0.0  # when the generator handled it; its lag is `begun - scheduled`
    sent: float = 0.0  # the last attempt
    ended: float = 0.0
    outcome: Outcome = Outcome.UNFINISHED
    status: int = 0  # of HTTP; 0: no reply
    error: str = ""  # an error code or a kind of failure
    finish_reason: str = ""
    done: bool = False  # whether a stream's [DONE] arrived
    retry_after: bool = False  # whether the last refusal had a Retry-After
    attempts: int = 0
    rejects: list[tuple[int, float]] = field(
        default_factory=list
    )  # status of each refused attempt, and seconds until it
    token_times: list[float] = field(default_factory=list)  # arrival of each event with output
    token_counts: list[int] = field(default_factory=list)  # tokens of each event, if the server reports them
    silent_tokens: int = 0  # tokens of events without text, if the server reports them
    prompt_tokens: int = 0  # from the server's usage; 0 if it sends none
    completion_tokens: int = 0
    cached_tokens: int = 0
    has_usage: bool = False
    queue_ms: float | None = None  # from the reply's `timings`, if it has them
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
        """Time to first token: seconds from the scheduled send to the first output."""
        return None if self.first is None else self.first - self.scheduled

    @property
    def e2e(self) -> float:
        return self.ended - self.scheduled

    @property
    def output_tokens(self) -> int:
        """The server's count of output tokens; without usage, the number of events with output."""
        if self.has_usage:
            return self.completion_tokens
        return max(sum(self.token_counts), len(self.token_times))

    @property
    def tpot(self) -> float | None:
        """Time per output token: mean seconds of the tokens after the first."""
        if len(self.token_times) < 2 or self.output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Return the inter-token latencies in seconds; an event of several tokens divides its gap among them."""
        return self.gaps_from(-math.inf, math.inf)

    def gaps_from(self, start: float, end: float) -> list[float]:
        """Return the inter-token latencies that began between `start` and `end`."""
        pairs = zip(self.token_times, self.token_times[1:], strict=False)
        reported = len(self.token_counts) == len(self.token_times)  # by every event
        counts = self.token_counts[1:] if reported else [1] * len(self.token_times[1:])
        within = ((before, after, n) for (before, after), n in zip(pairs, counts, strict=True) if start <= before < end)
        return [(after - before) / n for before, after, n in within for _ in range(n) if n]


_COLUMNS = (
    *("index", "turn", "habit", "outcome", "status", "error", "finish_reason", "attempts", "scheduled", "begun"),
    *("sent", "first", "ended", "ttft", "tpot", "e2e", "planned_prompt_tokens", "planned_output_tokens"),
    *("prompt_tokens", "completion_tokens", "cached_tokens", "queue_ms", "prefill_ms", "decode_ms"),
    *("server_ttft_ms", "server_total_ms"),
)


def write_csv(records: Iterable[Record], path: Path) -> None:
    """Write one line for each request; times are seconds since the start, and missing values are empty."""
    _write(path, _COLUMNS, map(_cells, records))


def write_parts_csv(head: str, parts: Iterable[tuple[str, Iterable[Record]]], path: Path) -> None:
    """Write the requests of several parts (points of a sweep, workloads of a mix), whose names are the column `head`.

    Times are since the start of each part's run.
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
