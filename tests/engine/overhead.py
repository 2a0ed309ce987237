"""Measure the Python time per decode token outside the model: `python -m tests.engine.overhead`.

The runner packs each batch and builds its sampling rows, but computes nothing; it returns arbitrary tokens.
Figures are medians over the steps of one process, printed as a table and as one JSON line.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from tests.engine.scripted import Late
from triptych.model.api.request import Request, Source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.config.cache import PoolSize
from triptych.model.config.model import GenerationRules
from triptych.model.engine.execution.batch import BatchLayout, pack
from triptych.model.engine.execution.model_runner import ModelRunner
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.scheduled_step import SampledToken, SchedulerOutput
from triptych.model.engine.scheduling.scheduler import Scheduler

SHAPES = ((64, 512), (64, 8192), (256, 1024))  # (sequences, tokens per sequence)
STEPS = 200
BLOCK_SIZE = 16


class PackingRunner:
    """A replacement for `ModelRunner` that does its host work and computes nothing."""

    def __init__(self, blocks: BlockManager, run: Callable[..., Any]) -> None:
        self.blocks = blocks
        self.run = run

    def probe(self) -> None:
        """Do nothing: this runner never fails."""

    def encode_ahead(self, source: Source, layers: int, model: str = "") -> None:
        """Do nothing: there are no sources."""

    def forget_ahead(self) -> None:
        """Do nothing: there are no sources."""

    def execute(self, output: SchedulerOutput) -> list[SampledToken | None]:
        return self.launch(output).collect()

    def launch(self, output: SchedulerOutput, before: Any = None) -> Late:
        steps = output.scheduled
        self.run("pack", lambda: pack(BatchLayout.of(steps), steps, self.blocks.block_size, {}))
        row = partial(ModelRunner._sampling_row, cast(ModelRunner, self), rules=GenerationRules(), ruled=False)
        self.run("rows", lambda: [row(step.sequence) for step in steps if step.samples])
        return Late([SampledToken(7) if step.samples else None for step in steps], {})


def measured(sequences: int, length: int) -> dict[str, float]:
    """Return the microseconds per token of a step and of its parts."""
    seconds: dict[str, list[float]] = {}

    def run(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    blocks = BlockManager([PoolSize(sequences * (length + 2 * STEPS) // BLOCK_SIZE + sequences)], BLOCK_SIZE)
    scheduler = Scheduler(blocks, sequences, sequences * length)
    engine = GenerateEngine("overhead", PackingRunner(blocks, run), scheduler, max_model_len=length + 2 * STEPS)
    chance = random.Random(1)
    for number in range(sequences):
        prompt = tuple(chance.randrange(1000) for _ in range(length))
        engine.add(Request(f"r{number}", "overhead", prompt, SamplingParams(max_tokens=2 * STEPS)))
    engine.step()
    seconds.clear()
    schedule, update = scheduler.schedule, engine._update
    scheduler.schedule = lambda *arguments: run("schedule", lambda: schedule(*arguments))  # type: ignore[method-assign]
    engine._update = lambda *arguments: run("update", lambda: update(*arguments))  # type: ignore[method-assign]
    for _ in range(STEPS):
        run("step", engine.step)
    return {name: statistics.median(times) * 1e6 / sequences for name, times in seconds.items()}


def main() -> None:
    names = ("step", "schedule", "pack", "rows", "update")
    print("us a token".ljust(16), *(name.rjust(9) for name in names))
    found = {}
    for sequences, length in SHAPES:
        name = f"{sequences} x {length}"
        found[name] = {part: round(value, 2) for part, value in measured(sequences, length).items()}
        print(name.ljust(16), *(f"{found[name][part]:9.2f}" for part in names))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
