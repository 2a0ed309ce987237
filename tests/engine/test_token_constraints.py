"""Forced and banned tokens in small examples; `test_generation_rules` compares whole outputs."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.scripted import Harness
from tests.engine.test_beam_search import BeamRunner
from triptych.model.api.request import FinishReason, Request
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.api.token_history import History
from triptych.model.config.model import GenerationRules
from triptych.model.engine.scheduling.scheduled_step import SampledToken, ScheduledSequence
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.engine.scheduling.token_constraints import banned_tokens, forced_token


def sequence(
    prompt: tuple[int, ...], output: tuple[int, ...] = (), eos: tuple[int, ...] = (), **params: int
) -> SequenceState:
    made = SequenceState.of(Request("r", "m", prompt, SamplingParams(**params)), 0, 0, eos)  # type: ignore[arg-type]
    made.token_ids += output
    return made


NONE = GenerationRules()


@pytest.mark.parametrize(
    ("tokens", "size", "expected"),
    [
        ((1, 2, 3, 1, 2), 3, {3}),
        ((1, 2, 3, 1, 2, 4, 1, 2), 3, {3, 4}),
        ((1, 2, 3, 1, 2), 2, {3}),
        ((1, 2, 3), 1, {1, 2, 3}),
        ((5, 5, 5), 2, {5}),
        ((5, 5, 5), 3, {5}),
        ((5, 5), 3, set()),
        ((1, 2, 3, 1, 2), 0, set()),
        ((1, 2, 3, 4), 2, set()),
    ],
)
def test_no_ngram_comes_twice(tokens: tuple[int, ...], size: int, expected: set[int]) -> None:
    assert set(banned_tokens(sequence(tokens, no_repeat_ngram_size=size), NONE)) == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=15), st.integers(2, 5))
def test_no_ngram_comes_twice_by_the_definition(tokens: list[int], size: int) -> None:
    def repeats(token: int) -> bool:
        text = [*tokens, token]
        grams = [tuple(text[at : at + size]) for at in range(len(text) - size + 1)]
        return grams[-1] in grams[:-1] if grams else False

    banned = set(banned_tokens(sequence(tuple(tokens), no_repeat_ngram_size=size), NONE))
    assert banned == {token for token in range(3) if repeats(token)}


def test_a_long_text_is_searched_in_linear_time() -> None:
    made = sequence((5,) * 100_000, no_repeat_ngram_size=50_000)
    began = time.thread_time()
    assert set(banned_tokens(made, NONE)) == {5}
    assert time.thread_time() - began < 5  # comparing word by word takes 2.5e9 comparisons


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [((1,), []), ((1, 7), [8]), ((7, 8), [9]), ((3, 7, 8), [9]), ((7, 8, 9), []), ((9, 7), [8]), ((7, 7), [8])],
)
def test_banned_sequences_are_never_completed(tokens: tuple[int, ...], expected: list[int]) -> None:
    rules = GenerationRules(banned_sequences=((7, 8), (7, 8, 9)))
    assert banned_tokens(sequence(tokens), rules) == expected


def test_a_banned_sequence_longer_than_the_text_bans_nothing() -> None:
    assert banned_tokens(sequence((2, 3)), GenerationRules(banned_sequences=((1, 2, 3, 4),))) == []


def test_suppressed_tokens_always_and_at_the_beginning() -> None:
    rules = GenerationRules(suppressed=(4,), suppressed_first=(5, 6))
    assert banned_tokens(sequence((1, 2)), rules) == [4, 5, 6]
    assert banned_tokens(sequence((1, 2), (3,)), rules) == [4]


def test_first_free_token_after_a_forced_one() -> None:
    rules = GenerationRules(forced_first=9, suppressed_first=(5,))
    assert banned_tokens(sequence((0,)), rules) == []
    assert banned_tokens(sequence((0,), (9,)), rules) == [5]
    assert banned_tokens(sequence((0, 8)), rules) == [5]  # the prompt has a prefix, so no token is forced


def test_no_stop_before_min_tokens() -> None:
    assert set(banned_tokens(sequence((1,), (5,), eos=(2, 3), min_tokens=2), NONE)) == {2, 3}
    assert banned_tokens(sequence((1,), (5, 5), eos=(2, 3), min_tokens=2), NONE) == []


def test_forced_tokens() -> None:
    rules = GenerationRules(forced_first=9, forced_last=2)
    assert forced_token(sequence((0,), max_tokens=3), rules) == 9
    assert forced_token(sequence((0, 8), max_tokens=3), rules) is None
    assert forced_token(sequence((0,), (9,), max_tokens=3), rules) is None
    assert forced_token(sequence((0,), (9, 5), max_tokens=3), rules) == 2
    assert forced_token(sequence((0,), (9, 5), max_tokens=3), NONE) is None


@pytest.mark.parametrize(
    ("output", "forced", "reason", "stop"),
    [
        ((5, 5), True, FinishReason.LENGTH, 2),
        ((5, 5), False, FinishReason.STOP, 2),
        ((5,), True, FinishReason.STOP, 2),  # forced, but not by the length
    ],
)
def test_how_a_stop_id_ends_a_sequence(output: tuple[int, ...], forced: bool, reason: FinishReason, stop: int) -> None:
    made = sequence((0,), output, eos=(2,), max_tokens=3)
    made.append(2, forced=forced)
    assert (made.finish_reason, made.stop_token_id) == (reason, stop)


def test_a_forced_end_counts_before_min_tokens_too() -> None:
    made = sequence((0,), (5, 5), eos=(2,), max_tokens=3, min_tokens=3)
    made.append(2, forced=True)
    assert (made.finish_reason, made.stop_token_id) == (FinishReason.LENGTH, 2)


class HistoryRunner(BeamRunner):
    """A runner that compares the history of every sequence with one built from scratch."""

    def _compute(self, step: ScheduledSequence, tokens: list[int]) -> SampledToken | None:
        sequence = step.sequence
        if step.samples:
            assert sequence.history is not None
            fresh = History(sequence.num_prompt_tokens, sequence.params.no_repeat_ngram_size)
            kept, anew = (one.counted(tokens) for one in (sequence.history, fresh))
            assert [one.tolist() for one in kept] == [one.tolist() for one in anew]
            assert set(sequence.history.repeating(tokens)) == set(fresh.repeating(tokens))
            assert set(sequence.history.seen(tokens).tolist()) == set(tokens)
        return super()._compute(step, tokens)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("seed", range(3))
def test_histories_hold_through_searches_preemption_and_prefix_hits(seed: int, overlap: bool) -> None:
    chance = random.Random(seed)
    harness = Harness(num_blocks=40, max_num_seqs=12, overlap=overlap, script=lambda _, tokens: len(tokens) * 7 % 5)
    harness.engine.runner = harness.runner = HistoryRunner(harness.engine.block_manager, harness.runner.script)
    kinds: list[dict[str, object]] = [
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
        {"frequency_penalty": 0.3, "n": 3},
        {"no_repeat_ngram_size": 3, "num_beams": 3},
    ]
    for number in range(14):
        prompt = [chance.randrange(2) for _ in range(chance.choice([3, 9, 14]))]
        harness.add(f"r{number}", prompt, max_tokens=chance.randint(3, 12), **chance.choice(kinds))
    while harness.engine.has_work:
        if harness.engine.scheduler.running and chance.random() < 0.15:
            harness.engine.scheduler.preempt(chance.choice(harness.engine.scheduler.running))
        harness.step()
    assert harness.engine.scheduler.num_preemptions > 3
    assert harness.engine.block_manager.num_hit_tokens > 0
