"""A sweep, which raises the load until the server saturates, then finds the highest load within the SLO by bisection.

A point is saturated if the backlog grows during the window by more than `GROWTH` of the offered requests, and by more
than chance, or if more than `FAILED` are refused or fail. A closed loop, which cannot offer too much, is saturated if
its throughput is less than `GAIN` above that of half as many clients (scaled to the step). The knee is the highest load
that is not saturated. Without an SLO, a point that is not saturated counts as within it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from triptych.loadtest.errors import UsageError
from triptych.loadtest.records import Record
from triptych.loadtest.results.slo import Limit
from triptych.loadtest.runs import output
from triptych.loadtest.runs.progress import Progress
from triptych.loadtest.runs.run import SCHEMA, Subject, measure
from triptych.loadtest.settings import Settings

GROWTH = 0.05
FAILED = 0.01
GAIN = 0.1  # when the load doubles
CLOSE = 1.03  # loads with a smaller ratio count as equal
ARRIVALS = {"rate": ("constant", "poisson", "gamma"), "concurrency": ("closed",)}  # allowed for each kind of load

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """Holds the first `loads`, rising, then doubled up to `maximum`, and the number of `bisections`."""

    over: str  # rate or concurrency
    loads: tuple[float, ...]
    maximum: float
    bisections: int

    @classmethod
    def parse(cls, over: str, points: str, first: float, maximum: float, bisections: int) -> Self:
        """Parse the plan of a sweep; raises `UsageError`."""
        try:
            loads = tuple(sorted(float(part) for part in points.split(",") if part.strip())) or (first,)
            if min(loads) <= 0 or (over == "concurrency" and any(load != int(load) for load in loads)):
                raise ValueError
        except ValueError:
            kind = "numbers" if over == "rate" else "whole numbers"
            raise UsageError(f"--points: found {points!r}, expected {kind} above 0 with commas between") from None
        return cls(over, loads, maximum, bisections)


@dataclass(frozen=True, slots=True)
class Point:
    load: float
    run: Json
    saturated: bool
    met: bool

    def document(self) -> Json:
        return dataclasses.asdict(self)


class Sweep:
    """Measures one point after the other; `run` returns the document."""

    def __init__(self, subject: Subject, limits: Sequence[Limit], api_key: str, progress: Progress, plan: Plan) -> None:
        self._subject = subject
        self._limits = limits
        self._api_key = api_key
        self._progress = progress
        self._plan = plan
        self._points: list[Point] = []
        self._interrupted = False
        self.requests: list[tuple[float, list[Record]]] = []  # of each point, in order of measurement

    def run(self) -> Json:
        """Raise the load, then bisect; an interrupt ends the sweep early."""
        try:
            self._rise()
            self._bisect()
        except KeyboardInterrupt:  # between two points
            self._interrupted = True
        return self._document()

    def _rise(self) -> None:
        """Measure the planned loads, then doubled ones, until one is saturated and misses the SLO."""
        loads = list(self._plan.loads)
        while loads and not self._interrupted:
            load = loads.pop(0)
            point = self._measure(load)
            if point.saturated and not point.met:
                return
            if not loads and 2 * load <= self._plan.maximum:
                loads.append(2 * load)

    def _bisect(self) -> None:
        for _ in range(self._plan.bisections):
            load = self._between()
            if load is None or self._interrupted:
                return
            self._measure(load)

    def _between(self) -> float | None:
        """Return a load between the highest within the SLO and the lowest above it that is not; None: they are close.

        If none is within the SLO, return half of the lowest.
        """
        low = max((point.load for point in self._points if point.met), default=None)
        if low is None:  # the first load was too high
            below = min(point.load for point in self._points) / 2
            return below if self._plan.over == "rate" else float(int(below)) or None
        high = min((point.load for point in self._points if point.load > low), default=None)
        if high is None or high / low < CLOSE:
            return None
        middle = math.sqrt(low * high)
        if self._plan.over == "rate":
            return float(f"{middle:.3g}")
        return float(round(middle)) if low < round(middle) < high else None

    def _measure(self, load: float) -> Point:
        self._progress.say(f"{'rate' if self._plan.over == 'rate' else 'clients'} {load:g}")
        settings = with_load(self._subject.settings, self._plan.over, load)
        measured = measure(self._subject, settings, self._limits, self._api_key, self._progress)
        self._interrupted = measured.interrupted
        self.requests.append((load, measured.records))
        run = output.with_columns(measured)
        saturated = self._is_saturated(load, run)
        met = all(one["met"] for one in run["slo"]) if self._limits else not saturated
        point = Point(load, run, saturated, met and not self._interrupted)
        self._points.append(point)
        return point

    def _is_saturated(self, load: float, run: Json) -> bool:
        done = run["throughput"]["request_throughput"]["value"] or 0.0
        if (run["shares"]["error_rate"] or 0.0) > FAILED or not done:
            return True
        if self._plan.over == "rate":
            return backlog_grows(run)
        below = max((point for point in self._points if point.load < load), key=lambda one: one.load, default=None)
        if below is None:
            return False
        before = below.run["throughput"]["request_throughput"]["value"] or 0.0
        return bool(done < before * (1 + GAIN * math.log2(load / below.load)))

    def _document(self) -> Json:
        knee = max((p.load for p in self._points if not p.saturated), default=None)
        kept = max((p.load for p in self._points if p.met), default=None) if self._limits else None
        points = sorted(self._points, key=lambda one: one.load)
        capacity = max((p.run["throughput"]["request_throughput"]["value"] or 0.0 for p in points), default=None)
        document: Json = {
            "schema": SCHEMA,
            "kind": "sweep",
            "over": self._plan.over,
            "slo": [limit.text for limit in self._limits],
            "knee": knee,
            "saturation_seen": any(point.saturated for point in points),
            "capacity_per_s": capacity,
            "slo_load": kept,
            "interrupted": self._interrupted,
            "points": [point.document() for point in points],
        }
        return document | {"findings": _findings(document)}


def backlog_grows(run: Json) -> bool:
    """Return whether more requests are in progress at the window's end than at its start, beyond chance.

    A steady backlog of N requests with random arrivals varies by about sqrt(N) at either end, so a difference of
    2 sqrt(2 N) is rare by chance.
    """
    due, ended = (np.array(run["columns"][name]) for name in ("scheduled_s", "ended_s"))
    start, end = run["window_s"]
    before, after = (int(((due <= at) & (ended > at)).sum()) for at in (start, end))
    offered = (run["offered_per_s"] or 0.0) * (end - start)
    return after - before > max(GROWTH * offered, 2 * math.sqrt(2 * after))


def with_load(settings: Settings, over: str, load: float) -> Settings:
    """Return the settings of one point."""
    change = {"rate": load} if over == "rate" else {"concurrency": int(load), "kind": "closed"}
    return dataclasses.replace(settings, arrivals=dataclasses.replace(settings.arrivals, **change))


def keeps_slo(document: Json) -> bool:
    """Return whether a valid point is within the SLO."""
    kept = document["slo_load"]
    return any(point["load"] == kept and point["run"]["valid"] for point in document["points"])


def without_columns(document: Json) -> Json:
    """Remove the requests' columns, for the JSON line."""
    bulky = ("columns", "series", "gauges", "server", "crosscheck")
    points = [
        {**point, "run": {name: value for name, value in point["run"].items() if name not in bulky}}
        for point in document["points"]
    ]
    return {**document, "points": points}


def _findings(document: Json) -> list[str]:
    """Return the findings in sentences."""
    unit = "requests/s" if document["over"] == "rate" else "clients"
    lines = []
    if document["knee"] is None:
        lines.append("saturated at the lowest load: begin lower with --from")
    elif document["saturation_seen"]:
        lines.append(f"knee: {document['knee']:g} {unit} is the highest load that the server kept up with")
    else:
        lines.append(f"no saturation up to {document['knee']:g} {unit}: go on with --to")
    lines.append(f"most that it answered: {document['capacity_per_s'] or 0:.2f} requests/s")
    if document["slo"]:
        kept = document["slo_load"]
        text = f"highest load that keeps {','.join(document['slo'])}: "
        lines.append(text + (f"{kept:g} {unit}" if kept is not None else "none of those measured"))
    if doubted := sum(not point["run"]["valid"] for point in document["points"]):
        lines.append(
            f"INVALID: {doubted} of {len(document['points'])} points are doubtful, see each of them in the report"
        )
    if document["interrupted"]:
        lines.append("interrupted: not all points were measured")
    return lines
