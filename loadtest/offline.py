"""An engine measured without a server, on the embedded models: a table for people, then one JSON line.

Prompts and lengths are seeded and forced, so that two runs do the same work; texts do not matter to speed, so they are
random token ids. Greedy. Each row is the median of several runs after one that warms up.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from model.engine.config import EngineConfig
from model.engine.llm import LLM
from model.pretrained import embedded_models
from model.request import SamplingParams

BATCHES = (1, 8, 32)
OUTPUT_TOKENS = 64
SHORTEST_PROMPT, LONGEST_PROMPT = 16, 128  # tokens, uniform
SHORTEST_TEXT, LONGEST_TEXT, TEXTS = 8, 256, 128


@dataclass(frozen=True, slots=True)
class Row:
    """One workload on one model; `rate` counts output tokens or texts a second."""

    model: str
    workload: str
    rate: float
    unit: str
    seconds: float


def add_command(commands: Any) -> None:
    parser = commands.add_parser("offline", help="an engine without a server, on the embedded models")
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each row (default: 3)")
    parser.add_argument("--dtype", default="auto", help="number format (default: auto)")
    parser.add_argument("--seed", type=int, default=0, help="of the workload (default: 0)")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure every embedded model and print what was found."""
    rows: list[Row] = []
    for name, path in embedded_models().items():
        llm = LLM(path, EngineConfig(dtype=arguments.dtype))
        measure = _generate_rows if llm.checkpoint.config.can_generate else _encode_rows
        rows += measure(name, llm, arguments.runs, random.Random(arguments.seed))
    table = Table("model", "workload", "rate", "seconds", title="offline engine", title_justify="left")
    for row in rows:
        table.add_row(row.model, row.workload, f"{row.rate:,.1f} {row.unit}", f"{row.seconds:.2f}")
    Console().print(table)
    machine = {"python": platform.python_version(), "torch": str(torch.__version__), "threads": torch.get_num_threads()}
    settings = {"runs": arguments.runs, "dtype": arguments.dtype, "seed": arguments.seed}
    print(json.dumps({"schema": 1, "machine": machine, "settings": settings, "rows": [asdict(row) for row in rows]}))


def _generate_rows(name: str, llm: LLM, runs: int, rng: random.Random) -> list[Row]:
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    rows = []
    for batch in BATCHES:
        prompts = [_ids(llm, rng, SHORTEST_PROMPT, LONGEST_PROMPT) for _ in range(batch)]
        seconds = _median(partial(llm.generate, prompts, params), runs)
        workload = f"{batch} at once, {OUTPUT_TOKENS} tokens out"
        rows.append(Row(name, workload, batch * OUTPUT_TOKENS / seconds, "tokens/s", seconds))
    return rows


def _encode_rows(name: str, llm: LLM, runs: int, rng: random.Random) -> list[Row]:
    texts = [_ids(llm, rng, SHORTEST_TEXT, LONGEST_TEXT) for _ in range(TEXTS)]
    seconds = _median(lambda: llm.encode(texts), runs)
    return [Row(name, f"{TEXTS} texts of {SHORTEST_TEXT}-{LONGEST_TEXT} tokens", TEXTS / seconds, "texts/s", seconds)]


def _ids(llm: LLM, rng: random.Random, shortest: int, longest: int) -> list[int]:
    vocab = llm.checkpoint.config.embedding.vocab_size
    return [rng.randrange(vocab) for _ in range(rng.randint(shortest, longest))]


def _median(work: Callable[[], object], runs: int) -> float:
    seconds = []
    for _ in range(runs + 1):
        began = time.monotonic()
        work()
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds[1:])
