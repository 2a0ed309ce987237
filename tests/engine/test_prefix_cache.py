"""The prefix cache: a hit saves time and changes nothing else, and only happens within one cache salt."""

from __future__ import annotations

import random

import pytest

from tests.engine.scripted import Harness, breaks_on, expected_tokens, request
from tests.engine.support import running
from tests.model.checkpoints import START, prompt, saved
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.request import Request, token_source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.config.cache import PoolSize
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.llm import LLM

PROMPT = list(range(100, 121))  # 21 tokens: five full blocks of four, and one token over


def cached_tokens(harness: Harness, request_id: str) -> int:
    return max(output.cached_tokens for output in harness.outputs if output.request_id == request_id)


def test_a_prompt_that_was_computed_is_found_again() -> None:
    harness = Harness()
    first, second = (harness.add(name, PROMPT, max_tokens=6) for name in "ab")
    harness.run()
    harness.add("c", PROMPT, max_tokens=6)
    harness.run()
    assert cached_tokens(harness, "a") == 0
    assert cached_tokens(harness, "c") == 20
    assert harness.tokens("a") == harness.tokens("c") == expected_tokens(first)
    assert harness.tokens("b") == expected_tokens(second)


def test_generated_tokens_are_hits_of_the_next_turn() -> None:
    harness = Harness()
    harness.add("a", PROMPT, max_tokens=8)
    harness.run()
    harness.add("b", [*PROMPT, *harness.tokens("a"), 7], max_tokens=2)
    harness.run()
    assert cached_tokens(harness, "b") == 28  # of 30: the last token has no keys yet, and 7 is new


def test_at_least_one_token_is_computed() -> None:
    harness = Harness()
    for name in "ab":
        harness.add(name, PROMPT[:20], max_tokens=1)
        harness.run()
    assert cached_tokens(harness, "b") == 16


@pytest.mark.parametrize("other", [{"cache_salt": "tenant"}, {"prompt": [1, *PROMPT[1:]]}])
def test_another_salt_or_beginning_finds_nothing(other: dict[str, object]) -> None:
    harness = Harness()
    harness.add("a", PROMPT, max_tokens=2)
    harness.run()
    harness.add("b", **{"prompt": PROMPT, "max_tokens": 2, **other})  # type: ignore[arg-type]
    harness.run()
    assert cached_tokens(harness, "b") == 0


def test_switched_off_nothing_is_kept() -> None:
    harness = Harness(prefix_caching=False)
    for name in "ab":
        harness.add(name, PROMPT, max_tokens=2)
        harness.run()
    assert cached_tokens(harness, "b") == 0
    assert harness.engine.block_manager.num_cached == 0


def test_least_recently_used_blocks_are_evicted_first_and_suffixes_before_prefixes() -> None:
    harness = Harness(num_blocks=12)
    for name, start in (("a", 100), ("b", 200), ("c", 300)):  # each leaves four cached blocks
        harness.add(name, range(start, start + 17), max_tokens=1)
        harness.run()
    for name, start, found in (("c2", 300, 16), ("b2", 200, 16), ("a2", 100, 12)):
        harness.add(name, range(start, start + 17), max_tokens=1)
        harness.run()
        assert cached_tokens(harness, name) == found


def test_sequences_of_one_request_share_the_prompts_blocks() -> None:
    harness = Harness(num_blocks=12)
    made = harness.add("r", PROMPT, n=3, max_tokens=4)  # alone each would need seven blocks
    harness.step()
    harness.step()
    tables = [sequence.tables[0] for sequence in harness.engine.scheduler.running]
    assert len(tables) == 3
    assert len({tuple(table[:5]) for table in tables}) == 1
    harness.run()
    assert all(harness.tokens("r", index) == expected_tokens(made) for index in range(3))
    assert harness.engine.scheduler.num_preemptions == 0


def test_sequence_that_waits_for_a_shared_prefix_blocks_no_other() -> None:
    harness = Harness(budget=8)
    harness.add("long", PROMPT, n=2, max_tokens=1)
    harness.add("short", 2, max_tokens=1)
    harness.run()
    order = [(s.sequence.request.request_id, s.sequence.index) for step in harness.runner.steps for s in step.scheduled]
    assert order.index(("short", 0)) < order.index(("long", 1))


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    harness = Harness(num_blocks=10)
    made = [harness.add(name, [at] * 9, max_tokens=20) for at, name in enumerate("ab")]
    harness.run()
    assert harness.engine.scheduler.num_preemptions > 0
    starts = [step.start for steps in harness.runner.steps for step in steps.scheduled]
    assert starts.count(0) == 2  # each started once, then continued from its cached blocks
    assert [harness.tokens(one.request_id) for one in made] == [expected_tokens(one) for one in made]


def test_own_blocks_after_preemption_do_not_count_as_hits() -> None:
    harness = Harness(num_blocks=10)
    for name, start in (("a", 100), ("b", 200)):
        harness.add(name, range(start, start + 9), max_tokens=20)
    harness.add("scored", range(100, 109), max_tokens=1, prompt_logprobs=0)  # scored prompts look for no hits
    harness.run()
    assert harness.engine.scheduler.num_preemptions > 0
    manager = harness.engine.block_manager
    assert (manager.num_queried_tokens, manager.num_hit_tokens) == (18, 0)
    assert all(output.cached_tokens == 0 for output in harness.outputs)


def test_clearing_makes_every_block_free() -> None:
    harness = Harness()
    harness.add("a", PROMPT, max_tokens=2)
    harness.run()
    manager = harness.engine.block_manager
    assert manager.num_cached > 0
    manager.clear_cache()
    harness.engine.check_invariants()
    assert (manager.num_cached, manager.num_free) == (0, manager.num_blocks)


def test_a_thousand_random_steps_over_a_few_prefixes() -> None:
    rng = random.Random(5)
    harness = Harness(num_blocks=24, budget=16, max_num_seqs=6)
    made = []
    for number in range(1000):
        if rng.random() < 0.35:
            prefix = [rng.randrange(3)] * rng.randrange(1, 24)
            tail = [rng.randrange(5) for _ in range(rng.randrange(1, 4))]
            settings = {"max_tokens": rng.randrange(1, 12), "n": rng.choice((1, 1, 2)), "cache_salt": rng.choice("xy")}
            made.append(harness.add(str(number), [*prefix, *tail], **settings))
        if made and rng.random() < 0.05:
            harness.abort(rng.choice(made).request_id)
        harness.step()
    harness.run()
    assert harness.engine.block_manager.num_hit_tokens > 1000
    aborted = {key[0] for key, reason in harness.ends().items() if reason == "cancelled"}
    for one in made:
        if one.request_id not in aborted:
            assert all(harness.tokens(one.request_id, i) == expected_tokens(one) for i in range(one.params.n))


@pytest.mark.parametrize("kind", ["llama", "t5-relu", "marian"])
def test_outputs_are_the_same_with_and_without_hits(kind: str) -> None:
    engine = running(kind)
    for name in ("cold", "warm"):
        engine.engine.add(request(name, prompt(37, 1), max_tokens=8) if kind == "llama" else _translation(name))
        engine.run()
    assert engine.ids("cold") == engine.ids("warm")
    if kind == "llama":
        hits = [output.cached_tokens for output in engine.outputs if output.request_id == "warm"]
        assert max(hits) == 36


def _translation(name: str) -> Request:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    return Request(name, "m", (START, *prompt(9, 2)), params, token_source(prompt(12, 3)))


def test_scores_of_a_prompt_are_computed_although_its_blocks_are_known() -> None:
    engine = running("llama")
    for name in ("cold", "warm"):
        engine.engine.add(request(name, prompt(20, 1), max_tokens=2, prompt_logprobs=0))
        engine.run()
    scores = [o.prompt_logprobs for o in engine.outputs if o.prompt_logprobs is not None]
    assert [len(one) for one in scores] == [20, 20]
    assert scores[0][1:] == scores[1][1:]


def test_hashes_do_not_collide_when_a_boundary_moves() -> None:
    manager = BlockManager([PoolSize(4)], 4)
    digests = set()
    for salt, source, tokens in (("a", 0, [1] * 8), ("a", 1, [1] * 8), ("", 0, [1] * 8), ("b", 0, [1] * 8)):
        one = SequenceState.of(request("r", tokens, source=source, cache_salt=salt), 0, 0, ())
        digests.add(manager.hasher.block(one, 0))
    assert len(digests) == 4


def computed(harness: Harness) -> int:
    """Return the decoder tokens computed over all steps."""
    return sum(s.num_tokens for step in harness.runner.steps for s in step.scheduled)


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    harness = Harness(num_blocks=64, block_size=16, budget=2048, max_model_len=300)
    made = [harness.add(f"r{i}", 200, max_tokens=3) for i in range(8)]
    harness.step()
    assert computed(harness) == 200 + 7 * 8  # each computes the last, partial block itself
    harness.run()
    assert all(harness.tokens(one.request_id) == expected_tokens(one) for one in made)
    assert [cached_tokens(harness, one.request_id) for one in made] == [0, *[192] * 7]


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("gone", [None, "aborted", "preempted"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_equal_prompts_in_chunks_follow_the_first_and_continue_without_it(
    gone: str | None, at: int, overlap: bool
) -> None:
    harness = Harness(num_blocks=200, budget=32, max_model_len=300, overlap=overlap)
    made = [harness.add(f"r{i}", 200, max_tokens=6) for i in range(6)]
    for _ in range(at):
        harness.step()
    if gone == "aborted":
        harness.abort("r0")
    elif gone == "preempted":
        harness.engine.scheduler.preempt(harness.engine.scheduler.running[0])
    harness.run()
    for one in made[gone == "aborted" :]:
        assert harness.tokens(one.request_id) == expected_tokens(one)
    assert computed(harness) <= 200 + 6 * (6 + 4) + 32


def test_followed_prompt_gets_the_whole_budget_until_another_waits() -> None:
    harness = Harness(budget=32, num_blocks=200, max_model_len=300)
    for name in ("first", "second", "third"):
        harness.add(name, 200, max_tokens=1)
    harness.step()
    harness.step()
    assert [s.num_tokens for s in harness.runner.steps[1].scheduled] == [32]
    harness.add("short", [1, 2], max_tokens=1)
    harness.step()
    assert [s.num_tokens for s in harness.runner.steps[2].scheduled] == [16, 2]
    harness.run()


def test_sequence_that_shares_failed_blocks_recomputes_them() -> None:
    harness = Harness()
    harness.add("failing", PROMPT, max_tokens=4)
    made = [harness.add(f"r{i}", PROMPT, max_tokens=4) for i in range(3)]
    breaks_on(harness, "failing")
    harness.run()
    assert harness.ends()["failing", 0] == "error"
    assert all(harness.tokens(one.request_id) == expected_tokens(one) for one in made)


def test_switched_off_sequences_of_one_request_share_and_nothing_stays() -> None:
    harness = Harness(prefix_caching=False, num_blocks=30)
    made = [harness.add(name, PROMPT, n=3, max_tokens=4) for name in "ab"]
    harness.step()
    harness.run()
    assert computed(harness) == 2 * (21 + 1 + 1 + 3 * 3)
    assert all(harness.tokens(one.request_id, index) == expected_tokens(one) for one in made for index in range(3))
    assert harness.engine.block_manager.num_cached == 0
    assert all(output.cached_tokens == 0 for output in harness.outputs)
    assert harness.engine.block_manager.num_queried_tokens == 0


@pytest.mark.parametrize("kind", ["llama-gqa", "gpt2", "bart"])
@pytest.mark.parametrize("budget", [2048, 16])
def test_prompts_computed_together_get_what_one_gets_alone_to_the_last_bit(kind: str, budget: int) -> None:
    """Check the serving backends; the others read keys in the step that writes them."""
    limits = {"max_num_batched_tokens": 64 if kind == "bart" else budget, "max_num_seqs": 8, "block_size": 4}
    llm = LLM(saved(kind).path, EngineConfig(device="cpu", dtype="float32", kv_cache_memory=4 << 20, **limits))
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)
    found: dict[int, list[object]] = {}
    cached: dict[int, int] = {}
    for count in (1, 5):
        for place, output in llm.stream([prompt(37, 1)] * count, params):
            found.setdefault(place + 10 * count, []).extend(output.logprobs or ())
            cached[place + 10 * count] = max(cached.get(place + 10 * count, 0), output.cached_tokens)
        assert llm._generate is not None
        llm._generate.block_manager.clear_cache()
    assert all(scores == found[10] for scores in found.values())
    assert [cached[place] for place in range(50, 55)] == ([0, 36, 36, 36, 36] if kind != "bart" else [0] * 5)
