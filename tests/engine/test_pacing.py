"""A long prompt is cut so that nobody's next token is held up, and a short one is not stuck behind it."""

from __future__ import annotations

import pytest

from model.engine.pacing import STRETCH, Pacing
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


def test_nothing_is_held_back_before_anything_is_known() -> None:
    assert Pacing().prompt_limit(0) is None


def test_the_limit_lets_a_step_last_so_many_times_a_decode() -> None:
    pacing = Pacing()
    for _ in range(60):
        pacing.observe(0.010, 8, 0)
        pacing.observe(0.010 + 100 * 0.0002, 8, 100)
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
    pacing = Pacing()
    for _ in range(60):
        pacing.observe(0.010, 8, 0)
        pacing.observe(0.010 + 100 * 0.0002, 8, 100)
    limits = [pacing.prompt_limit(waiting) for waiting in (0, 8, 24, 1000)]
    assert limits == pytest.approx([50, 100, 200, 350], rel=0.05)


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
