"""Comparison of two results by ratios of B to A, with bootstrap intervals.

The results are two runs, two sweeps (compared at each load), or two mixes (by workload). Each run is resampled by
itself, requests for latencies and seconds for throughput, and the ratios of the resampled figures give the interval. B
is worse or better if the whole interval is beyond 1 and the ratio beyond the tolerance. Two runs cannot show the
variation between equal runs: repeat them, in turns, before trusting a small ratio.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from triptych.loadtest.errors import UsageError
from triptych.loadtest.results import statistics
from triptych.loadtest.results.statistics import Floats, Sample

_LATENCIES = {"ttft": "ttft_ms", "itl": "gaps_ms", "tpot": "tpot_ms", "e2e": "e2e_ms"}
_COMPARED = ("mean", "p50", "p99")
_RATES = {"request_throughput": ("requests",), "output_throughput": ("output_tokens",), "goodput": ("good",)}

Json = dict[str, Any]


def compare(a: Json, b: Json, tolerance: float) -> Json:
    """Return the document: rows, regressions, and reasons for doubt. Raises `UsageError`.

    Rows of sweeps are named by their load, of mixes by their workload.
    """
    if a["kind"] != b["kind"]:
        raise UsageError(f"A is a {a['kind']} and B a {b['kind']}: expected two of the same kind")
    pairs = {"sweep": _same_loads, "mix": _same_works}.get(a["kind"], _whole)(a, b)
    for name, run in ((name, run) for _, *both in pairs for name, run in zip("AB", both, strict=True)):
        if "columns" not in run:
            file = f"the {a['kind']}.json of --out"
            raise UsageError(f"{name}: found no requests in it, expected {file}, not the printed line")
    rows = [row | {"name": at + row["name"]} for at, one, other in pairs for row in _rows(one, other, tolerance)]
    doubts = [at + doubt for at, one, other in pairs for doubt in _doubts(one, other)]
    alike = pairs if a["kind"] == "mix" else [("", *pairs[0][1:])]  # all points of a sweep have the same settings
    differences = [at + found for at, one, other in alike for found in _differences(one, other)]
    return {
        "schema": 1,
        "kind": "compare",
        "tolerance": tolerance,
        "commits": [pairs[0][1]["commit"], pairs[0][2]["commit"]],
        "rows": rows,
        "regressions": [row["name"] for row in rows if row["verdict"] == "worse"],
        "warnings": [*differences, *doubts],
    }


def _whole(a: Json, b: Json) -> list[tuple[str, Json, Json]]:
    return [("", a, b)]


def _same_works(a: Json, b: Json) -> list[tuple[str, Json, Json]]:
    """Return the runs of workloads that both mixes have, with their names."""
    runs = [{work["name"]: work["run"] for work in mix["works"]} for mix in (a, b)]
    common = [name for name in runs[0] if name in runs[1]]
    if not common:
        found = " and ".join(", ".join(one) for one in runs)
        raise UsageError(f"the mixes have no workload in common: found {found}")
    return [(f"{name}: ", runs[0][name], runs[1][name]) for name in common]


def _same_loads(a: Json, b: Json) -> list[tuple[str, Json, Json]]:
    """Return the runs of two sweeps at loads that both measured, with names of the loads."""
    if a["over"] != b["over"]:
        raise UsageError(f"A is a sweep over {a['over']} and B over {b['over']}: expected the same")
    loads = [{point["load"]: point["run"] for point in sweep["points"]} for sweep in (a, b)]
    common = sorted(loads[0].keys() & loads[1].keys())
    if not common:
        found = " and ".join(", ".join(f"{load:g}" for load in sorted(one)) or "none" for one in loads)
        raise UsageError(f"the sweeps have no load in common: found {found}; give both the same --points")
    return [(f"{a['over']} {load:g}: ", loads[0][load], loads[1][load]) for load in common]


def _rows(a: Json, b: Json, tolerance: float) -> list[Json]:
    return [*_latency_rows(a, b, tolerance), *_rate_rows(a, b, tolerance), *_share_rows(a, b, tolerance)]


def _latency_rows(a: Json, b: Json, tolerance: float) -> list[Json]:
    rows = []
    for name, column in _LATENCIES.items():
        samples = [Sample.of(statistics.answered(r["columns"], column, r["settings"]["warmup_s"])) for r in (a, b)]
        if not all(len(sample.values) > 1 for sample in samples):
            continue
        figures = [statistics.describe(sample) for sample in samples]
        drawn = [statistics.replicates(sample, seed) for seed, sample in enumerate(samples)]
        for statistic in _COMPARED:
            at = statistics.STATISTICS.index(statistic)
            pair = (figures[0][statistic], figures[1][statistic])
            label = f"{name}_{statistic} ms"
            rows.append(_row(label, pair, drawn[0][:, at], drawn[1][:, at], tolerance, less_is_better=True))
    return rows


def _rate_rows(a: Json, b: Json, tolerance: float) -> list[Json]:
    rows = []
    for name, series in _RATES.items():
        each = [_within_window(run, series) for run in (a, b)]
        values = [run["throughput"][name]["value"] for run in (a, b)]
        if not all(values) or min(map(len, each)) < 2:
            continue
        drawn = [statistics.rate_replicates(one, seed) for seed, one in enumerate(each)]
        rows.append(_row(f"{name} /s", (values[0], values[1]), drawn[0], drawn[1], tolerance, less_is_better=False))
    return rows


def _within_window(run: Json, names: tuple[str, ...]) -> list[float]:
    """Return the amounts in each whole second of the window."""
    start, end = run["window_s"]
    summed = np.sum([run["series"][name] for name in names], axis=0)
    return [float(value) for value in summed[int(np.ceil(start)) : int(end)]]


def _share_rows(a: Json, b: Json, tolerance: float) -> list[Json]:
    """Return the share of successful requests, if the runs differ in it."""
    answered = [1 - (run["shares"]["error_rate"] or 0.0) for run in (a, b)]
    if answered[0] == answered[1]:
        return []
    rng = np.random.default_rng(0)
    counts = [max(1, run["counts"]["counted"]) for run in (a, b)]
    drawn = [rng.binomial(n, share, statistics.RESAMPLES) / n for n, share in zip(counts, answered, strict=True)]
    pair = (answered[0], answered[1])
    return [_row("answered share", pair, drawn[0], drawn[1], tolerance, less_is_better=False)]


def _row(name: str, pair: tuple[float, float], a: Floats, b: Floats, tolerance: float, *, less_is_better: bool) -> Json:
    """Return a row; `a` and `b` are the resampled figures."""
    ratio = pair[1] / pair[0] if pair[0] else np.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = (float(bound) for bound in statistics.bounds(b / a))
    more = low > 1 and ratio > 1 + tolerance
    less = high < 1 and ratio < 1 / (1 + tolerance)
    worse, better = (more, less) if less_is_better else (less, more)
    verdict = "worse" if worse else "better" if better else "same"
    return {"name": name, "a": pair[0], "b": pair[1], "ratio": ratio, "ci95": [low, high], "verdict": verdict}


def _differences(a: Json, b: Json) -> list[str]:
    found = [
        f"the runs differ in {name}: {a['settings'][name]} and {b['settings'][name]}"
        for name in ("target", "model", "workload", "arrivals", "clients", "seed")
        if a["settings"][name] != b["settings"][name]
    ]
    if a["machine"]["processor"] != b["machine"]["processor"]:
        found.append("the runs were made on different processors")
    return found


def _doubts(a: Json, b: Json) -> list[str]:
    return [f"{name} is invalid: {doubt}" for name, run in (("A", a), ("B", b)) for doubt in run["doubts"]]
