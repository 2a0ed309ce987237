"""The command `served`, which compares servers over HTTP: triptych, vLLM and llama.cpp's, with the same load generator.

A turn measures every row once with every server: a server is started for each model, gets the rows of that model, and
ends before the next one starts. The order of the servers is reversed in every second turn. The figures of a row are
medians over the turns. With `--json` every measurement is written at once, and the command goes on where an earlier
one ended. Run it on an idle machine; servers and load generator share all cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.busy import QUIET_CORES, CpuClock
from lab.bench.models import built
from lab.bench.peers import Unsupported
from lab.faults.site import Site
from lab.servers.servers import SERVERS
from triptych.loadtest.errors import ServerError, UsageError
from triptych.loadtest.results import page
from triptych.loadtest.runs import flags, output

DECODER = ("--target", "openai-completions")
MIXED = (*DECODER, "--prompt-tokens", "uniform:32-512", "--output-tokens", "uniform:16-256")
SINGLE = (*DECODER, "--prompt-tokens", "128", "--output-tokens", "64", "--concurrency", "1")
LONG = (*DECODER, "--prompt-tokens", "2048", "--output-tokens", "2", "--concurrency", "1")
TEXTS = ("--target", "openai-embeddings", "--prompt-tokens", "uniform:8-256")
_UNITS = {"tokens": "tokens/s", "requests": "requests/s", "first": "ms", "late": "ms", "between": "ms"}
_DRAIN_S = 5.0  # requests that have not ended then count as unanswered; their tokens count

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """Describes a row's load.

    It is measured for twice as long as a reply takes, once the first replies have ended. In a shorter time it matters
    whose prompts were computed before: 40 s of D2 x64 gave 0.79 of vLLM's rate, and 120 s gave 1.09.
    """

    model: str
    name: str
    load: Sequence[str]  # arguments of `triptych.loadtest run`
    figures: Sequence[str]  # tokens, requests: a second; first, late: first token, p50, p99; between: tokens, p99
    warmup_s: float
    measured_s: float

    @property
    def row(self) -> str:
        return f"{self.model} {self.name}"


WORKLOADS = (
    Workload("D2", "one stream", SINGLE, ("tokens", "first"), 5, 20),
    Workload("D2", "x16", (*MIXED, "--concurrency", "16"), ("tokens", "late"), 30, 60),
    Workload("D2", "x64", (*MIXED, "--concurrency", "64"), ("tokens", "between"), 105, 120),
    Workload("D3", "one stream", SINGLE, ("tokens",), 8, 20),
    Workload("D3", "x16", (*MIXED, "--concurrency", "16"), ("tokens",), 90, 120),
    Workload("D3", "a prompt of 2,048", LONG, ("first",), 0, 40),
    Workload("N2", "16 clients x 1 text", (*TEXTS, "--texts", "1", "--concurrency", "16"), ("requests",), 3, 12),
    Workload("N2", "8 clients x 16 texts", (*TEXTS, "--texts", "16", "--concurrency", "8"), ("requests",), 8, 20),
)
_RATES = {"tokens": "output_throughput", "requests": "request_throughput"}


def add_command(commands: Any) -> None:
    text = "Compare servers over HTTP with the same models, workloads and load generator, in turns."
    parser = commands.add_parser("served", help="other servers, over HTTP", description=text)
    default = ["triptych", "vllm", "llama.cpp"]
    parser.add_argument("--servers", nargs="+", default=default, choices=list(SERVERS), help="in this order")
    rows = ", ".join(workload.row for workload in WORKLOADS)
    help_text = f"rows whose name contains one of these; none: all of {rows}"
    parser.add_argument("--rows", nargs="+", default=[""], metavar="WORDS", help=help_text)
    parser.add_argument("--turns", type=flags.positive, default=3, metavar="N", help="measurements of each row")
    parser.add_argument("--minutes", type=flags.above_zero, metavar="M", help="start no server after this time")
    help_text = "times the usual duration of each measurement; a small one tries the command"
    parser.add_argument("--scale", type=flags.above_zero, default=1.0, metavar="X", help=help_text)
    help_text = "write every measurement to this file at once, and skip those that it has of the same commit and scale"
    parser.add_argument("--json", type=Path, metavar="FILE", help=help_text)
    parser.add_argument("--cache", type=Path, default=Path("build/bench"), help="folder of benchmark models")
    parser.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    workloads = [one for one in WORKLOADS if any(words in one.row for words in options.rows)]
    if not workloads:
        known = ", ".join(one.row for one in WORKLOADS)
        raise UsageError(f"--rows: found {' '.join(options.rows)!r}, expected parts of {known}")
    versions = {name: SERVERS[name].version() for name in options.servers}  # makes what is not installed
    measured = Measurements(options.json, {"commit": page.commit(), "scale": options.scale})
    unable: dict[str, str] = {}
    try:
        _measure_all(workloads, options, measured, unable)
    finally:  # also of an interrupted run
        _print_table(measured.figures(), options.servers)
        for who, reason in unable.items():
            print(f"{who}: {reason}")
        about = {"kind": "served", "machine": page.describe(), "versions": versions, "unable": unable}
        print(output.line(about | measured.context | {"rows": measured.rows}), flush=True)
    return 0


def _measure_all(
    workloads: Sequence[Workload], options: argparse.Namespace, measured: Measurements, unable: dict[str, str]
) -> None:
    began = time.monotonic()
    for turn, model, server in _order(options.turns, workloads, options.servers):
        missing = [one for one in workloads if one.model == model and not measured.has(turn, server, one)]
        if not missing or f"{model} {server}" in unable:
            continue
        minutes = (time.monotonic() - began) / 60
        if options.minutes is not None and minutes > options.minutes:
            print(f"{options.minutes:g} minutes have passed", file=sys.stderr, flush=True)
            return
        print(f"turn {turn}, {model}: {server} ({minutes:.1f} min)", file=sys.stderr, flush=True)
        folder = built(model, options.cache.resolve())
        try:
            with SERVERS[server].start(model, folder) as site:
                for workload in missing:
                    extra = SERVERS[server].extra if workload.load[: len(DECODER)] == DECODER else "{}"
                    measured.add(turn, server, workload, *_load(site, folder, workload, extra, options.scale))
        except (Unsupported, ServerError) as error:
            unable[f"{model} {server}"] = str(error)
            print(f"{model}: {server}: {error}", file=sys.stderr, flush=True)


def _order(turns: int, workloads: Sequence[Workload], servers: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yield turn, model and server of each start, in the order of measurement."""
    for turn in range(1, turns + 1):
        for model in dict.fromkeys(one.model for one in workloads):
            for server in servers if turn % 2 else reversed(servers):
                yield turn, model, server


class Measurements:
    """Holds the figures of each measurement, and keeps them in a file of JSON lines if there is one.

    Those that the file has already count if they agree in `context`.
    """

    def __init__(self, path: Path | None, context: Json) -> None:
        """Raises `UsageError` if the file cannot be read or written."""
        self.context, self._path = context, path
        self._lines: list[Json] = []
        if path is None:
            return
        try:
            self._lines = (
                [_checked(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
            )
            self._write()
        except OSError as error:
            raise UsageError(f"--json: {path}: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"--json: {path}: {error}; expected a file that this command wrote") from None

    @property
    def rows(self) -> list[Json]:
        return [one for one in self._lines if self.context.items() <= one.items()]

    def has(self, turn: int, server: str, workload: Workload) -> bool:
        wanted = {"turn": turn, "server": server, "row": workload.row}.items()
        return any(wanted <= one.items() for one in self.rows)

    def add(self, turn: int, server: str, workload: Workload, figures: Json, others: float | None) -> None:
        """Keep a measurement; `others` is how many cores other processes used."""
        where = {"turn": turn, "server": server, "row": workload.row}
        self._lines.append({**self.context, **where, "others": others, "figures": figures})
        self._write()

    def figures(self) -> dict[tuple[str, str], list[Json]]:
        """Return the figures of all turns by row and server."""
        found: dict[tuple[str, str], list[Json]] = {}
        for one in self.rows:
            found.setdefault((one["row"], one["server"]), []).append(one["figures"])
        return found

    def _write(self) -> None:
        """Write the whole file, so that it has no half line when the command is killed."""
        if self._path is not None:
            making = self._path.with_name(f"{self._path.name}.making")
            making.write_text("".join(f"{json.dumps(one)}\n" for one in self._lines))
            making.replace(self._path)


def _checked(line: Any) -> Json:
    """Return a line of the file, or raise `ValueError`."""
    if not isinstance(line, dict) or not {"turn", "server", "row", "figures"} <= line.keys():
        raise ValueError(f"found {str(line)[:80]!r}")
    return line


def _load(site: Site, folder: Path, workload: Workload, extra: str, scale: float) -> tuple[Json, float | None]:
    """Run the load generator in a process of its own; return the row's figures and the cores that others used.

    `extra`: fields of each request. Raises `ServerError`.
    """
    warmup, seconds = workload.warmup_s * scale, workload.measured_s * scale
    began, used = CpuClock.now(), site.cpu_s()
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "triptych.loadtest", "run", "--url", site.url, "--model", workload.model]
        command += ["--tokenizer", str(folder / "tokenizer.json"), "--out", out, "--quiet"]
        command += ["--seed", str(WORKLOADS.index(workload)), "--drain", str(_DRAIN_S), "--extra", extra]
        command += ["--duration", f"{warmup + seconds:g}", "--warmup", f"{warmup:g}", *workload.load]
        ran = subprocess.run(command, capture_output=True, text=True)
    if not site.running or not ran.stdout.strip():
        said = (ran.stderr.strip().splitlines() or ["the load generator said nothing"])[-1]
        how = "" if site.running else f"the server ended with {site.process.returncode}; "
        raise ServerError(f"{workload.name}: {how}{said}")
    now = CpuClock.now()
    others = now.foreign_cores(began)
    if others is not None:
        others = round(max(0.0, others - (site.cpu_s() - used) / (now.wall - began.wall)), 2)
        if others > QUIET_CORES:
            print(f"{workload.row}: busy, others used {others} cores", file=sys.stderr, flush=True)
    result: Json = json.loads(ran.stdout.strip().splitlines()[-1])
    for doubt in result["doubts"]:
        print(f"{workload.row}: {doubt}", file=sys.stderr, flush=True)
    found = _figures(result)
    return {name: found[name] for name in workload.figures if name in found}, others


def _figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Return what a row can show of a result of the load generator."""
    throughput, latency = result["throughput"], result["latency_ms"]
    figures = {name: throughput[key]["value"] for name, key in _RATES.items()}
    if "ttft" in latency:
        figures["first"], figures["late"] = latency["ttft"]["p50"], latency["ttft"]["p99"]
    if "itl" in latency:
        figures["between"] = latency["itl"]["p99"]
    return figures


def _print_table(found: Mapping[tuple[str, str], Sequence[Json]], servers: Sequence[str]) -> None:
    """Print medians, and in brackets how many times as good the first server is as each other one."""
    print(f"{'':34}" + "".join(f"{server:>26}" for server in servers))
    for workload in WORKLOADS:
        turns = [found.get((workload.row, server), []) for server in servers]
        for figure in workload.figures if any(turns) else ():
            values = [[one[figure] for one in server if one.get(figure) is not None] for server in turns]
            medians = [statistics.median(one) if one else None for one in values]
            cells = [_cell(figure, value, medians[0] if at else None) for at, value in enumerate(medians)]
            print(f"{workload.row + ', ' + figure:34}" + "".join(f"{cell:>26}" for cell in cells), flush=True)


def _cell(figure: str, value: float | None, first: float | None) -> str:
    if value is None:
        return "-"
    text = f"{value:,.4g} {_UNITS[figure]}"
    if not first or not value:
        return text
    return f"{text} ({value / first if _UNITS[figure] == 'ms' else first / value:.2f}x)"
