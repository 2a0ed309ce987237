"""Comparison of the client's figures with the server's own metrics for the same run.

Counts must be equal (a client that disconnects sees fewer tokens than the server generates). Times are compared from
the send, since a server knows no schedule, within `SHARE` or `SLACK_MS`; a histogram has an exact mean and quantiles by
bucket. The whole run is compared, with its warm-up, which the server's counters include.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from loadtest.records import Outcome, Record
from loadtest.results.statistics import Floats
from loadtest.server.prometheus import Scrape

SHARE = 0.1
SLACK_MS = 5.0
_REACHED = (Outcome.OK, Outcome.CANCELLED, Outcome.UNFINISHED)

Json = dict[str, Any]


def compare(records: Sequence[Record], before: Scrape, after: Scrape) -> list[Json]:
    """Return rows of figure, unit, both values, and whether they agree, for the metrics that the server has."""
    return [*_counts(records, before, after), *_times(records, before, after)]


def _counts(records: Sequence[Record], before: Scrape, after: Scrape) -> list[Json]:
    ok = [record for record in records if record.outcome is Outcome.OK]
    early = sum(record.outcome in (Outcome.CANCELLED, Outcome.UNFINISHED, Outcome.ERROR) for record in records)
    refused = sum(status in (429, 503) for record in records for status, _ in record.rejects)
    seen = {
        "ended": ("requests ended", len(ok), early),
        "rejected": ("refusals", refused, 0),
        "prompt_tokens": ("prompt tokens", sum(record.prompt_tokens for record in ok), early),
        "output_tokens": ("output tokens", sum(record.output_tokens for record in ok), early),
    }
    rows = []
    for figure, (name, client, slack) in seen.items():
        now = after.value(figure)
        if now is None or (figure.endswith("tokens") and not any(record.has_usage for record in ok)):
            continue
        server = now - (before.value(figure) or 0.0)
        agrees = server >= client if slack else server == client
        rows.append({"name": name, "unit": "", "client": client, "server": server, "agrees": agrees})
    return rows


def _times(records: Sequence[Record], before: Scrape, after: Scrape) -> list[Json]:
    reached = [record for record in records if record.outcome in _REACHED and record.habit != "slow"]
    from_sent = {
        "ttft": [record.first - record.sent for record in reached if record.first is not None],
        "itl": [gap for record in reached for gap in record.gaps],
        "e2e": [record.ended - record.sent for record in reached],
        "queue": [record.queue_ms / 1e3 for record in reached if record.queue_ms is not None],
    }
    names = {"ttft": "first token", "itl": "between tokens", "e2e": "end to end", "queue": "queueing"}
    rows = []
    for figure, values in from_sent.items():
        server = after.histogram(figure, before)
        if server is None or not values:
            continue
        if figure == "queue" and len(values) != server.count:  # only replies have a queueing time
            continue
        rows.append(_row(f"{names[figure]}, mean", 1e3 * float(np.mean(values)), 1e3 * server.mean, 1e3 * server.mean))
        for q, name in ((0.5, "p50"), (0.99, "p99")):
            low, high = (1e3 * bound for bound in server.quantile_bounds(q))
            rows.append(_quantile_row(f"{names[figure]}, {name}", np.sort(values), q, low, high))
    return rows


def _quantile_row(name: str, ordered: Floats, q: float, low: float, high: float) -> Json:
    """Compare a quantile; the neighbours in rank may agree instead, since one more value moves it by a rank."""
    at = max(0, math.ceil(q * len(ordered)) - 1)
    near = [1e3 * float(value) for value in ordered[max(0, at - 1) : at + 2]]
    rows = [_row(name, value, low, high) for value in near]
    return {**_row(name, 1e3 * float(ordered[at]), low, high), "agrees": any(row["agrees"] for row in rows)}


def _row(name: str, client: float, low: float, high: float) -> Json:
    slack = max(SLACK_MS, SHARE * client)
    agrees = low - slack <= client <= high + slack
    server: float | list[float | None] = low if low == high else [low, high if np.isfinite(high) else None]
    return {"name": name, "unit": "ms", "client": client, "server": server, "agrees": agrees}
