"""Runs given outputs with n-gram drafts and without, for the command `speculation`."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.bench.batches import Ids
from lab.bench.forced import ForcedRunner
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import Request, token_source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.engine.builder import load
from triptych.model.engine.execution.model_runner import ModelRunner

_FIRST_ID = 100  # lower ids are special tokens in some models
_EDIT_EVERY = 40  # tokens, on average


@dataclass(frozen=True, slots=True)
class Run:
    """Holds one arm of one turn: seconds and CPU seconds of all tokens but the first, and what was drafted."""

    seconds: float
    cpu_seconds: float
    steps: int
    drafted: int
    accepted: int


class DraftingEngine:
    """The engine of one model, whose outputs are given."""

    def __init__(self, path: Path, config: EngineConfig) -> None:
        loaded = load(ModelSpec("bench", str(path), config)).generate
        if loaded is None:
            raise ValueError(f"{path.name} does not generate")
        self._engine = loaded
        model = read_checkpoint(path).config
        self.vocab_size = model.embedding.vocab_size
        self._start = () if model.decoder_start_token_id is None else (model.decoder_start_token_id,)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Return whether prompts and outputs of these lengths fit the model's context, which cuts off longer ones."""
        length = max(prompt_tokens, 1 + output_tokens) if self._start else prompt_tokens + output_tokens
        return length <= self._engine.max_model_len

    def run(self, asks: Sequence[tuple[Ids, Ids]], drafts: int, right: float = 0.0) -> Run:
        """Generate the outputs of (prompt, output) pairs, with up to `drafts` drafts a step.

        A draft model's drafts are accepted with probability `right`.
        """
        engine, runner = self._engine, self._engine.runner
        assert isinstance(runner, ModelRunner)
        engine.runner = ForcedRunner(runner, {str(number): output for number, (_, output) in enumerate(asks)}, right)
        try:
            for number, (prompt, output) in enumerate(asks):
                engine.add(self._request(number, prompt, len(output), drafts))
            while any(one.num_output_tokens == 0 for one in engine.scheduler):  # the prompts
                engine.step()
            before, began, cpu, steps = engine.stats(), time.perf_counter(), time.process_time(), 0
            while engine.has_work:
                engine.step()
                steps += 1
            seconds, cpu_seconds, stats = time.perf_counter() - began, time.process_time() - cpu, engine.stats()
        finally:
            engine.runner = runner
        drafted = stats.draft_tokens - before.draft_tokens
        return Run(seconds, cpu_seconds, steps, drafted, stats.accepted_tokens - before.accepted_tokens)

    def _request(self, number: int, prompt: Ids, output_tokens: int, drafts: int) -> Request:
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True, num_speculative_tokens=drafts)
        ids, source = (self._start, token_source(prompt)) if self._start else (prompt, None)
        return Request(str(number), "bench", ids, params, source, arrival_time=time.monotonic())


def edit(rng: random.Random, vocab_size: int, prompt_tokens: int, output_tokens: int) -> tuple[Ids, Ids]:
    """Return a prompt, and an output that copies it, but every now and then replaces, leaves out or puts in tokens."""
    ids = range(_FIRST_ID, vocab_size)
    prompt = rng.choices(ids, k=prompt_tokens)
    output: list[int] = []
    place = 0
    while len(output) < output_tokens:
        if rng.random() < 1 / _EDIT_EVERY:
            place += rng.choice((0, 1, 3))
            output += rng.choices(ids, k=rng.choice((0, 1, 3)))
        output.append(prompt[place % prompt_tokens])
        place += 1
    return tuple(prompt), tuple(output[:output_tokens])


def fresh(rng: random.Random, vocab_size: int, prompt_tokens: int, output_tokens: int) -> tuple[Ids, Ids]:
    """Return a prompt and an output drawn by Zipf's law: short runs occur again, and do not tell what comes next."""
    ids = range(_FIRST_ID, vocab_size)
    drawn = rng.choices(ids, [1 / (1 + at) for at in range(len(ids))], k=prompt_tokens + output_tokens)
    return tuple(drawn[:prompt_tokens]), tuple(drawn[prompt_tokens:])
