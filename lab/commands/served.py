"""The command `served`, which compares servers over HTTP: triptych, vLLM and llama.cpp's, with the same load generator.

For each model the servers take turns: one is started, gets all workloads, and ends before the next one starts. The
figures of a row are medians over the turns. Run it on an idle machine; servers and load generator share all cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.models import built
from lab.bench.peers import Unsupported
from lab.faults.site import Site
from lab.servers.servers import SERVERS
from triptych.loadtest.errors import ServerError
from triptych.loadtest.results import page
from triptych.loadtest.runs import flags, output

DECODER = ("--target", "openai-completions")
MIXED = (*DECODER, "--prompt-tokens", "uniform:32-512", "--output-tokens", "uniform:16-256")
SINGLE = (*DECODER, "--prompt-tokens", "128", "--output-tokens", "64", "--concurrency", "1")
TEXTS = ("--target", "openai-embeddings", "--prompt-tokens", "uniform:8-256")
_UNITS = {"tokens": "tokens/s", "requests": "requests/s", "first": "ms", "between": "ms"}


@dataclass(frozen=True, slots=True)
class Workload:
    """Describes a row's load."""

    model: str
    name: str
    load: Sequence[str]  # arguments of `triptych.loadtest run`
    figures: Sequence[str]  # tokens, requests: a second; first: token, p50; between: tokens, p99
    seconds: float  # measured, after a fifth of them


WORKLOADS = (
    Workload("D2", "one stream", SINGLE, ("tokens", "first"), 20),
    Workload("D2", "x16", (*MIXED, "--concurrency", "16"), ("tokens",), 40),
    Workload("D2", "x64", (*MIXED, "--concurrency", "64"), ("tokens", "between"), 60),
    Workload("D3", "one stream", SINGLE, ("tokens",), 30),
    Workload("D3", "x16", (*MIXED, "--concurrency", "16"), ("tokens",), 60),
    Workload(
        *("D3", "a prompt of 2,048"),
        (*DECODER, "--prompt-tokens", "2048", "--output-tokens", "2", "--concurrency", "1"),
        *(("first",), 30),
    ),
    Workload("N2", "16 clients x 1 text", (*TEXTS, "--texts", "1", "--concurrency", "16"), ("requests",), 20),
    Workload("N2", "8 clients x 16 texts", (*TEXTS, "--texts", "16", "--concurrency", "8"), ("requests",), 20),
)
_RATES = {"tokens": "output_throughput", "requests": "request_throughput"}
_QUICK = 0.3  # of the seconds
Found = dict[tuple[str, str, str], dict[str, list[float]]]  # by model, workload, server: values of each figure


def add_command(commands: Any) -> None:
    text = "Compare servers over HTTP with the same models, workloads and load generator, in turns."
    parser = commands.add_parser("served", help="other servers, over HTTP", description=text)
    default = ["triptych", "vllm", "llama.cpp"]
    parser.add_argument("--servers", nargs="+", default=default, choices=list(SERVERS), help="in this order")
    models = sorted({one.model for one in WORKLOADS})
    parser.add_argument("--models", nargs="+", default=models, choices=models, help="benchmark models")
    parser.add_argument("--only", default="", metavar="WORD", help="workloads whose name contains this")
    parser.add_argument("--turns", type=flags.positive, default=3, metavar="N", help="of each server and model")
    parser.add_argument("--quick", action="store_true", help="one turn, a third of the seconds: to try the command")
    parser.add_argument("--cache", type=Path, default=Path("build/bench"), help="folder of benchmark models")
    parser.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    found: Found = {}
    unable: dict[str, str] = {}
    for model in options.models:
        folder = built(model, options.cache)
        workloads = [one for one in WORKLOADS if one.model == model and options.only in one.name]
        for turn in range(1 if options.quick else options.turns):
            for server in options.servers if workloads else ():
                print(f"{model}: {server}, turn {turn + 1}", file=sys.stderr, flush=True)
                try:
                    with SERVERS[server].start(model, folder) as site:
                        _measure(site, server, folder, workloads, options, found)
                except (Unsupported, ServerError) as error:
                    unable[f"{model} {server}"] = str(error)
                    print(f"{model}: {server}: {error}", file=sys.stderr, flush=True)
    _print_table(found, options.servers)
    about = {"kind": "served", "commit": page.commit(), "machine": page.describe(), "quick": options.quick}
    versions = {name: SERVERS[name].version() for name in options.servers}
    rows = [
        {"model": model, "workload": workload, "server": server, "values": values}
        for (model, workload, server), values in found.items()
    ]
    print(output.line(about | {"versions": versions, "rows": rows, "unable": unable}), flush=True)
    return 0


def _measure(
    site: Site,
    server: str,
    folder: Path,
    workloads: Sequence[Workload],
    options: argparse.Namespace,
    found: Found,
) -> None:
    """Run the workloads on a server that is ready, and add their figures to `found`."""
    for seed, workload in enumerate(workloads):
        seconds = workload.seconds * (_QUICK if options.quick else 1)
        figures = _figures(_load(site, folder, workload, seconds, seed))
        row = found.setdefault((workload.model, workload.name, server), {})
        for name in workload.figures:
            row.setdefault(name, []).extend([figures[name]] if name in figures else [])


def _load(site: Site, folder: Path, workload: Workload, seconds: float, seed: int) -> dict[str, Any]:
    """Run the load generator in a process of its own; return its result. Raises `ServerError`."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "triptych.loadtest", "run", "--url", site.url, "--model", workload.model]
        command += ["--tokenizer", str(folder / "tokenizer.json"), "--seed", str(seed), "--out", out, "--quiet"]
        command += ["--duration", f"{1.2 * seconds:g}", "--warmup", f"{0.2 * seconds:g}", *workload.load]
        ran = subprocess.run(command, capture_output=True, text=True)
    if not site.running or not ran.stdout.strip():
        said = (ran.stderr.strip().splitlines() or ["the load generator said nothing"])[-1]
        how = "" if site.running else f"the server ended with {site.process.returncode}; "
        raise ServerError(f"{workload.name}: {how}{said}")
    result: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    for doubt in result["doubts"]:
        print(f"{workload.model} {workload.name}: {doubt}", file=sys.stderr, flush=True)
    return result


def _figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Return what a row can show of a result of the load generator."""
    throughput, latency = result["throughput"], result["latency_ms"]
    figures = {name: throughput[key]["value"] for name, key in _RATES.items()}
    if "ttft" in latency:
        figures["first"] = latency["ttft"]["p50"]
    if "itl" in latency:
        figures["between"] = latency["itl"]["p99"]
    return figures


def _print_table(found: Found, servers: Sequence[str]) -> None:
    """Print medians, and in brackets how many times as good the first server is as each other one."""
    print(f"{'':32}" + "".join(f"{server:>24}" for server in servers))
    for model, workload in dict.fromkeys(key[:2] for key in found):
        rows = [found.get((model, workload, server), {}) for server in servers]
        for figure in next(row for row in rows if row):
            medians = [statistics.median(row[figure]) if row.get(figure) else None for row in rows]
            cells = [_cell(figure, value, medians[0] if at else None) for at, value in enumerate(medians)]
            print(f"{model + ' ' + workload + ', ' + figure:32}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


def _cell(figure: str, value: float | None, first: float | None) -> str:
    if value is None:
        return "-"
    text = f"{value:,.4g} {_UNITS[figure]}"
    if not first or not value:
        return text
    return f"{text} ({value / first if _UNITS[figure] == 'ms' else first / value:.2f}x)"
