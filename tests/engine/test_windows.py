"""Layers with windows keep only the blocks of their window, and change nothing else."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.scripted import Harness, expected_tokens
from tests.engine.test_beam_search import BeamRunner, hypotheses
from tests.matrix import rest_is_slow
from tests.model.checkpoints import copied, prompt
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.api.stats import CachePool, ModelInfo
from triptych.model.config.cache import PoolSize, PoolSpec, StateSize
from triptych.model.engine.planning.cache_budget import KVLayout
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.block_pool import NULL_BLOCK
from triptych.model.llm import LLM

WINDOW, BLOCK, STEP, CONTEXT = 512, 16, 256, 4096


def held(blocks: BlockManager, pool: int) -> int:
    """Return the blocks in use."""
    return blocks.pools[pool].num_blocks - blocks.pools[pool].num_free


@pytest.mark.parametrize(
    ("overlap", "prefix_caching"),
    [(False, True), pytest.param(True, False, marks=pytest.mark.slow)],
    ids=["", "overlap-uncached"],
)
def test_a_long_context_holds_a_window_and_a_step_of_blocks(overlap: bool, prefix_caching: bool) -> None:
    pools = [PoolSize(300), PoolSize(60, WINDOW)]
    harness = Harness(pools=pools, block_size=BLOCK, budget=STEP, max_model_len=CONTEXT + 100, overlap=overlap,
                      prefix_caching=prefix_caching)  # fmt: skip
    made = harness.add("r", CONTEXT, max_tokens=6)
    blocks, most = harness.engine.block_manager, []
    while harness.engine.has_work:
        harness.step()
        most.append(held(blocks, 1))
        assert held(blocks, 0) <= CONTEXT // BLOCK + 1
    assert max(most) <= (WINDOW + STEP) // BLOCK + 1
    assert most[-3] <= WINDOW // BLOCK + 1  # while it decodes
    assert harness.tokens("r") == expected_tokens(made)


def kept_together(pools: tuple[PoolSize, ...] | list[PoolSize]) -> int:
    """Return how many sequences of 250 tokens decode at the same time."""
    harness = Harness(pools=pools, block_size=BLOCK, budget=256, max_num_seqs=64, max_model_len=1100)
    for number in range(24):
        harness.add(f"r{number}", [number] * 250, max_tokens=30)
    most = 0
    for _ in range(28):
        harness.engine.step()
        most = max(most, sum(one.num_output_tokens > 0 for one in harness.engine.scheduler.running))
    return most


def test_more_sequences_fit_where_five_of_six_layers_have_a_window() -> None:
    full, windowed = PoolSpec(None, (5,), 100), PoolSpec(32, (0, 1, 2, 3, 4), 500)
    layout = KVLayout(BLOCK, (full, windowed), has_source=False, step_tokens=256)
    memory = 6 * 280 * 600  # what six sequences take if they keep all blocks
    assert kept_together([PoolSize(memory // (600 * BLOCK))]) <= 6
    assert kept_together(layout.divide(memory, 1100, 64)) >= 2 * 6


STATES = StateSize(6, 6)


POOLS: dict[str, list[PoolSize | StateSize]] = {
    "three": [PoolSize(30), PoolSize(14, 9), PoolSize(11, 3)],
    "one-token": [PoolSize(40), PoolSize(40, 1)],
    "no-full": [PoolSize(16, 12)],
    "states": [PoolSize(30), STATES],
}
RANDOM = rest_is_slow(
    product(POOLS, (False, True), (True, False)),
    lambda pools, overlap, prefix_caching: (pools in ("three", "states")) == (overlap == prefix_caching),
)


@pytest.mark.parametrize(("named", "overlap", "prefix_caching"), RANDOM)
def test_random_steps_over_a_few_prefixes(named: str, overlap: bool, prefix_caching: bool) -> None:
    """Run chunks, prefix hits, preemption, forks, searches and aborts; the runner checks what every token reads."""
    rng, pools = random.Random(7), POOLS[named]
    states = STATES if STATES in pools else None
    blocks = [pool for pool in pools if isinstance(pool, PoolSize)]
    harness = Harness(
        pools=blocks, states=states, budget=13, max_num_seqs=6, overlap=overlap, prefix_caching=prefix_caching
    )
    harness.engine.runner = harness.runner = BeamRunner(harness.engine.block_manager)
    made = []
    for number in range(500):
        if rng.random() < 0.3:
            ids = [*[rng.randrange(3)] * rng.randrange(1, 40), *(rng.randrange(5) for _ in range(rng.randrange(1, 4)))]
            settings: dict[str, object] = {"max_tokens": rng.randrange(1, 14), "cache_salt": rng.choice("xy")}
            source = [1, 2, 3, rng.randrange(3)]
            forms: list[dict[str, object]] = [{}, {}, {"n": 2}, {"num_beams": 3, "n": 2}]
            settings |= rng.choice(forms if states else [*forms, {"source": source}])
            made.append(harness.add(str(number), ids, **settings))
        if made and rng.random() < 0.05:
            harness.abort(rng.choice(made).request_id)
        if harness.engine.scheduler.running and rng.random() < 0.03:
            harness.engine.scheduler.preempt(rng.choice(harness.engine.scheduler.running))
        harness.step()
    harness.run()
    assert prefix_caching == (harness.engine.block_manager.num_hit_tokens > 100)
    aborted = {key[0] for key, reason in harness.ends().items() if reason == "cancelled"}
    for one in made:
        if one.request_id not in aborted and one.params.num_beams == 1:
            assert all(harness.tokens(one.request_id, i) == expected_tokens(one) for i in range(one.params.n))


def test_a_search_through_windows_is_the_same_search() -> None:
    found = []
    for pools in ([PoolSize(200), PoolSize(60, 8)], [PoolSize(200)]):
        harness = Harness(pools=pools, max_num_seqs=9)
        harness.engine.runner = harness.runner = BeamRunner(harness.engine.block_manager)
        harness.add("s", 30, num_beams=4, n=2, max_tokens=25)
        found.append(hypotheses(harness.run(), "s"))
    assert found[0] == found[1]


def test_a_prefix_is_found_where_the_window_before_its_end_is_still_there() -> None:
    """Check that after eviction from the windowed pool no prefix is found."""
    harness = Harness(pools=[PoolSize(60), PoolSize(9, 8)], budget=64)
    shared = list(range(100, 140))
    harness.add("first", [*shared, 1], max_tokens=1)
    harness.run()
    harness.add("same", [*shared, 2], max_tokens=1)
    harness.run()
    assert [o.cached_tokens for o in harness.outputs if o.request_id == "same"] == [40]
    harness.add("other", range(500, 540), max_tokens=1)  # takes all blocks of the windowed pool, and few of the other
    harness.run()
    made = harness.add("late", [*shared, 3], max_tokens=1)
    harness.run()
    assert [o.cached_tokens for o in harness.outputs if o.request_id == "late"] == [0]
    assert harness.tokens("late") == expected_tokens(made)


def test_control_the_check_finds_a_block_that_was_freed_too_early() -> None:
    harness = Harness(pools=[PoolSize(60), PoolSize(20, 8)])
    harness.add("r", 30, max_tokens=9)
    harness.step()
    harness.step()
    (sequence,) = harness.engine.scheduler.running
    blocks, table = harness.engine.block_manager, sequence.tables[1]
    blocks.pools[1].release(table[-2], keep=False)
    table[-2] = NULL_BLOCK
    with pytest.raises(AssertionError, match="a block that the next token reads was freed"):
        harness.engine.check_invariants()


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(1, 700)), st.integers(1, 50)), min_size=1, max_size=3,
             unique_by=lambda pool: pool[0]),
    st.integers(1, 4000), st.integers(1, 64), st.booleans(), st.floats(1, 300),
)  # fmt: skip
def test_memory_is_divided_within_its_bounds(
    pools: list[tuple[int | None, int]], context: int, sequences: int, has_source: bool, times: float
) -> None:
    """Check that pools fit into memory, and hold at least one full context and at most what all sequences need."""
    specs = tuple(PoolSpec(window, (at,), size) for at, (window, size) in enumerate(pools))
    layout = KVLayout(BLOCK, specs, has_source, step_tokens=256)
    memory = int(layout.bytes_for(context) * times)
    sizes = layout.divide(memory, context, sequences)
    taken = sum(size.num_pages * BLOCK * spec.token_bytes for size, spec in zip(sizes, specs, strict=True))
    assert taken <= memory
    for size, spec in zip(sizes, specs, strict=True):
        assert layout.blocks_for(spec, context) <= size.num_blocks <= layout.blocks_for(spec, context, sequences)
    assert layout.context_in(memory) >= context
    if pools[0][0] is None and len(pools) == 1:
        each = (2 if has_source else 1) * -(-context // BLOCK)
        assert sizes[0].num_blocks == min(memory // (specs[0].token_bytes * BLOCK), each * sequences)


def test_a_real_model_keeps_a_window_of_a_long_context(tmp_path: Path) -> None:
    """Check Gemma 3, whose windowed layers (three of five) read 512 tokens back."""
    folder = copied("gemma3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"sliding_window": WINDOW, "max_position_embeddings": 2 * CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": STEP, "max_model_len": CONTEXT + 20}
    settings = EngineConfig(device="cpu", dtype="float32", block_size=BLOCK, kv_cache_memory=16 << 20, **limits)
    llm = LLM(folder, settings)
    full, windowed = llm.info.cache_pools
    assert (full.window, windowed.window, full.layers + windowed.layers) == (None, WINDOW, 5)
    assert windowed.num_blocks * 2 < full.num_blocks
    assert llm._generate is not None
    blocks, most, tokens = llm._generate.block_manager, 0, 0
    for _, output in llm.stream([prompt(CONTEXT)], SamplingParams(max_tokens=8, ignore_eos=True)):
        tokens += len(output.token_ids)
        assert held(blocks, 1) <= WINDOW // BLOCK + 1 or tokens == 1  # the first comes with the last prompt step
    llm._generate.add(llm._request(0, prompt(CONTEXT, 1), SamplingParams(max_tokens=2), None, ()))
    while llm._generate.has_work:
        llm._generate.step()
        llm._generate.check_invariants()
        most = max(most, held(blocks, 1))
    assert tokens == 8
    assert WINDOW // BLOCK < most <= (WINDOW + STEP) // BLOCK + 1


def test_what_fits_is_asked_of_every_pool() -> None:
    info = ModelInfo(*[""] * 3, *[0] * 2, *[""] * 5, 1000, "", *[0] * 5, BLOCK, 100, 6, 0, 0.0)
    assert info.shortage(2, 800) is None
    assert info.shortage(2, 801) == (102, 100)
    info.cache_pools = (CachePool(None, 1, 100, 1), CachePool(WINDOW, 5, 70, 5, 33))
    assert info.sequence_capacity == 1600
    assert info.shortage(2, 800) is None
    assert info.shortage(3, 500) == (96, 70)
    assert info.shortage(2, 700, source=100) == (73, 70)
    info.cache_pools = info.cache_pools[1:]
    assert info.sequence_capacity is None
    assert info.shortage(2, 10**6) is None
