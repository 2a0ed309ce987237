"""How the requests of a run ended, as their clients saw it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum

from loadtest.records import Outcome, Record


class End(StrEnum):
    """Of one request. The last three of them are requests that were lost."""

    COMPLETE = "complete"
    TOLD = "told"  # accepted, and ended by an event that says what went wrong, then [DONE]
    BUSY = "429"
    UNAVAILABLE = "503"
    OTHER = "other"  # any other status
    REFUSED = "refused"  # no connection
    CUT = "cut"  # a stream that ended without [DONE]
    RESET = "reset"  # sent, and no answer came
    HUNG = "hung"  # neither ended nor cut when the run gave up on it


LOST = (End.CUT, End.RESET, End.HUNG)
_CONNECTING = ("ConnectError", "ConnectTimeout")
_STATUSES = {429: End.BUSY, 503: End.UNAVAILABLE}


def end(record: Record) -> End:
    if record.outcome is Outcome.UNFINISHED:
        return End.HUNG
    if record.status == 200:
        if not record.done:
            return End.CUT
        complete = record.outcome is Outcome.OK and record.finish_reason in ("stop", "length")
        return End.COMPLETE if complete else End.TOLD
    if record.status:
        return _STATUSES.get(record.status, End.OTHER)
    return End.REFUSED if record.error in _CONNECTING else End.RESET


def count(records: Iterable[Record]) -> Counter[End]:
    return Counter(map(end, records))


def lost(records: Iterable[Record]) -> int:
    """Requests that were sent and never got a proper end."""
    return sum(end(record) in LOST for record in records)


def without_retry_after(records: Iterable[Record]) -> int:
    """Refusals that do not say when to come again."""
    return sum(end(record) in (End.BUSY, End.UNAVAILABLE) and not record.retry_after for record in records)


def served_again_s(records: Iterable[Record], since: float) -> float | None:
    """Seconds from `since` to the first token of the first request behind the last that failed of those sent after
    `since`; 0: none of those failed. None: none was served any more."""
    later = sorted((record for record in records if record.sent >= since), key=lambda record: record.sent)
    failed = [number for number, record in enumerate(later) if end(record) is not End.COMPLETE]
    if not failed:
        return 0.0
    behind = [record.first for record in later[failed[-1] + 1 :] if record.first is not None]
    return min(behind) - since if behind else None


def first_token_p95_ms(records: Sequence[Record], begin: float, stop: float) -> float | None:
    """Of the complete requests that were due in this time."""
    times = sorted(
        record.ttft
        for record in records
        if begin <= record.scheduled < stop and record.ttft is not None and end(record) is End.COMPLETE
    )
    return 1000 * times[int(0.95 * len(times))] if times else None
