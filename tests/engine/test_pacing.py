"""A long prompt is cut so that nobody's next token is held up, and a short one is not stuck behind it."""

from __future__ import annotations

import pytest

from model.engine.pacing import FIRST_TOKENS, LONGEST_SECONDS, STRETCH, Pacing
from tests.engine.scripted import Harness, expected_tokens


class Fixed(Pacing):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def prompt_limit(self, num_waiting: int) -> int:
        return self.limit


def paced(limit: int, **settings: int) -> Harness:
    harness = Harness(budget=64, **settings)
    harness.engine.pacing = Fixed(limit)
    return harness


def measured() -> Pacing:
    """Of an engine that decodes in 10 ms and takes 0.2 ms for a prompt token."""
    pacing = Pacing()
    for _ in range(60):
        pacing.observe(0.010, 8, 0)
        pacing.observe(0.010 + 100 * 0.0002, 8, 100)
    return pacing


def test_nothing_is_held_back_before_anything_is_known() -> None:
    assert Pacing().prompt_limit(0) is None


def test_the_limit_lets_a_step_last_so_many_times_a_decode() -> None:
    pacing = measured()
    limit = pacing.prompt_limit(0)
    assert limit is not None
    assert 0.010 + limit * 0.0002 == pytest.approx(STRETCH * 0.010, rel=0.05)


def test_the_limit_follows_what_steps_cost() -> None:
    pacing = Pacing()
    limits = []
    for seconds in (0.010, 0.100):
        for _ in range(60):
            pacing.observe(seconds, 8, 0)
            pacing.observe(seconds + 0.02, 8, 100)
        limits.append(pacing.prompt_limit(0))
    assert limits[1] == pytest.approx(10 * limits[0], rel=0.1)  # type: ignore[operator]


def test_a_queue_lets_steps_last_longer_up_to_a_bound() -> None:
    pacing = measured()
    limits = [pacing.prompt_limit(waiting) for waiting in (0, 8, 24, 1000)]
    assert limits == pytest.approx([50, 100, 200, 350], rel=0.05)


def test_one_late_step_is_forgotten_where_prompts_share_the_least_limit() -> None:
    """Of 16 tokens two prompts get 8 and 4, and no step has more while so little is believed to fit."""
    pacing = measured()
    known = pacing.prompt_limit(0)
    pacing.observe(3.0, 8, 100)  # a container that was paused
    assert pacing.prompt_limit(0) == 16
    for _ in range(60):
        limit = pacing.prompt_limit(0)
        tokens = 0 if limit == 0 else 12 if limit == 16 else limit
        assert tokens is not None
        pacing.observe(0.010 + tokens * 0.0002, 8, tokens)
    assert known is not None
    assert pacing.prompt_limit(0) in (0, pytest.approx(known, rel=0.1))


def test_under_lasting_load_the_cost_of_decoding_is_measured_again() -> None:
    pacing = Pacing()
    for _ in range(50):
        pacing.observe(0.003, 1, 0)  # one stream
    measured = 0
    for _ in range(400):  # then thirty, with a prompt in every step that takes one
        limit = pacing.prompt_limit(0)
        tokens = 100 if limit is None else limit
        measured += tokens == 0
        pacing.observe(0.010 + tokens * 1e-4, 30, tokens)
    assert pacing.prompt_limit(0) == pytest.approx(100, rel=0.05)
    assert 10 <= measured <= 13


def test_a_step_that_measures_has_decodes_only() -> None:
    harness = paced(0)
    for name in ("a", "b"):
        harness.add(name, 3, max_tokens=30)
    harness.step()
    harness.add("long", 50, max_tokens=2)
    harness.step()
    assert [s.num_tokens for s in harness.runner.steps[-1].scheduled] == [1, 1]


def test_a_prompt_gets_on_whatever_it_costs() -> None:
    pacing = Pacing()
    pacing.observe(0.001, 1, 0)
    pacing.observe(10.0, 1, 100)
    assert pacing.prompt_limit(0) == 16


def test_beside_decodes_prompts_take_no_more_than_the_limit() -> None:
    harness = paced(6)
    harness.add("a", 3, max_tokens=30)
    harness.step()
    long = harness.add("long", 50, max_tokens=2)
    while harness.engine.has_work:
        harness.step()
        step = harness.runner.steps[-1]
        prompts = sum(s.num_tokens for s in step.scheduled if s.num_tokens > 1)
        assert prompts <= 6 or all(s.num_tokens > 1 for s in step.scheduled)
    assert harness.tokens("long") == expected_tokens(long)


def test_alone_a_prompt_takes_the_whole_budget() -> None:
    harness = paced(6)
    harness.add("long", 50, max_tokens=1)
    harness.step()
    assert harness.runner.steps[0].scheduled[0].num_tokens == 50


def test_a_step_of_prompts_alone_is_cut_by_time() -> None:
    pacing = Pacing()
    assert pacing.most_tokens is None
    for _ in range(10):
        pacing.observe(1.0, 0, 200)
    assert pacing.most_tokens == pytest.approx(200 * LONGEST_SECONDS)
    for _ in range(10):
        pacing.observe(100.0, 0, 200)
    assert pacing.most_tokens == 16


def test_on_a_slow_machine_only_the_first_step_outlasts_the_bound() -> None:
    class Slow(Pacing):
        def observe(self, seconds: float, num_decodes: int, num_prompt_tokens: int) -> None:
            super().observe(0.1 * (num_decodes + num_prompt_tokens), num_decodes, num_prompt_tokens)

    harness = Harness(budget=512, num_blocks=128, max_num_seqs=4, max_model_len=512)
    harness.engine.pacing = Slow()
    long, short = harness.add("long", 300, max_tokens=1), harness.add("short", 60, max_tokens=1)
    harness.run()
    first, *others = [step.num_tokens for step in harness.runner.steps]
    assert first == FIRST_TOKENS
    assert 0.9 * LONGEST_SECONDS < 0.1 * max(others) <= LONGEST_SECONDS
    assert harness.tokens("long") == expected_tokens(long)
    assert harness.tokens("short") == expected_tokens(short)


def test_a_long_source_begins_however_slow_the_machine_is_and_alone() -> None:
    harness = Harness(budget=256, num_blocks=256)
    for name in ("first", "second"):
        harness.add(name, 1, source=100)
    scheduled = [harness.engine.scheduler.schedule(most_tokens=16).scheduled for _ in range(2)]
    names = [[step.sequence.request.request_id for step in one if step.encode_source] for one in scheduled]
    assert names == [["first"], ["second"]]


def test_a_step_has_room_for_a_token_of_each_however_slow_the_machine_is() -> None:
    harness = Harness(budget=256, num_blocks=256, max_num_seqs=32)
    for number in range(32):
        harness.add(str(number), 1)
    assert len(harness.engine.scheduler.schedule(most_tokens=16).scheduled) == 32


def test_a_short_prompt_overtakes_a_long_one() -> None:
    harness = paced(8)
    harness.add("stream", 3, max_tokens=60)
    harness.step()
    harness.add("long", 60, max_tokens=1)
    harness.step()
    harness.add("short", 4, max_tokens=1)
    harness.run()
    ended = [output.request_id for output in harness.outputs if output.finish_reason]
    assert ended.index("short") < ended.index("long")


def test_nobody_starves_under_a_stream_of_short_prompts() -> None:
    harness = paced(8, num_blocks=128)
    harness.add("long", 60, max_tokens=1)
    for number in range(40):
        harness.add(f"short{number}", 4, max_tokens=3)
        harness.step()
    ended = [output.request_id for output in harness.outputs if output.finish_reason]
    assert "long" in ended
