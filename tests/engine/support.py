"""Helpers that build engines over tiny checkpoints and record every row of logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.model.checkpoints import (
    AUDIO,
    CPU,
    DECODERS,
    START,
    by_layer,
    loaded,
    prompt,
    reference_logits,
    saved,
    source_of,
)
from triptych.model.api.request import Request, TokenOutput
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.attention.base import AttentionBackend
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.cache.kv_cache import KVCache
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.cache import PoolSize, StateSize, paged_specs, pools_of
from triptych.model.config.stack import StackConfig
from triptych.model.engine.execution.model_runner import ModelRunner, SampledToken, decodes_first
from triptych.model.engine.execution.pictures import PictureStore
from triptych.model.engine.execution.step_program import StepPlan, StepProgram
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.scheduled_step import SchedulerOutput
from triptych.model.engine.scheduling.scheduler import Scheduler
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import load_model


class RecordingProgram:
    """A step program that remembers the hidden states of its latest step."""

    def __init__(self, program: StepProgram) -> None:
        self.program = program
        self.hidden = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)

    def run(self, plan: StepPlan, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        self.hidden, logits = self.program.run(plan, tokens)
        return self.hidden, logits


class RecordingRunner(ModelRunner):
    """A runner whose `rows[request_id]` hold every computed (position, logits) in order, sampled from or not.

    `short_rows` counts the rows before the sequence left LongRoPE's short context.
    """

    def __init__(
        self, model: Transformer, cache: KVCache, block_manager: BlockManager, pictures: PictureStore | None = None
    ) -> None:
        super().__init__(model, cache, block_manager, pictures=pictures)
        self._program = self.recording = RecordingProgram(self._program)  # type: ignore[assignment]
        self.rows: dict[str, list[tuple[int, Tensor]]] = {}
        self.short_rows: dict[str, int] = {}

    def execute(self, output: SchedulerOutput) -> list[SampledToken | None]:
        sampled = super().execute(output)
        with torch.inference_mode():
            logits = iter(self.model.logits(self.recording.hidden))
        for step in decodes_first(output.scheduled):
            rows = self.rows.setdefault(step.sequence.request.request_id, [])
            rows += [(position, next(logits)) for position in range(step.start, step.start + step.num_tokens)]
            if step.sequence.rotary_context <= (self.model.config.short_context or 0):
                self.short_rows[step.sequence.request.request_id] = len(rows)
        return sampled

    def worst(self, kind: str, request: Request, output_ids: Sequence[int]) -> float:
        """Return the largest difference from `transformers`' full forward pass over all rows of the request."""
        ids = [*request.prompt_token_ids, *output_ids]
        rows, count = self.rows[request.request_id], self.short_rows.get(request.request_id, 0)
        parts = [(rows[:count], ids[: self.model.config.short_context]), (rows[count:], ids)]
        known = (request.source, request.images)
        return max(_farthest(part, reference_logits(kind, read, *known)) for part, read in parts if part)


def _farthest(rows: Sequence[tuple[int, Tensor]], expected: Tensor) -> float:
    return max((row - expected[position]).abs().max().item() for position, row in rows)


@dataclass
class Running:
    """An engine and all of its outputs."""

    engine: GenerateEngine
    runner: RecordingRunner
    outputs: list[TokenOutput] = field(default_factory=list)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.outputs += self.engine.step()[0]
            self.engine.check_invariants()

    def run(self, limit: int = 2000) -> Running:
        for _ in range(limit):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work
        assert self.engine.block_manager.is_empty
        return self

    def ids(self, request_id: str, index: int = 0) -> list[int]:
        mine = (o for o in self.outputs if (o.request_id, o.index) == (request_id, index))
        return [token for output in mine for token in output.token_ids]


def pools_for(decoder: StackConfig, num_blocks: int) -> list[PoolSize]:
    """Return a pool of this many blocks for each window size of the layers."""
    return [PoolSize(num_blocks, pool.window) for pool in pools_of(paged_specs(decoder, "float32"))]


def running(
    kind: str,
    *,
    backend: AttentionBackend | None = None,
    num_blocks: int = 200,
    block_size: int = 4,
    max_num_seqs: int = 32,
    budget: int = 256,
    picture_rows: int = 64,
    folder: Path | None = None,
) -> Running:
    """Return an engine of a kind, or of a `folder` as torch computes it."""
    checkpoint = read_checkpoint(folder or saved(kind).path)
    model = (
        loaded(kind, backend)
        if folder is None
        else load_model(
            checkpoint, by_layer(SdpaBackend(), checkpoint.config, torch.float32), LinearFactory(torch.float32)
        )
    )
    decoder = model.config.decoder
    assert decoder is not None
    pools = pools_for(decoder, num_blocks)
    states = StateSize(max_num_seqs, max_num_seqs) if decoder.recurrences else None
    blocks = BlockManager(pools, block_size, short_context=model.config.short_context, states=states)
    num_states = states.num_slots if states is not None else 0
    cache = KVCache(decoder, [pool.num_pages for pool in pools], block_size, torch.float32, CPU, num_states)
    store, both_ways = None, False
    if model.config.pictures is not None:
        processing = checkpoint.pictures
        assert processing is not None
        store, both_ways = PictureStore(model, processing, picture_rows), model.config.pictures.both_ways
    runner = RecordingRunner(model, cache, blocks, store)
    rows = picture_rows if store is not None else 0
    scheduler = Scheduler(blocks, max_num_seqs, budget, picture_rows=rows, both_ways=both_ways)
    length, ends = 200 if store is not None else 100, model.config.eos_token_ids
    engine = GenerateEngine(kind, runner, scheduler, max_model_len=length, eos_token_ids=ends)
    return Running(engine, runner)


def request(kind: str, request_id: str, length: int, variant: int = 0, **params: Any) -> Request:
    """Return a request of `length` prompt (or source) tokens that ignores end-of-sequence ids."""
    sampling = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **params})
    ids, source = prompt(length, variant), None
    if kind not in DECODERS:
        ids, source = (START, *prompt(variant % 4, variant)), source_of(AUDIO.get(kind), length, variant)
    return Request(request_id, kind, ids, sampling, source)


def mixed(kind: str, count: int, **params: Any) -> list[Request]:
    """Return requests of lengths from 1 to 40 tokens."""
    return [request(kind, f"r{i}", 1 + (i * 17) % 40, i, max_tokens=5 + i % 9, **params) for i in range(count)]


def add_all(run: Running, requests: Iterable[Request]) -> None:
    for one in requests:
        run.engine.add(one)
