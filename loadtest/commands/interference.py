"""The command `interference`, which measures how workloads of a plan slow each other down.

Each workload runs alone, then in each of the plan's combinations, in turns. A workload's share is its output tokens a
second (input tokens, if it has no output) in a combination, divided by those alone in the same turn; figures are
medians over turns. Every run has prompts of its own, so that none is in a cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from triptych.loadtest.commands.main import api_key
from triptych.loadtest.results import page, statistics, tables
from triptych.loadtest.results.statistics import Sample
from triptych.loadtest.runs import flags, output, plan
from triptych.loadtest.runs.plan import Bound, Plan
from triptych.loadtest.runs.progress import Progress
from triptych.loadtest.runs.run import SCHEMA, Load, Measured
from triptych.loadtest.server.target_server import Server

PLAN = Path(__file__).with_suffix(".toml")

Json = dict[str, Any]
_HEADS = (
    *("run", "work", "ITL p50 ms", "ITL p99 ms", "/ alone", "out tok/s", "in tok/s", "req/s", "share of alone"),
    "bounds",
)


@dataclass(frozen=True, slots=True)
class Figures:
    """Holds the figures of one workload in one run. Latencies are None without streaming."""

    itl_p50_ms: float | None
    itl_p99_ms: float | None
    ttft_p99_ms: float | None
    output_tokens_per_s: float
    input_tokens_per_s: float
    requests_per_s: float
    error_rate: float
    doubts: tuple[str, ...]

    @classmethod
    def of(cls, measured: Measured) -> Figures:
        run = measured.document
        gaps = statistics.describe(_gaps(measured))
        rate = {name: found["value"] or 0.0 for name, found in run["throughput"].items()}
        return cls(
            itl_p50_ms=gaps.get("p50"),
            itl_p99_ms=gaps.get("p99"),
            ttft_p99_ms=run["latency_ms"].get("ttft", {}).get("p99"),
            output_tokens_per_s=rate["output_throughput"],
            input_tokens_per_s=rate["total_throughput"] - rate["output_throughput"],
            requests_per_s=rate["request_throughput"],
            error_rate=run["shares"]["error_rate"] or 0.0,
            doubts=tuple(run["doubts"]),
        )

    @property
    def work(self) -> float:
        """The workload's rate, in output tokens, or input tokens if it has none."""
        return self.output_tokens_per_s or self.input_tokens_per_s


def _gaps(measured: Measured) -> Sample:
    """Return the inter-token latencies in milliseconds within the window.

    They include those of requests that began before the window or end after it, so that a delayed stream counts, but
    only as long as the other workloads run.
    """
    start, end = measured.document["window_s"]
    return Sample.of([[1e3 * gap for gap in record.gaps_from(start, end)] for record in measured.records])


def add_command(commands: Any) -> None:
    text = "Measure each workload of a plan alone and together with others, on a running service."
    parser = commands.add_parser("interference", help="how workloads slow each other down", description=text)
    help_text = "TOML with [work.NAME], [together] and [bounds]"
    parser.add_argument("--plan", type=Path, default=PLAN, metavar="FILE", help=help_text)
    parser.add_argument("--turns", type=flags.positive, default=1, metavar="N", help="repetitions of all runs")
    flags.add_shared(parser)
    parser.set_defaults(command=_command, duration=20.0, warmup=3.0)


def _command(options: argparse.Namespace) -> int:
    what = plan.read(options.plan, options)
    progress = Progress(quiet=options.quiet)
    found: dict[tuple[str, str], list[Figures]] = {}
    interrupted = False
    with Server(options.url.rstrip("/"), api_key(options)) as server:
        loads = {load.name: load for load in plan.probe(server, what.chosen(""), progress)}
        about = server.about()
        folder = output.folder(options.out, "interference")
        for number, (name, chosen) in enumerate(_runs(what, loads, options.turns)):
            progress.say(f"{name} ...")
            mixed = plan.measure(plan.seeded(chosen, number), api_key(options), progress)
            (folder / name).mkdir(exist_ok=True)
            output.write_mix(mixed, folder / name)
            for work, measured in mixed.works.items():
                found.setdefault((name, work), []).append(Figures.of(measured))
            if interrupted := mixed.interrupted:
                break
    rows = _rows(found, what) if not interrupted else []
    document = _document(found, rows, about, options, interrupted)
    (folder / "interference.json").write_text(output.line(document), encoding="utf-8")
    (folder / "interference.md").write_text(markdown(rows), encoding="utf-8")
    _show(document, tables.console())
    output.print_end(document, None, Console())
    return 130 if interrupted else int(not document["valid"] or any(row["missed"] for row in rows))


def _runs(what: Plan, loads: dict[str, Load], turns: int) -> Iterable[tuple[str, list[Load]]]:
    """Return name and loads of every run, in the order of measurement."""
    for _ in range(turns):
        for name, load in loads.items():
            yield _alone(name), [load]
        for name, works in what.together.items():
            yield name, [loads[work] for work in works]


def _alone(work: str) -> str:
    return f"{work} alone"  # names of combinations have no space


def _rows(found: dict[tuple[str, str], list[Figures]], what: Plan) -> list[Json]:
    """Return a row for each run and workload: medians, and ratios to running alone in the same turn."""
    rows = []
    for (run, work), turns in found.items():
        alone = found[_alone(work), work]
        row = {"run": run, "work": work, **_medians(turns)}
        if turns is not alone:
            pairs = list(zip(turns, alone, strict=True))
            row["kept"] = _median([one.work / base.work if base.work else None for one, base in pairs])
            row["itl_ratio"] = _median([_ratio(one.itl_p99_ms, base.itl_p99_ms) for one, base in pairs])
            row["missed"] = _missed(row, _median([base.itl_p99_ms for base in alone]), what.bounds.get(work, Bound()))
            row["bounded"] = work in what.bounds
        else:
            row |= {"kept": None, "itl_ratio": None, "missed": [], "bounded": False}
        rows.append(row)
    return rows


def _missed(row: Json, alone_itl_ms: float | None, bound: Bound) -> list[str]:
    """Return the bounds that `row` violates; a figure that was not measured violates its bound."""
    missed = []
    if bound.kept is not None and not (row["kept"] is not None and row["kept"] >= bound.kept):
        missed.append(f"share < {bound.kept:g}")
    if bound.itl_ratio is not None:
        most = None if alone_itl_ms is None else bound.itl_ratio * alone_itl_ms + bound.itl_slack_ms
        if most is None or row["itl_p99_ms"] is None or row["itl_p99_ms"] > most:
            missed.append("p99 not known" if most is None else f"p99 > {tables.milliseconds(most)} ms")
    return missed


def _medians(turns: Sequence[Figures]) -> Json:
    names = ("itl_p50_ms", "itl_p99_ms", "ttft_p99_ms", "output_tokens_per_s", "input_tokens_per_s", "requests_per_s")
    return {name: _median([getattr(turn, name) for turn in turns]) for name in names}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _document(
    found: dict[tuple[str, str], list[Figures]], rows: list[Json], about: Json, options: argparse.Namespace, cut: bool
) -> Json:
    doubts = sorted(
        {f"{run}: {work}: {doubt}" for (run, work), turns in found.items() for turn in turns for doubt in turn.doubts}
    )
    names = ("turns", *(name for name in plan.SHARED if name not in ("api_key", "out", "quiet")))
    return {
        "schema": SCHEMA,
        "kind": "interference",
        "commit": page.commit(),
        "machine": page.describe(),
        "server": about,
        "plan": options.plan.read_text(encoding="utf-8"),
        "settings": {name: getattr(options, name) for name in names},
        "interrupted": cut,
        "valid": not doubts,
        "doubts": doubts,
        "rows": rows,
        "turns": [{"run": run, "work": work, **asdict(one)} for (run, work), all_ in found.items() for one in all_],
    }


def markdown(rows: Iterable[Json]) -> str:
    """Return the table in Markdown."""
    lines = [_HEADS, ["---"] * 2 + ["---:"] * (len(_HEADS) - 3) + ["---"], *map(_cells, rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _show(document: Json, to: Console) -> None:
    table = Table(*_HEADS, title="workloads alone and together", title_justify="left")
    for column in table.columns[2:-1]:
        column.justify = "right"
    for row in document["rows"]:
        table.add_row(*_cells(row))
    to.print(table)
    for doubt in document["doubts"]:
        to.print(f"[red]INVALID[/] {doubt}")
    if document["interrupted"]:
        to.print("[yellow]interrupted[/]: not every run was made, so nothing can be set against it")


def _cells(row: Json) -> list[str]:
    verdict = ", ".join(row["missed"]) or ("kept" if row["bounded"] else "")
    return [
        row["run"],
        row["work"],
        *("" if row[name] is None else tables.milliseconds(row[name]) for name in ("itl_p50_ms", "itl_p99_ms")),
        "" if row["itl_ratio"] is None else f"{row['itl_ratio']:.2f}",
        f"{row['output_tokens_per_s']:,.0f}",
        f"{row['input_tokens_per_s']:,.0f}",
        f"{row['requests_per_s']:,.2f}",
        "" if row["kept"] is None else f"{row['kept']:.0%}",
        verdict,
    ]
