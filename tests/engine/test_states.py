"""Sequences of models with recurrent layers, without torch: state slots and shared snapshots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.scripted import Harness, request
from triptych.model.api.engine_config import EngineConfig
from triptych.model.config.cache import PoolSize, PoolSpec, StateSize
from triptych.model.engine.planning.cache_budget import Context, KVLayout, fit_context
from triptych.model.engine.scheduling.block_pool import BlockHasher
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.engine.scheduling.state_slots import StateSlots

PREFIX = list(range(100, 122))  # 22 tokens: 5 blocks of 4, and 2 more


def hits(harness: Harness, request_id: str) -> int:
    return max(output.cached_tokens for output in harness.outputs if output.request_id == request_id)


def run(harness: Harness, request_id: str, prompt: list[int], **settings: object) -> int:
    """Run the request alone; return how many of its prompt tokens were cached."""
    harness.add(request_id, prompt, max_tokens=3, **settings)
    harness.run()
    return hits(harness, request_id)


def test_a_prompt_is_found_up_to_its_last_full_block() -> None:
    harness = Harness(states=StateSize(4, 4), budget=64)
    assert run(harness, "first", PREFIX) == 0
    assert run(harness, "again", PREFIX) == 20
    assert run(harness, "longer", [*PREFIX, 7, 8, 9]) == 20
    assert run(Harness(states=StateSize(4, 4), prefix_caching=False), "alone", PREFIX) == 0


def test_outputs_of_one_request_go_on_from_its_prompts_state_without_prefix_caching() -> None:
    """Check that other requests do not find that state."""
    harness = Harness(states=StateSize(4, 0), prefix_caching=False, budget=64)
    for name in ("first", "second"):
        harness.add(name, PREFIX, max_tokens=3, n=3)
        harness.run()
    computed = [s.num_tokens for step in harness.runner.steps for s in step.scheduled if s.num_tokens > 1]
    assert sorted(computed) == [2, 2, 2, 2, 22, 22]


def test_where_two_prompts_part_the_third_goes_on() -> None:
    """Check that the second prompt stores a state where it leaves the first, whose keys are cached up to there."""
    harness = Harness(states=StateSize(4, 4), budget=64)
    ways = [[*PREFIX, *range(number, number + 9)] for number in (300, 400, 500)]
    assert [run(harness, str(number), way) for number, way in enumerate(ways)] == [0, 0, 20]


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    harness = Harness(states=StateSize(4, 4), budget=64)
    for number in range(3):
        harness.add(str(number), PREFIX, max_tokens=2)
    harness.run()
    assert [hits(harness, str(number)) for number in range(3)] == [0, 20, 20]


def test_snapshots_never_take_the_place_of_sequences() -> None:
    harness = Harness(states=StateSize(2, 0), max_num_seqs=2, budget=64)
    for number in range(6):
        harness.add(str(number), list(range(50 * number, 50 * number + 30)), max_tokens=9)
    harness.run()
    assert harness.engine.scheduler.num_preemptions == 0


def test_a_preempted_sequence_goes_on_from_its_prompts_snapshot() -> None:
    harness = Harness(states=StateSize(4, 4), budget=64)
    harness.add("r", PREFIX, max_tokens=12)
    for _ in range(4):
        harness.step()
    harness.engine.scheduler.preempt(harness.engine.scheduler.running[0])
    harness.run()
    [again] = [s for step in harness.runner.steps[4:] for s in step.scheduled if s.num_tokens > 1]
    assert again.start == 20 or again.start == 24  # after the last full block of the prompt or of the output


def test_invariants_notice_a_sequence_without_its_state() -> None:
    """Check it next to a sequence that has its state."""
    slots = StateSlots(StateSize(2, 0), 4, BlockHasher(4, across_requests=True), keeps=True)
    there, lost = (SequenceState.of(request(name, 5), 0, 0, ()) for name in "ab")
    slots.allocate(there, 5)
    there.num_computed_tokens = lost.num_computed_tokens = 5
    slots.check_invariants([there])
    with pytest.raises(AssertionError, match="computed tokens without a state"):
        slots.check_invariants([there, lost])


@pytest.mark.parametrize("context", [4096, 65_536])
def test_blocks_and_states_take_no_more_than_there_is(context: int) -> None:
    """Check also memory in which the states of all sequences would leave no room for one full context."""
    layout = KVLayout(16, (PoolSpec(None, (3,), 1000),), False, 256, state_bytes=5_000_000, snapshots=2)
    for memory in range(layout.bytes_for(context), layout.bytes_for(context, 20), 3_000_000):
        count = layout.sequences_in(memory, context, 64)
        [pool] = layout.divide(memory, context, count)
        assert pool.num_blocks >= context // 16
        assert pool.num_pages * 16_000 + layout.states_for(count).num_slots * 5_000_000 <= memory


def test_a_context_that_memory_decides_leaves_room_for_states_of_a_few() -> None:
    """Check Qwen3.5's sizes; a context that was set may take all memory."""
    pools = (PoolSpec(None, tuple(range(8)), 8 * 2 * 4 * 256 * 2),)
    layout = KVLayout(16, pools, False, 2048, state_bytes=52_690_944, snapshots=2, max_num_seqs=64)
    most, found = Context(262_144, ""), {}
    for gib in (1, 2, 4):
        context = fit_context(EngineConfig(), most, layout, gib << 30).tokens
        found[gib] = context, layout.sequences_in(gib << 30, context, 64)
    assert found == {1: (19_904, 2), 2: (39_808, 4), 4: (105_344, 4)}
    asked = EngineConfig(max_model_len=26_000)
    assert fit_context(asked, Context(26_000, ""), layout, 1 << 30).tokens == 26_000
    alone = replace(layout, max_num_seqs=1)
    assert fit_context(EngineConfig(), most, alone, 1 << 30).tokens == layout.context_in(1 << 30) == 26_336


def test_memory_is_divided_between_blocks_and_states() -> None:
    layout = KVLayout(16, (PoolSpec(None, (3,), 1000),), False, 256, state_bytes=1_000_000, snapshots=2)
    assert layout.states_for(3) == StateSize(3, 6)
    memory = layout.bytes_for(4096) + 20_000_000
    count = layout.sequences_in(memory, 4096, 64)
    [pool] = layout.divide(memory, 4096, count)
    assert 4 <= count <= 6
    assert pool.num_blocks >= 256  # for one full context
    assert pool.num_pages * 16_000 + layout.states_for(count).num_slots * 1_000_000 <= memory
    assert layout.context_in(4_000_000) == 0  # one sequence's states take all of it
    assert KVLayout(16, (PoolSpec(None, (0,), 1000),), False, 256).sequences_in(0, 4096, 64) == 64
    assert PoolSize(4).num_pages == 4
