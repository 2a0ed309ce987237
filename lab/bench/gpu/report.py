"""The report of the GPU benchmark: report.md and report.html, from the rows of folders. Uses only the standard library.

Of a case that ran several times, the latest result is shown, unless it failed or was skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lab.bench.gpu.figures import Figures
from lab.bench.gpu.supervisor import read, shown
from lab.bench.gpu.targets import TARGETS, Target, datasheet_ceilings
from triptych.loadtest.results.page import style

Cells = Sequence[str]
_VERBS = ("schedule", "pack", "launch", "wait", "collect", "update", "rest")
_PLAIN = ("case", "at_s", "seconds", "ok", "peak_gb", "backend")


@dataclass(frozen=True, slots=True)
class Section:
    """Holds a table with a title and a short text."""

    title: str
    note: str
    header: Cells
    rows: Sequence[Cells]


def write(folders: list[Path]) -> list[Path]:
    """Write both files into the last folder; raises `SystemExit` if there are no rows."""
    found = latest(read(folders))
    if not found:
        raise SystemExit(f"no results.jsonl in {', '.join(map(str, folders))}")
    made = [section for section in sections(found) if section.rows]
    files = {"report.md": markdown(made), "report.html": html(made)}
    for name, text in files.items():
        (folders[-1] / name).write_text(text, encoding="utf-8")
    return [folders[-1] / name for name in files]


def latest(rows: Iterable[Figures]) -> dict[str, Figures]:
    """Return one row for each case, in order of first occurrence."""
    found: dict[str, Figures] = {}
    for row in rows:
        before = found.get(row["case"])
        if before is None or _answers(row) or not _answers(before):
            found[row["case"]] = row
    return found


def _answers(row: Figures) -> bool:
    return "failed" not in row and "skipped" not in row


def sections(found: dict[str, Figures]) -> list[Section]:
    """Return all tables that have rows."""
    machine = found.get("machine", {})
    good = {name: row for name, row in found.items() if _answers(row)}
    return [
        _targets(found, machine),
        _time(good),
        _kernels(good),
        _start(good),
        _checks(good),
        _tiles(good, "decode, ", ("of_bandwidth", "best_of_bandwidth", "parts", "best_parts")),
        _tiles(good, "prompts, ", ("tflops", "sdpa_us", "varlen_us")),
        _products(good),
        _missing(found),
        _machine(machine),
    ]


def _targets(found: dict[str, Figures], machine: Figures) -> Section:
    rows = []
    for target in TARGETS:
        row = found.get(target.case)
        if row is None:
            rows.append((target.case, target.wanted, "not run", "", "", target.anchor))
        elif target.figure not in row:
            rows.append((target.case, target.wanted, shown(row)[:80], "", "", target.anchor))
        else:
            value = row[target.figure]
            verdict = "reached" if target.reached(value) else f"{value / target.bound:.2f} of it"
            share = _of_stated(target, value, machine)
            rows.append((target.case, target.wanted, number(value), verdict, share, target.anchor))
    copied, multiplied = machine.get("copy_tb_per_s", 0.0), machine.get("tflops", 0.0)
    note = (
        f"{machine.get('device', 'a device')}, torch {machine.get('torch', '?')}, Triton {machine.get('triton', '?')}. "
    )
    note += f"Measured: a copy of {copied:.2f} TB/s, a product of {multiplied:.0f} TFLOP/s"
    if known := datasheet_ceilings(str(machine.get("device", ""))):
        data, flops = known
        note += f"; stated: {data / 1e12:.2f} TB/s and {flops / 1e12:.0f} TFLOP/s"
    header = ("workload", "wanted", "found", "", "of the stated ceiling", "others")
    return Section("Against the targets", f"{note}.", header, rows)


def _of_stated(target: Target, value: float, machine: Figures) -> str:
    """Convert a share of a measured ceiling to a share of the datasheet's value."""
    known = datasheet_ceilings(str(machine.get("device", "")))
    if known is None or not target.figure.startswith("of_"):
        return ""
    bandwidth = target.figure == "of_bandwidth"
    measured = 1e12 * machine.get("copy_tb_per_s" if bandwidth else "tflops", 0.0)
    return f"{value * measured / known[0 if bandwidth else 1]:.2f}"


def _time(found: dict[str, Figures]) -> Section:
    rows = []
    for name, row in found.items():
        if "host_ms" not in row:
            continue
        verbs = [number(row["host_ms"][verb]) if verb in row["host_ms"] else "" for verb in _VERBS]
        device = (_share(row.get("busy")), number(row.get("device_ms")), number(row.get("kernels_a_step")))
        own = (number(row.get("host_us_a_token")), number(row.get("of_roofline")))
        rows.append((name, number(row["step_ms"]), *device, *verbs, *own))
    header = (
        "20 steps each",
        "step ms",
        "device busy",
        "device ms",
        "kernels",
        *_VERBS,
        "host us/token",
        "of roofline",
    )
    note = (
        "Milliseconds a step: of the host by verb, without the profiler (wait: for the device, within collect); of the "
        "device under it. The device is what to make faster where it is busy nearly always, the host elsewhere. Of "
        "roofline: the least time from the ceilings above, over the measured time."
    )
    return Section("What took the time", note, header, rows)


def _kernels(found: dict[str, Figures]) -> Section:
    rows = [
        (name, one["kernel"], number(one["ms_a_step"]), _share(one["share"]))
        for name, row in found.items()
        for one in row.get("top", [])
    ]
    note = "The dearest of each workload; more are in profiles.txt."
    return Section("Kernels", note, ("workload", "kernel", "ms a step", "of the device's time"), rows)


def _start(found: dict[str, Figures]) -> Section:
    parts = ("weights_s", "assemble_s", "pool_memory_s", "recorded_batches_s", "recorded_s", "warm_up_s")
    rows = [
        (
            name,
            *(number(row["start"].get(part)) for part in parts),
            *(number(row.get(size)) for size in ("weights_gb", "pool_gb", "peak_gb")),
        )
        for name, row in found.items()
        if "start" in row
    ]
    note = (
        "Seconds from nothing: weights drawn, then engines assembled; of that the largest step measured, steps "
        "recorded, kernels warmed up. Sizes in GB."
    )
    return Section("Start and memory", note, ("workload", *parts, "weights", "pool", "peak"), rows)


def _checks(found: dict[str, Figures]) -> Section:
    rows = [
        (name, "right" if row["ok"] else "WRONG", shown({k: v for k, v in row.items() if k not in _PLAIN}))
        for name, row in found.items()
        if "ok" in row
    ]
    return Section(
        "Checks", "What is wrong stands first.", ("case", "", "figures"), sorted(rows, key=lambda r: r[1] != "WRONG")
    )


def _tiles(found: dict[str, Figures], prefix: str, more: Cells) -> Section:
    rows = [
        (
            name.removeprefix(prefix),
            *(number(row.get("us")) if at == 1 else str(row.get("tiles")) for at in range(2)),
            str(row.get("best")),
            _share(row.get("could_be")),
            *(number(row.get(name)) for name in more),
        )
        for name, row in found.items()
        if name.startswith(prefix) and "could_be" in row
    ]
    header = ("heads, sequences x keys", "chosen", "us", "fastest", "its time", *more)
    note = "Rows x keys of a tile, warps, stages; the fastest one's time as a share of the chosen one's."
    return Section(f"Tiles: {prefix.removesuffix(', ')}", note, header, rows)


def _products(found: dict[str, Figures]) -> Section:
    rows = [
        (
            name.removeprefix("product, "),
            str(one["rows"]),
            number(one["cublas_us"]),
            number(one.get("triton_us")),
            _share(one["cublas_of_bandwidth"]),
            _share(one["best_of_bandwidth"]),
            str(one.get("cut", "")),
        )
        for name, row in found.items()
        if name.startswith("product, ")
        for one in row["table"]
    ]
    header = ("matrix", "rows", "cuBLAS us", "Triton us", "cuBLAS of bandwidth", "best", "Triton's cut")
    return Section("Products of few rows", "Weights take turns, so that no cache holds them.", header, rows)


def _missing(found: dict[str, Figures]) -> Section:
    rows = [(name, shown(row)) for name, row in found.items() if not _answers(row)]
    said = [(name, [*row.get("fallbacks", []), *row.get("warnings", [])]) for name, row in found.items()]
    warned = [(name, f"warned: {text}") for name, texts in said for text in texts]
    return Section("Failed, skipped, warned", "", ("case", "what it said"), [*rows, *warned])


def _machine(machine: Figures) -> Section:
    rows = [(key, number(value)) for key, value in machine.items() if key not in _PLAIN]
    return Section("Machine", "", ("", ""), rows)


def number(value: Any) -> str:
    """Format a number with four digits; None becomes empty."""
    if not isinstance(value, float):
        return "" if value is None else f"{value}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def markdown(made: list[Section]) -> str:
    lines = ["# What a GPU found", ""]
    for section in made:
        lines += [f"## {section.title}", "", *([section.note, ""] if section.note else [])]
        lines += [_line(section.header), _line(["---"] * len(section.header)), *map(_line, section.rows), ""]
    return "\n".join(lines)


def _line(cells: Cells) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def html(made: list[Section]) -> str:
    """Return a self-contained HTML file, in the load test's design."""
    body = "".join(
        f'<section class="wide"><h2>{escape(section.title)}</h2><p class="hint">{escape(section.note)}</p>'
        f'<div class="scroll"><table><thead>{_row(section.header, "th")}</thead>'
        f"<tbody>{''.join(_row(row, 'td') for row in section.rows)}</tbody></table></div></section>"
        for section in made
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>GPU bench</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><style>{style()}section {{ margin-top: 16px; }}</style></head>'
        f"<body><h1>What a GPU found</h1>{body}</body></html>\n"
    )


def _row(cells: Cells, tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}{_colour(cell)}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _colour(cell: str) -> str:
    if cell in ("reached", "right"):
        return ' class="good"'
    return ' class="bad"' if cell == "WRONG" or cell.endswith(" of it") else ""
