"""Classification of how requests ended, as their clients saw it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum

from triptych.loadtest.records import Outcome, Record


class Ending(StrEnum):
    """Says how one request ended. The last three count as lost."""

    COMPLETE = "complete"
    ERROR_EVENT = "error event"  # accepted, and ended by an error event and [DONE]
    BUSY = "429"
    UNAVAILABLE = "503"
    OTHER = "other"  # any other status
    REFUSED = "refused"  # no connection
    CUT = "cut"  # the stream ended without [DONE]
    RESET = "reset"  # sent, and the connection ended without a reply
    HUNG = "hung"  # had not ended at the end of the run


LOST = (Ending.CUT, Ending.RESET, Ending.HUNG)
_CONNECTING = ("ConnectError", "ConnectTimeout")
_STATUSES = {429: Ending.BUSY, 503: Ending.UNAVAILABLE}


def end(record: Record) -> Ending:
    if record.outcome is Outcome.UNFINISHED:
        return Ending.HUNG
    if record.status == 200:
        if not record.done:
            return Ending.CUT
        complete = record.outcome is Outcome.OK and record.finish_reason in ("stop", "length")
        return Ending.COMPLETE if complete else Ending.ERROR_EVENT
    if record.status:
        return _STATUSES.get(record.status, Ending.OTHER)
    return Ending.REFUSED if record.error in _CONNECTING else Ending.RESET


def count(records: Iterable[Record]) -> Counter[Ending]:
    return Counter(map(end, records))


def lost(records: Iterable[Record]) -> int:
    """Return the number of requests that were sent and did not end properly."""
    return sum(end(record) in LOST for record in records)


def without_retry_after(records: Iterable[Record]) -> int:
    """Return the number of refusals without Retry-After."""
    return sum(end(record) in (Ending.BUSY, Ending.UNAVAILABLE) and not record.retry_after for record in records)


def served_again_s(records: Iterable[Record], since: float) -> float | None:
    """Return the seconds from `since` until requests succeed again.

    This is the first token of the first request after the last failed one, of those sent after `since`. 0: none failed.
    None: no request succeeded any more.
    """
    later = sorted((record for record in records if record.sent >= since), key=lambda record: record.sent)
    failed = [number for number, record in enumerate(later) if end(record) is not Ending.COMPLETE]
    if not failed:
        return 0.0
    after = [record.first for record in later[failed[-1] + 1 :] if record.first is not None]
    return min(after) - since if after else None


def first_token_p95_ms(records: Sequence[Record], begin: float, stop: float) -> float | None:
    """Return the p95 time to first token of complete requests that were scheduled in this time."""
    times = sorted(
        record.ttft
        for record in records
        if begin <= record.scheduled < stop and record.ttft is not None and end(record) is Ending.COMPLETE
    )
    return 1000 * times[int(0.95 * len(times))] if times else None
