"""Recorded steps with prompts give the tokens of launched ones, and read nothing but their static row."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.bench.gpu.shapes import GPU_MODELS
from lab.bench.models import config_of
from tests.engine.support import request
from tests.engine.test_overlap import LengthsBackend, assorted, outputs_of, recorded, tokens_of
from tests.matrix import rest_is_slow
from tests.model.checkpoints import CPU, loaded
from triptych.model.api.engine_config import BatchLimits, EngineConfig
from triptych.model.api.request import Request
from triptych.model.cache.kv_cache import KVCache
from triptych.model.config.cache import PoolSize
from triptych.model.engine import generate_builder
from triptych.model.engine.execution import mixed_graphs
from triptych.model.engine.execution.batch import NO_SLOT, BatchLayout, pack
from triptych.model.engine.execution.mixed_graphs import (
    PROMPTS,
    MixedGraphs,
    MixedSize,
    can_record_prompts,
    mixed_sizes,
    num_mixed,
)
from triptych.model.engine.execution.step_program import StepPlan, StepProgram
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.scheduled_step import ScheduledSequence
from triptych.model.engine.scheduling.scheduler import Scheduler
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.system.background_work import finish


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_graphs, "_DECODES", (0, 2, 8))
    monkeypatch.setattr(mixed_graphs, "_TOKENS", (8, 24, 64))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[Any]]:
    """Count the steps by how they run: the mixed size, "replayed" decodes, or "launched"."""
    seen: Counter[Any] = Counter()
    run = StepProgram.run

    def noted(self: StepProgram, plan: StepPlan, tokens: Tensor | None) -> Any:
        seen[plan.mixed.size if plan.mixed is not None else "replayed" if plan.replayed else "launched"] += 1
        return run(self, plan, tokens)

    monkeypatch.setattr(StepProgram, "run", noted)
    return seen


def logprobs_of(found: dict[Any, Any]) -> list[float]:
    return [one.logprob for key in sorted(found) for output in found[key] for one in output.logprobs or ()]


def drawn(kind: str, seed: int) -> list[Request]:
    """Return random requests. Some score their prompts, search, or draw several outputs."""
    rng, made = random.Random(seed), []
    for number in range(14):
        settings = rng.choice(
            (
                {},
                {"temperature": 1.0, "seed": number},
                {"logprobs": 1, "prompt_logprobs": 2},
                {"n": 3, "temperature": 0.8, "seed": number},
                {"num_beams": 2},
                {"repetition_penalty": 1.2},
            )
        )
        made.append(request(kind, f"r{number}", rng.randint(1, 45), number, max_tokens=rng.randint(1, 12), **settings))
    return made


@pytest.mark.parametrize(
    ("kind", "overlap"),
    rest_is_slow(
        [(kind, overlap) for kind in ("gpt2", "llama-gqa", "phi3-longrope", "gemma3") for overlap in (True, False)],
        lambda kind, overlap: overlap,
    ),
)
def test_recorded_prompts_give_the_tokens_of_launched_ones(kind: str, overlap: bool, replays: Counter[Any]) -> None:
    for requests in (assorted(kind, blind=False), drawn(kind, len(kind))):
        plain, _ = outputs_of(kind, requests)
        replays.clear()
        found, _ = outputs_of(kind, requests, overlap=overlap, graphs=True, prompts=True)
        assert tokens_of(found) == tokens_of(plain)
        assert logprobs_of(found) == pytest.approx(logprobs_of(plain), abs=1e-4)
        sizes = [size for size in replays if isinstance(size, MixedSize)]
        assert len({size.decodes for size in sizes}) > 1 and len({size.tokens for size in sizes}) > 1, replays


def test_a_step_with_many_prompts_or_a_long_one_is_launched() -> None:
    model = loaded("gpt2", LengthsBackend())
    cache = KVCache(model.config.decoder, [300], 4, torch.float32, CPU)  # type: ignore[arg-type]
    graphs = MixedGraphs(model, cache, max_num_seqs=12, max_model_len=64, record=recorded)

    def fitted(*lengths: int) -> MixedSize | None:
        steps = [ScheduledSequence(state(number, 64), 0, length, False) for number, length in enumerate(lengths)]
        found = graphs.fitted(steps)
        return found.size if found is not None else None

    assert fitted(1, 1, 3, 4) == MixedSize(2, 8)
    assert fitted(5, 4) == MixedSize(0, 24)
    assert fitted(1, 1, 1, 64) == MixedSize(8, 64)
    assert fitted(65) is None
    assert fitted(*[2] * (PROMPTS + 1)) is None
    assert fitted(*[1] * 9, 2) is None
    long, short, new = (
        ScheduledSequence(state(n, 64), at, count, False) for n, at, count in ((0, 9000, 1), (1, 3, 1), (2, 0, 5))
    )
    assert graphs.fitted([long, short, new]) is not None
    assert graphs.fitted([long, short, new], uneven=True) is None
    assert graphs.fitted([long._replace(start=3000), short, new], uneven=True) is not None


def test_drafts_are_replayed_like_prompts(replays: Counter[Any]) -> None:
    requests = [request("gpt2", f"r{n}", 12, n, max_tokens=25, allowed_token_ids=(5, 6)) for n in range(3)]
    plain, _ = outputs_of("gpt2", requests)
    replays.clear()
    found, _ = outputs_of("gpt2", requests, graphs=True, prompts=True, drafts=3)
    assert tokens_of(found) == tokens_of(plain)
    assert sum(count for size, count in replays.items() if isinstance(size, MixedSize)) > 5, replays


def test_preemption_between_recorded_steps(replays: Counter[Any]) -> None:
    requests = [request("gpt2", f"r{i}", 12, i, max_tokens=30, temperature=1.0, seed=i) for i in range(6)]
    plain, _ = outputs_of("gpt2", requests)
    replays.clear()
    found, _ = outputs_of("gpt2", requests, overlap=True, graphs=True, prompts=True, num_blocks=34)
    assert tokens_of(found) == tokens_of(plain)
    assert replays["launched"] == 0


def state(number: int, length: int) -> SequenceState:
    return SequenceState.of(request("gpt2", f"r{number}", length, number, max_tokens=4), 0, number, (), 1)


def test_a_row_pads_decodes_and_prompts_apart() -> None:
    blocks = BlockManager([PoolSize(40)], 4)
    scheduler = Scheduler(blocks, 8, 64)
    for number, length in enumerate((6, 5, 3)):
        scheduler.add(state(number, length))
        for step in scheduler.schedule().scheduled if number == 0 else ():
            step.sequence.num_computed_tokens = step.stop
            step.sequence.token_ids.append(9)
    steps = sorted(scheduler.schedule().scheduled, key=lambda step: step.num_tokens > 1)
    assert [step.num_tokens for step in steps] == [1, 5, 3]
    layout = BatchLayout(tokens=3 + 12, segments=3 + PROMPTS + 1, blocks=2, prompt_tokens=12)
    step = layout.split(pack(layout, steps, 4, {id(steps[0].sequence): 7}))
    assert step.cu_seqlens.tolist() == [0, 1, 2, 3, 8, *[11] * (PROMPTS - 1), 15]
    assert step.kv_lens.tolist() == [7, 0, 0, 5, 3, *[0] * (PROMPTS - 1)]
    assert step.positions.tolist() == [6, 0, 0, 0, 1, 2, 3, 4, 0, 1, 2, 0, 0, 0, 0]
    assert step.placeholders.tolist() == [7] + [NO_SLOT] * 14
    prompts = [one.sequence for one in steps[1:]]
    assert step.ids[3:11].tolist() == [*prompts[0].token_ids, *prompts[1].token_ids]
    assert (step.slots[0] < 0).tolist() == [False, True, True] + [False] * 8 + [True] * 4
    assert step.tables[0, 3].tolist() == list(prompts[0].tables[0])
    assert step.tables[0, [1, 2, 5, 6, 7]].sum() == 0


def test_small_models_record_all_sizes_and_large_ones_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    counts = {name: num_mixed(config_of(GPU_MODELS[name]), 256) for name in ("qwen3-0.6b", "llama-8b")}
    assert counts["qwen3-0.6b"] == 36
    assert 0 < counts["llama-8b"] < 15
    sizes = mixed_sizes(4096, 20)
    assert {size.decodes for size in sizes} == {0, 8, 20}
    assert mixed_sizes(15, 20) == []


def test_which_models_record_steps_with_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LengthsBackend()
    for kind, fit in (("gpt2", True), ("gemma3", True), ("bart", False), ("qwen3-next", False), ("bert", False)):
        assert can_record_prompts(loaded(kind, backend)) == fit, kind
    model = loaded("gpt2", backend)
    monkeypatch.setattr(generate_builder, "CudaRecorder", lambda *_, **__: recorded)
    cache = KVCache(model.config.decoder, [40], 4, torch.float32, CPU)  # type: ignore[arg-type]
    graphs, mixed, why = finish(generate_builder._recorded(model, cache, 12, 64))
    assert graphs is not None and mixed is not None and not any(why.values())
    assert len(mixed._recorded) == len(mixed.sizes) == 9
    limits = BatchLimits(12, 64, 8, 64)
    monkeypatch.setattr(generate_builder, "can_record", lambda *_: True)
    margin = generate_builder._num_recorded(EngineConfig(), model, limits.max_num_seqs, 64, CPU)
    assert margin == len(graphs._recorded) + len(mixed._recorded)
