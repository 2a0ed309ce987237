"""Engines measured without a server: a table for people, then one JSON line.

Without names it takes the embedded models, which is quick; `--models D1,D2,...` builds the benchmark models and takes
them through their workloads. Work is seeded and lengths are forced, so that two runs, and two engines, do the same.
Engines take turns, run by run; beside each rate stands the floor that this machine's measured bandwidth and matrix rate
allow, and the share of it that was reached.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from loadtest.bench.floors import Ceilings, Floor
from loadtest.bench.host import step_milliseconds
from loadtest.bench.models import CONFIGS, built
from loadtest.bench.worker import Worker
from loadtest.bench.workloads import QUICK, Scale, Workload, workloads
from model.pretrained import embedded_models

PEERS = ("transformers", "ctranslate2")
BATCHES = (1, 8, 16, 32, 64)
CONTEXT = 256  # tokens of each sequence where steps are timed
_WIDTH = 150  # of the table in a file or pipe
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0}
_FORMS = {"decoder-only": "D", "encoder-decoder": "E", "encoder-only": "N"}


@dataclass(frozen=True, slots=True)
class Row:
    """One workload of one model on one engine, medians over the runs."""

    model: str
    engine: str
    workload: str
    rate: float  # output tokens or texts a second
    unit: str
    total_rate: float  # tokens in and out a second
    seconds: float
    first_token_ms: float | None  # the median request's
    floor_seconds: float
    of_floor: float  # floor / seconds
    ratio: float | None  # how many times as fast as this peer we were, the median of the pairs
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step in which `batch` sequences decode."""

    model: str
    batch: int
    milliseconds: float
    floor_milliseconds: float
    of_floor: float


def add_command(commands: Any) -> None:
    parser = commands.add_parser("offline", help="an engine without a server")
    parser.add_argument("--models", default="", help=f"of {', '.join(CONFIGS)} (default: the embedded models)")
    parser.add_argument("--only", default="", help="workloads whose name has this in it, or `steps`")
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each row (default: 3)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests, half of the lengths")
    parser.add_argument("--peer", action="append", default=[], choices=PEERS, help="take turns with it; repeatable")
    parser.add_argument("--dtype", default="auto", help="number format (default: auto)")
    parser.add_argument("--quantization", default="none", help="none or int8 (default: none)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto or int8 (default: auto)")
    parser.add_argument("--attention-backend", default="auto", help="auto, native, triton or sdpa (default: auto)")
    parser.add_argument("--cache", type=Path, default=Path("build/bench"), help="where benchmark models are kept")
    parser.add_argument("--seed", type=int, default=0, help="of the workload (default: 0)")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the tables and the JSON line."""
    missing = [peer for peer in arguments.peer if importlib.util.find_spec(peer) is None]
    if missing:
        raise SystemExit(f"not installed: {', '.join(missing)}; pip install 'triptych[peers]'")
    bench = Bench(arguments)
    for name in filter(None, arguments.models.split(",")):
        if name not in CONFIGS:
            raise SystemExit(f"--models: found {name!r}, expected some of {', '.join(CONFIGS)}")
        bench.measure(name, built(name, arguments.cache), name)
    if not arguments.models:
        for name, path in embedded_models().items():
            bench.measure(name, path, None)
    bench.report()


class Bench:
    """One run of the command."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.rows: list[Row] = []
        self.steps: list[StepRow] = []
        base = QUICK if arguments.quick or not arguments.models else Scale()
        self.scale = Scale(base.requests, base.lengths, arguments.seed)
        self.ceilings: dict[str, Ceilings] = {}
        self.console = Console(stderr=True)

    def measure(self, name: str, path: Path, benchmark: str | None) -> None:
        """All of one model's rows; the embedded models have no peers."""
        self.console.print(f"{name} ...")
        ours = Worker("triptych", path, self._settings(benchmark))
        form = (benchmark or _FORMS[ours.info["form"]])[0]
        peers = [Worker(peer, path, {"dtype": ours.info["dtype"]}) for peer in self._peers(form, benchmark)]
        try:
            floor = self._floor(path, ours.info)
            asked = workloads(form, ours.info["vocab_size"], self.scale)
            for number, workload in enumerate(asked):
                if self.arguments.only in workload.name:
                    self._take_turns(name, form, number, workload, ours, peers, floor)
            if form == "D" and (not self.arguments.only or self.arguments.only == "steps"):
                self._time_steps(name, ours, floor)
        finally:
            for worker in (ours, *peers):
                worker.close()

    def _settings(self, benchmark: str | None) -> dict[str, Any]:
        names = ("dtype", "quantization", "kv_cache_dtype", "attention_backend")
        settings = {name: getattr(self.arguments, name) for name in names}
        return {**settings, "kv_cache_memory": 3 << 30} if benchmark else settings

    def _peers(self, form: str, benchmark: str | None) -> list[str]:
        able = {"transformers": "DEN", "ctranslate2": "DE"}
        return [peer for peer in self.arguments.peer if benchmark and form in able[peer]]

    def _floor(self, path: Path, info: dict[str, Any]) -> Floor:
        dtype = "float32" if info["dtype"] == "float32" else "bfloat16"
        if dtype not in self.ceilings:
            self.ceilings[dtype] = Ceilings.measure(getattr(torch, dtype))
        kv_bytes = 1.0 if self.arguments.kv_cache_dtype == "int8" else _BYTES[dtype]
        return Floor.of(path, self.ceilings[dtype], _BYTES[info["dtype"]], kv_bytes)

    def _take_turns(
        self, name: str, form: str, number: int, workload: Workload, ours: Worker, peers: list[Worker], floor: Floor
    ) -> None:
        """One uncounted run of everyone, then A B A B."""
        task = {"form": form, "workload": number, "scale": asdict(self.scale)}
        engines = {"triptych": ours, **dict(zip(self._peers(form, name), peers, strict=True))}
        found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
        for turn in range(self.arguments.runs + 1):
            for engine, worker in engines.items():
                answer = worker.ask(**task)
                found[engine] += [answer] if turn else []
        least = floor.workload(workload)
        for engine, answers in found.items():
            pairs = zip((a["seconds"] for a in answers), (a["seconds"] for a in found["triptych"]), strict=True)
            ratio = None if engine == "triptych" else statistics.median(theirs / own for theirs, own in pairs)
            self.rows.append(_row(name, engine, workload, answers, least, ratio))

    def _time_steps(self, name: str, ours: Worker, floor: Floor) -> None:
        answer = ours.ask(step={"batches": BATCHES, "context": CONTEXT, "steps": 20})["seconds"]
        for batch in BATCHES:
            seconds = statistics.median(answer[str(batch)])
            least = floor.step(batch, batch * CONTEXT)
            self.steps.append(StepRow(name, batch, seconds * 1e3, least * 1e3, least / seconds))

    def report(self) -> None:
        console = Console()
        if not console.is_terminal:
            console.width = _WIDTH
        if self.rows:
            console.print(_table(self.rows))
        if self.steps:
            table = Table("model", "sequences", "ms a step", "floor ms", "of floor", title_justify="left")
            table.title = f"decode steps, context {CONTEXT}"
            for row in self.steps:
                cells = (row.milliseconds, row.floor_milliseconds)
                table.add_row(row.model, str(row.batch), *(f"{ms:.2f}" for ms in cells), f"{row.of_floor:.0%}")
            console.print(table)
        host = {str(batch): step_milliseconds(batch) for batch in (1, 64)}
        console.print("Python a step: " + ", ".join(f"{ms:.2f} ms at {batch}" for batch, ms in host.items()))
        for dtype, found in self.ceilings.items():
            console.print(
                f"this machine: {found.bytes_per_second / 1e9:.1f} GB/s read, "
                f"{found.flops_per_second / 1e9:,.0f} GFLOP/s in {dtype}"
            )
        print(json.dumps({"schema": 2, **self._context(), "python_ms": host, **self._results()}))

    def _context(self) -> dict[str, Any]:
        machine = {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "commit": _commit(),
        }
        settings = {key: value for key, value in vars(self.arguments).items() if key not in ("command", "cache")}
        ceilings = {dtype: asdict(found) for dtype, found in self.ceilings.items()}
        return {"machine": machine, "settings": settings, "ceilings": ceilings}

    def _results(self) -> dict[str, Any]:
        return {"rows": [asdict(row) for row in self.rows], "steps": [asdict(row) for row in self.steps]}


def _row(
    name: str, engine: str, workload: Workload, answers: list[dict[str, Any]], floor: float, ratio: float | None
) -> Row:
    seconds = statistics.median(answer["seconds"] for answer in answers)
    firsts = [statistics.median(a["first_token_seconds"]) for a in answers if a["first_token_seconds"]]
    counted = workload.output_tokens or len(workload.asks)
    return Row(
        model=name,
        engine=engine,
        workload=workload.name,
        rate=counted / seconds,
        unit="tokens/s" if workload.output_tokens else "texts/s",
        total_rate=(workload.input_tokens + workload.output_tokens) / seconds,
        seconds=seconds,
        first_token_ms=statistics.median(firsts) * 1e3 if firsts and workload.beams == 1 else None,
        floor_seconds=floor,
        of_floor=floor / seconds,
        ratio=ratio,
        peak_bytes=max(answer["peak_bytes"] for answer in answers),
    )


def _table(rows: list[Row]) -> Table:
    columns = ("model", "engine", "workload", "out", "total tokens/s", "seconds", "first token", "of floor")
    table = Table(*columns, "ours is", "peak", title="offline engine", title_justify="left")
    for row in rows:
        table.add_row(
            row.model,
            row.engine,
            row.workload,
            f"{row.rate:,.1f} {row.unit}",
            f"{row.total_rate:,.0f}",
            f"{row.seconds:.2f}",
            "" if row.first_token_ms is None else f"{row.first_token_ms:,.0f} ms",
            f"{row.of_floor:.0%}",
            "" if row.ratio is None else f"{row.ratio:.2f}x",
            f"{row.peak_bytes / 1e6:,.0f} MB",
        )
    return table


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
