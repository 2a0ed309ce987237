"""Warm-up leaves no trace in an engine."""

from __future__ import annotations

import pytest

from tests.model.checkpoints import saved
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.stats import EngineStats
from triptych.model.engine.builder import load
from triptych.model.engine.warmup import warm_up
from triptych.model.system.background_work import finish


@pytest.mark.parametrize("kind", ["llama-gqa", "gpt2", "bart", "t5-relu", "bert", "vit"])
def test_warmup_leaves_no_trace(kind: str) -> None:
    config = EngineConfig(dtype="float32", max_num_seqs=4, max_num_batched_tokens=128, kv_cache_memory=1 << 20)
    loaded = load(ModelSpec(kind, str(saved(kind).path), config))
    steps = []
    for engine in (loaded.encode, loaded.generate):
        if engine is not None:
            real = engine.step
            engine.step = lambda real=real: steps.append(1) or real()  # type: ignore[method-assign,misc]
    finish(warm_up(loaded.encode, loaded.generate, loaded.info.max_model_len))
    assert len(steps) >= (0 if kind == "vit" else 3)
    assert not loaded.encode.has_work
    if loaded.generate is not None:
        assert not loaded.generate.has_work
        loaded.generate.check_invariants()
        blocks = loaded.generate.block_manager.num_blocks
        assert loaded.generate.stats() == EngineStats(kind, free_blocks=blocks, total_blocks=blocks)
