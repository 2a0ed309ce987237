"""Tables of results on standard output."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from triptych.loadtest.results.slo import LATENCIES

Json = dict[str, Any]

_SHOWN = ("mean", "p50", "p90", "p95", "p99", "p999", "max")
_NAMES = {
    "ttft": "first token",
    "itl": "between tokens",
    "tpot": "per output token",
    "e2e": "end to end",
    "queue": "queue (server)",
    "prefill": "prefill (server)",
    "decode": "decode (server)",
    "outside": "outside the server",
    "reject": "until refused",
    "lag": "generator lag",
}
_RATES = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "total_throughput": "all tokens/s",
    "goodput": "good requests/s",
}


def console() -> Console:
    """Return a console for standard output, wide enough for the tables if it is no terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=120)


def run(document: Json, to: Console) -> None:
    """Print the result of a run of one workload."""
    to.print(_latencies(document))
    to.print(_rates(document))
    to.print(_counts(document), highlight=False)
    if document["crosscheck"]:
        to.print(_crosscheck(document))
    _verdicts(document, to)


def mix(document: Json, to: Console) -> None:
    """Print each workload, then all of them in one table."""
    for work in document["works"]:
        to.print(_latencies(work["run"], f"{work['name']}: "))
        to.print(_counts(work["run"]), highlight=False)
        if work["run"]["crosscheck"]:
            to.print(_crosscheck(work["run"]))
    to.print(_works(document))
    _verdicts(document, to)


def _works(document: Json) -> Table:
    heads = ("", "requests/s", "in tok/s", "out tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "e2e p99")
    table = Table(*heads, "refused or failed", title="together", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, found in [*((work["name"], work["run"]) for work in document["works"]), ("all", document["together"])]:
        rates = [found["throughput"][n]["value"] or 0.0 for n in ("request_throughput", "total_throughput")]
        out = found["throughput"]["output_throughput"]["value"] or 0.0
        cells = [f"{rates[0]:,.2f}", f"{rates[1] - out:,.0f}", f"{out:,.0f}"]
        table.add_row(name, *cells, *_shown_latencies(found), f"{found['shares']['error_rate'] or 0:.1%}")
    return table


def _shown_latencies(found: Json) -> list[str]:
    latency = found.get("latency_ms", {})
    shown = (("ttft", "p50"), ("ttft", "p99"), ("itl", "p50"), ("itl", "p99"), ("e2e", "p99"))
    return [milliseconds(latency[name][at]) if name in latency else "" for name, at in shown]


def _verdicts(document: Json, to: Console) -> None:
    """Print whether the SLO was met and whether the run is valid."""
    for verdict in document["slo"]:
        mark = "[green]met   [/]" if verdict["met"] else "[red]missed[/]"
        whose = f"{verdict['work']}: " if "work" in verdict else ""
        to.print(f"{mark} {whose}{verdict['limit']}: found {slo_value(verdict)}")
    for doubt in document["doubts"]:
        to.print(f"[red]INVALID[/] {doubt}")
    if document["interrupted"]:
        to.print("[yellow]interrupted[/]: figures are of what was measured until then")


def _latencies(document: Json, name: str = "") -> Table:
    settings = document["settings"]
    title = f"{name}{settings['target']} on {settings['model'] or settings['url']}"
    table = Table("ms", "n", *_SHOWN, "p99, 95 % interval", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, shown in _NAMES.items():
        if (found := document["latency_ms"].get(name)) is not None:
            interval = found["ci95"].get("p99")
            cells = [milliseconds(found[statistic]) for statistic in _SHOWN]
            between = f"{milliseconds(interval[0])} - {milliseconds(interval[1])}" if interval else ""
            table.add_row(shown, f"{found['n']:,}", *cells, between)
    return table


def _rates(document: Json) -> Table:
    table = Table("throughput", "value", "95 % interval")
    for name, shown in _RATES.items():
        value, interval = document["throughput"][name]["value"], document["throughput"][name]["ci95"]
        if value is not None:
            between = f"{interval[0]:,.2f} - {interval[1]:,.2f}" if interval else ""
            table.add_row(shown, f"{value:,.2f}", between)
    return table


def _counts(document: Json) -> str:
    counts, tokens = document["counts"], document["tokens"]
    parts = [
        f"{counts[name]:,} {name}" for name in ("ok", "rejected", "error", "cancelled", "unfinished") if counts[name]
    ]
    lines = [f"requests: {', '.join(parts) or 'none'}; offered {document['offered_per_s'] or 0:.2f}/s"]
    lines += [f"  {one['count']:,} x HTTP {one['status']} {one['code']}" for one in document["errors"][:8]]
    text = f"tokens: {tokens['prompt']:,} in, {tokens['output']:,} out, {tokens['cached']:,} of the prompts cached"
    lines.append(text + (f", {tokens['wasted']:,} for clients that left" if tokens["wasted"] else ""))
    lines.append(f"prompt lengths by {document['prompt_lengths_by']}")
    return "\n".join(lines)


def _crosscheck(document: Json) -> Table:
    table = Table("client and server", "client", "server", "", title_justify="left")
    for row in document["crosscheck"]:
        server = row["server"]
        if isinstance(server, list):
            shown = f"{_figure(server[0], row)} - {'more' if server[1] is None else _figure(server[1], row)}"
        else:
            shown = _figure(server, row)
        agrees = "[green]agree[/]" if row["agrees"] else "[red]DISAGREE[/]"
        table.add_row(row["name"], _figure(row["client"], row), shown, agrees)
    return table


def _figure(value: float, row: Json) -> str:
    return f"{milliseconds(value)} ms" if row["unit"] == "ms" else f"{value:,.0f}"


def sweep(document: Json, to: Console) -> None:
    """Print a line for each point, then the findings."""
    over = document["over"]
    unit = "offered/s" if over == "rate" else "clients"
    heads = (unit, "requests/s", "good/s", "out tok/s", "TTFT p50", "TTFT p99", "ITL p99", "e2e p99", "refused", "")
    table = Table(*heads, title="sweep", title_justify="left")
    for point in sorted(document["points"], key=lambda one: float(one["load"])):
        table.add_row(*_point(point))
    to.print(table)
    for line in document["findings"]:
        to.print(line)


def _point(point: Json) -> list[str]:
    run = point["run"]
    latency = run["latency_ms"]
    cells = [f"{point['load']:g}"]
    cells += [
        f"{run['throughput'][n]['value'] or 0:,.2f}" for n in ("request_throughput", "goodput", "output_throughput")
    ]
    for name, statistic in (("ttft", "p50"), ("ttft", "p99"), ("itl", "p99"), ("e2e", "p99")):
        cells.append(milliseconds(latency[name][statistic]) if name in latency else "")
    state = [
        *(["saturated"] if point["saturated"] else []),
        *(["SLO missed"] if point["met"] is False else []),
        *(["INVALID"] if not run["valid"] else []),
    ]
    return [*cells, f"{run['shares']['rejection_rate'] or 0:.1%}", ", ".join(state)]


def compare(rows: list[Json], to: Console) -> None:
    """Print the ratios of B to A."""
    table = Table("figure", "A", "B", "B / A", "95 % interval", "")
    for row in rows:
        low, high = row["ci95"]
        colour = {"worse": "red", "better": "green"}.get(row["verdict"], "default")
        cells = (f"{row['a']:,.2f}", f"{row['b']:,.2f}", f"{row['ratio']:.3f}", f"{low:.3f} - {high:.3f}")
        table.add_row(row["name"], *cells, f"[{colour}]{row['verdict']}[/]")
    to.print(table)


def milliseconds(value: float) -> str:
    """Format milliseconds with three or four significant digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def slo_value(verdict: Json) -> str:
    """Format the measured value in the limit's unit."""
    found, limit = verdict["found"], verdict["limit"]
    if found is None:
        return "nothing to measure"
    if "%" in limit:
        return f"{found:.2%}"
    return f"{milliseconds(found)} ms" if verdict["metric"] in LATENCIES else f"{found:,.3f}"
