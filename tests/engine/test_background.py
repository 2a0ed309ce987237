"""Background work: it has steps of its own, gives way to other work, and comes to its end."""

from __future__ import annotations

import random

import pytest

from tests.engine.scripted import Harness, expected_tokens
from triptych.model.api.request import BACKGROUND_PRIORITY, FinishReason
from triptych.model.engine.background_share import SHARE, BackgroundShare
from triptych.model.engine.scheduling.scheduled_step import StepBudget


def step(harness: Harness, background: bool) -> set[str]:
    """Compute a step of one kind of work; return the requests that took part."""
    before = len(harness.runner.steps)
    outputs, _ = harness.engine.step(StepBudget(background=background))
    harness.outputs += outputs
    harness.engine.check_invariants()
    return {s.sequence.request.request_id for one in harness.runner.steps[before:] for s in one.scheduled}


def test_a_step_has_one_kind_of_work() -> None:
    harness = Harness()
    harness.add("batch", priority=BACKGROUND_PRIORITY, max_tokens=4)
    assert step(harness, True) == {"batch"}
    harness.add("stream", max_tokens=4)
    harness.add("batch-2", priority=BACKGROUND_PRIORITY, max_tokens=4)
    assert harness.engine.has_foreground
    assert harness.engine.has_background
    assert harness.engine.demand(True).decodes == 1
    assert harness.engine.demand(False).prompt_tokens == 5
    assert step(harness, False) == {"stream"}
    assert step(harness, True) == {"batch", "batch-2"}
    assert step(harness, False) == {"stream"}
    harness.run()
    assert set(harness.ends().values()) == {FinishReason.LENGTH}


def test_background_work_gives_its_places_and_blocks_to_others() -> None:
    harness = Harness(num_blocks=16, max_num_seqs=4, prefix_caching=False)
    for name in "abcd":
        harness.add(name, 8, priority=BACKGROUND_PRIORITY, max_tokens=6)
    assert step(harness, True) == set("abcd")
    harness.add("one", 4, max_tokens=2)
    assert step(harness, False) == {"one"}  # there was no place
    assert len(harness.engine.scheduler.running) == 4
    made = harness.add("large", 40, max_tokens=2)
    while not harness.tokens("large"):
        assert step(harness, False) <= {"one", "large"}  # there were no blocks
    assert step(harness, True) <= set("abcd")
    harness.run()
    assert harness.tokens("large") == expected_tokens(made)
    assert set(harness.ends().values()) == {FinishReason.LENGTH}


def test_background_work_takes_no_block_that_another_waits_for() -> None:
    harness = Harness(num_blocks=8, max_num_seqs=4, prefix_caching=False)
    harness.add("first", 12, max_tokens=8)
    step(harness, False)
    harness.add("second", 24, max_tokens=2)
    harness.add("batch", 4, priority=BACKGROUND_PRIORITY, max_tokens=2)
    assert step(harness, False) == {"first"}
    assert step(harness, True) == set()
    harness.run()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_outputs_do_not_depend_on_the_order_of_kinds(seed: int, overlap: bool) -> None:
    random_ = random.Random(seed)
    harness = Harness(num_blocks=random_.choice([12, 40]), max_num_seqs=4, overlap=overlap)
    made = []
    for at in range(16):
        priority = random_.choice([0, 5, BACKGROUND_PRIORITY])
        name = f"{at}-{priority}"
        settings = {"priority": priority, "max_tokens": random_.randint(1, 12), "tenant": random_.choice("ab")}
        made.append(harness.add(name, random_.randint(1, 20), **settings))
        for _ in range(random_.randint(0, 3)):
            step(harness, random_.random() < 0.5)
    for _ in range(2000):
        if not harness.engine.has_work:
            break
        step(harness, random_.random() < 0.5)
    assert not harness.engine.has_work
    assert harness.engine.block_manager.is_empty
    for one in made:
        assert harness.tokens(one.request_id) == expected_tokens(one)


def test_the_share_of_background_work() -> None:
    share, spent = BackgroundShare(), {True: 0.0, False: 0.0}
    for _ in range(20_000):
        background = share.is_due()
        seconds = 0.05 if background else 0.01
        share.observe(seconds, background=background, contended=True)
        spent[background] += seconds
    assert spent[True] / spent[False] == pytest.approx(SHARE, rel=0.05)
    share.observe(0.05, background=True, contended=False)
    assert not share.is_due()  # a request that comes then is served first
