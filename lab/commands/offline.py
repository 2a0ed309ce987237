"""The command `offline`, which measures engines without a server, and prints tables and one JSON line.

By default it measures the embedded models, which is quick; `--models D1,D2,...` builds benchmark models and runs their
workloads. Work is seeded and lengths are forced, so that all runs and engines do the same. Engines take turns, run by
run. Each rate is shown with its share of the roofline, which follows from this machine's measured bandwidth and matrix
rate, and with the CPU use of other processes. Every row is printed and, with `--json`, written at once, so that an
interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lab.bench.batches import QUICK, Scale, Workload, workloads
from lab.bench.host import step_milliseconds
from lab.bench.models import CONFIGS, built
from lab.bench.peers import PEERS
from lab.bench.peers.engine_process import EngineProcess
from lab.bench.roofline import NUMBER_BYTES, Ceilings, Roofline, multiplied_as, weight_bytes
from lab.bench.tables import Row, StepRow, brief, lowest_cosine, row, steps_table, table
from triptych.loadtest.errors import UsageError
from triptych.loadtest.runs import flags
from triptych.model.api.engine_config import ATTENTION_BACKENDS, DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS
from triptych.model.pretrained import SMALL, embedded_models

OURS = "triptych"
BATCHES = (1, 8, 16, 32, 64)
CONTEXT = 256  # tokens of each sequence, for timing steps
COMPARED_TEXTS = 16  # whose vectors are compared with those in float32
_WIDTH = 180  # of tables in a file or pipe
_PAUSE_S = 0.5  # between engines: threads of the one before wait busily, those of Intel's OpenMP for 0.2 s
_FORMS = {"decoder-only": "D", "encoder-decoder": "E", "encoder-only": "N"}
_OF_BENCHMARKS = {"M": "D", "R": "D"}  # decoders with experts, and with recurrent layers
_NAMES = {
    "D": "decoders",
    "E": "encoder-decoders",
    "N": "encoders",
    "S": "models that read sound",
    "V": "models that read pictures",
}
_UNITS = {"N": "texts/s", "V": "pictures/s"}  # of others: tokens/s


def add_command(commands: Any) -> None:
    parser = commands.add_parser("offline", help="measure engines without a server")
    parser.add_argument("--models", default="", help=f"of {', '.join(CONFIGS)} (default: the embedded models)")
    parser.add_argument("--only", default="", help="workloads whose name contains this, or `steps`")
    parser.add_argument("--runs", type=flags.positive, default=3, help="counted runs of each row")
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests, half of the lengths")
    parser.add_argument(
        "--lengths", type=flags.positive, default=1, help="times the usual lengths of prompts and texts"
    )
    parser.add_argument("--requests", type=flags.positive, help="limit on the requests of a workload")
    parser.add_argument(
        "--peer", action="append", default=[], choices=list(PEERS), help="also measure this engine; repeatable"
    )
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="number format")
    parser.add_argument("--quantization", default="none", choices=QUANTIZATIONS, help="of weight matrices")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, help="number format of the KV cache"
    )
    parser.add_argument(
        "--attention-backend", default="auto", choices=ATTENTION_BACKENDS, help="implementation of attention"
    )
    parser.add_argument("--cache", type=Path, default=Path("build/bench"), help="folder of benchmark models")
    parser.add_argument("--json", type=Path, help="append each workload's rows to this file as soon as they are known")
    parser.add_argument("--seed", type=flags.whole, default=0, help="of the workload")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print the tables and the JSON line; return 1 if triptych's engine failed."""
    missing = sorted({package for peer in arguments.peer for package in PEERS[peer].missing})
    if missing:
        raise UsageError(f"not installed: {', '.join(missing)}; python -m pip install {' '.join(missing)}")
    names = [name for name in arguments.models.split(",") if name]
    for name in names:
        if name not in CONFIGS:
            raise UsageError(f"--models: found {name!r}, expected some of {', '.join(CONFIGS)}")
    if arguments.json is not None:
        _check_writable(arguments.json)
    bench = Bench(arguments)
    try:
        for name in names:
            bench.measure(name, built(name, arguments.cache), name)
        if not names:
            for name in SMALL:
                bench.measure(name, embedded_models()[name], None)
    finally:  # also for an interrupted run
        bench.report()
    if not bench.rows and not bench.steps:
        raise UsageError(f"--only: found {arguments.only!r}, expected part of a workload's name, or `steps`")
    return int(any(row.engine == OURS and row.unable is not None for row in bench.rows))


def _check_writable(path: Path) -> None:
    """Raise before hours of measuring if the file cannot be written."""
    try:
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"--json: {path}: {error.strerror}") from None


class Bench:
    """Runs the command once."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.rows: list[Row] = []
        self.steps: list[StepRow] = []
        base = QUICK if arguments.quick or not arguments.models else Scale()
        self.scale = Scale(base.requests, base.lengths * arguments.lengths, arguments.seed, arguments.requests)
        self.ceilings: dict[str, Ceilings] = {}
        self.versions: dict[str, Any] = {}
        self.console = Console(stderr=True)

    def measure(self, name: str, path: Path, benchmark: str | None) -> None:
        """Measure all rows of one model; the embedded models have no peers."""
        self.console.print(f"{name} ...")
        workers = {OURS: EngineProcess(OURS, path, self._settings(benchmark))}
        try:
            info = workers[OURS].info
            if "unable" in info:
                return self._keep([Row(name, OURS, "", unable=info["unable"])])
            letter = (benchmark or _FORMS[info["form"]])[0]
            form = _OF_BENCHMARKS.get(letter, letter)
            for peer in self.arguments.peer if benchmark else ():
                if form in PEERS[peer].forms:
                    workers[peer] = EngineProcess(peer, path, {"dtype": info["dtype"], "form": form})
                    self.versions[peer] = workers[peer].info
                else:
                    self._keep([Row(name, peer, "", unable=f"no {_NAMES[form]}")])
            roofline = self._roofline(path, info)
            for number, workload in enumerate(workloads(form, info["vocab_size"], self.scale)):
                if self.arguments.only in workload.name:
                    cosines = self._cosines(path, benchmark, workload, workers) if form in "NV" else {}
                    self._take_turns(name, form, number, workload, workers, roofline, cosines)
            if form == "D" and (not self.arguments.only or self.arguments.only == "steps"):
                self._time_steps(name, workers[OURS], roofline)
        finally:
            for worker in workers.values():
                worker.close()

    def _settings(self, benchmark: str | None) -> dict[str, Any]:
        names = ("dtype", "quantization", "kv_cache_dtype", "attention_backend")
        # the runs of a workload have the same prompts: with prefix caching all but the first would find them computed
        settings = {name: getattr(self.arguments, name) for name in names} | {"prefix_caching": False}
        return {**settings, "kv_cache_memory": 3 << 30} if benchmark else settings

    def _roofline(self, path: Path, info: dict[str, Any]) -> Roofline:
        weights = info["dtype"]
        rate = multiplied_as(weights)
        if rate not in self.ceilings:
            self.ceilings[rate] = Ceilings.measure(rate)
        kv = "float32" if weights == "float32" else "bfloat16"
        kv_bytes = NUMBER_BYTES[kv if self.arguments.kv_cache_dtype == "auto" else "int8"]
        return Roofline.of(path, self.ceilings[rate], weight_bytes(weights), kv_bytes)

    def _take_turns(
        self,
        name: str,
        form: str,
        number: int,
        workload: Workload,
        workers: dict[str, EngineProcess],
        roofline: Roofline,
        cosines: dict[str, float],
    ) -> None:
        """Run every engine once without counting, then A B A B; an engine that fails is not run again."""
        task = {"form": form, "workload": number, "scale": asdict(self.scale)}
        found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in workers}
        unable: dict[str, str] = {}
        for turn in range(self.arguments.runs + 1):
            for engine in found:
                if engine in unable:
                    continue
                time.sleep(_PAUSE_S if len(found) > 1 else 0.0)
                answer = workers[engine].ask(**task)
                if "unable" in answer:
                    unable[engine] = answer["unable"]
                found[engine] += [answer] if turn else []
        least, unit = roofline.workload(workload), _UNITS.get(form, "tokens/s")
        rows = []
        for engine, answers in found.items():
            if engine in unable:
                rows.append(Row(name, engine, workload.name, unable=unable[engine]))
                continue
            ours = None if engine == OURS or OURS in unable else found[OURS]
            rows.append(row(name, engine, workload, answers, least, ours, cosines.get(engine), unit))
        self._keep(rows)

    def _cosines(
        self, path: Path, benchmark: str | None, workload: Workload, workers: dict[str, EngineProcess]
    ) -> dict[str, float]:
        """Return the lowest cosine of each engine's vectors to triptych's in float32, if any engine is in int8."""
        if self.arguments.quantization == "none" and not any(engine.endswith("-int8") for engine in workers):
            return {}
        texts = [ask.ids for ask in workload.asks[:COMPARED_TEXTS]]
        exact = EngineProcess(OURS, path, {**self._settings(benchmark), "dtype": "float32", "quantization": "none"})
        try:
            wanted = exact.ask(embed=texts)
        finally:
            exact.close()
        found = {engine: worker.ask(embed=texts) for engine, worker in workers.items()}
        return {
            engine: lowest_cosine(answer["vectors"], wanted["vectors"])
            for engine, answer in found.items()
            if "unable" not in answer and "unable" not in wanted
        }

    def _time_steps(self, name: str, ours: EngineProcess, roofline: Roofline) -> None:
        answer = ours.ask(step={"batches": BATCHES, "context": CONTEXT, "steps": 20})
        if "unable" in answer:
            return self._keep([Row(name, OURS, "steps", unable=answer["unable"])])
        steps = []
        for batch in map(int, sorted(answer["seconds"], key=int)):
            seconds = statistics.median(answer["seconds"][str(batch)])
            least = roofline.step(batch, [CONTEXT] * batch)
            times = (seconds * 1e3, least * 1e3, least / seconds)
            steps.append(StepRow(name, batch, *times, foreign_cores=answer["foreign_cores"]))
        self._keep([], steps)

    def _keep(self, rows: Sequence[Row], steps: Sequence[StepRow] = ()) -> None:
        """Print and write the rows of a workload: a JSON line with the same fields as that of a whole run."""
        self.rows += rows
        self.steps += steps
        for found in rows:
            self.console.print("  " + brief(found), soft_wrap=True, highlight=False)
        if self.arguments.json:
            with self.arguments.json.open("a") as file:
                print(json.dumps({**self._context(), **_results(rows, steps)}), file=file)

    def report(self) -> None:
        """Print the tables, then one JSON line."""
        console = Console()
        if not console.is_terminal:
            console.width = _WIDTH
        if self.rows:
            console.print(table(self.rows))
        if self.steps:
            console.print(steps_table(self.steps, CONTEXT))
        host = {str(batch): step_milliseconds(batch) for batch in (1, 64)}
        console.print("Python a step: " + ", ".join(f"{ms:.2f} ms at {batch}" for batch, ms in host.items()))
        for dtype, found in self.ceilings.items():
            console.print(
                f"this machine: {found.bytes_per_second / 1e9:.1f} GB/s read, "
                f"{found.flops_per_second / 1e9:,.0f} GFLOP/s for {dtype} ({found.kernel})"
            )
        print(json.dumps({**self._context(), "python_ms": host, **_results(self.rows, self.steps)}))

    def _context(self) -> dict[str, Any]:
        machine = {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "commit": _commit(),
        }
        left_out = ("command", "cache", "json")
        settings = {key: value for key, value in vars(self.arguments).items() if key not in left_out}
        ceilings = {dtype: asdict(found) for dtype, found in self.ceilings.items()}
        return {
            "schema": 3,
            "machine": machine,
            "settings": settings,
            "peers": self.versions,
            "ceilings": ceilings,
        }


def _results(rows: Sequence[Row], steps: Sequence[StepRow]) -> dict[str, Any]:
    return {"rows": [asdict(row) for row in rows], "steps": [asdict(row) for row in steps]}


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
