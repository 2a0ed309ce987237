"""A mix: several workloads of a plan on one server at the same time, as one run with a result for each and their sum.

Each workload's part is the document of a run. Only counts, rates and amounts in each second are summed; latencies of
different workloads are kept apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from loadtest.records import Record
from loadtest.results import summary
from loadtest.runs import run
from loadtest.runs.plan import Work
from loadtest.runs.progress import Progress
from loadtest.runs.run import SCHEMA, Load, Measured
from loadtest.server.target_server import Server

Json = dict[str, Any]

_SUMS = ("window_s", "counts", "shares", "throughput", "offered_per_s", "errors", "tokens", "series")
_ABOUT = ("commit", "machine", "server")  # equal for all workloads of a run
_BULKY = ("columns", "series", "gauges", "crosscheck")


@dataclass(frozen=True, slots=True)
class Mixed:
    """Holds the result of a run of several workloads."""

    document: Json
    works: dict[str, Measured]

    @property
    def interrupted(self) -> bool:
        return bool(self.document["interrupted"])


def probe(server: Server, works: Sequence[Work], progress: Progress) -> list[Load]:
    """Probe the server for each workload. Raises `UsageError`, `ServerError`."""
    loads = []
    for work in works:
        subject = run.probe(server, work.settings, work.tokenizer, progress)
        loads.append(Load(subject, subject.settings, work.limits, work.name))
    return loads


def measure(loads: Sequence[Load], api_key: str, progress: Progress) -> Mixed:
    """Run the loads at the same time and summarise them. Ctrl-C ends them early."""
    measured = run.measure_together(loads, api_key, progress)
    works = {load.name: one for load, one in zip(loads, measured, strict=True)}
    return Mixed(_document(loads, works), works)


def seeded(loads: Sequence[Load], add: int) -> list[Load]:
    """Return the loads with other seeds, whose prompts are in no cache."""
    return [replace(load, settings=replace(load.settings, seed=load.settings.seed + add)) for load in loads]


def _document(loads: Sequence[Load], works: dict[str, Measured]) -> Json:
    documents = {name: one.document for name, one in works.items()}
    first = next(iter(documents.values()))
    doubts = [f"{name}: {doubt}" for name, document in documents.items() for doubt in document["doubts"]]
    return {
        "schema": SCHEMA,
        "kind": "mix",
        "started": first["started"],
        **{name: first[name] for name in _ABOUT},
        "interrupted": first["interrupted"],
        "valid": not doubts,
        "doubts": doubts,
        "slo": [{"work": name, **one} for name, document in documents.items() for one in document["slo"]],
        "together": _sums(loads, [record for one in works.values() for record in one.records], first),
        "works": [{"name": name, "run": document} for name, document in documents.items()],
    }


def _sums(loads: Sequence[Load], records: Sequence[Record], first: Json) -> Json:
    """Return the figures of all records, over the window that all workloads share."""
    stopped_s = first["window_s"][1] if first["interrupted"] else None
    found = summary.summarise(records, loads[0].settings, (), stopped_s)
    return {name: found[name] for name in _SUMS}


def without_columns(document: Json) -> Json:
    """Remove the requests' columns, for the JSON line."""
    left_out = (*_BULKY, *_ABOUT)
    works = [
        {**one, "run": {name: value for name, value in one["run"].items() if name not in left_out}}
        for one in document["works"]
    ]
    together = {name: value for name, value in document["together"].items() if name not in _BULKY}
    return {**document, "together": together, "works": works}
