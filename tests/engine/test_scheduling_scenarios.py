"""Random scenarios of scheduling alone: tenants, background work, drafts and steps that fail change no other output.

The runner computes nothing and checks every step, so a scenario takes some 20 ms (`tests.engine.scripted`).
`tests.engine.test_random_scenarios` runs models.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.scripted import Harness, Late, request
from tests.engine.test_speculation import copying
from tests.matrix import rest_is_slow
from triptych.model.api.request import BACKGROUND_PRIORITY, FinishReason, Request
from triptych.model.config.cache import PoolSize, StateSize
from triptych.model.engine.scheduling.scheduled_step import UNLIMITED, SampledToken, SchedulerOutput, StepBudget

CONTEXT = 96
EOS = (1, 2, 3)
CUT = (FinishReason.CANCELLED, FinishReason.ERROR)


def drawn_request(number: int, chance: random.Random) -> Request:
    prefix = [number % 4] * chance.choice((0, 5, 30))
    ids = [*prefix, *(chance.randrange(50) for _ in range(chance.randint(1, 12)))]
    settings: dict[str, Any] = {
        "max_tokens": chance.choice((1, 2, 8, 40)),
        "n": chance.choice((1, 1, 1, 3)),
        "ignore_eos": chance.random() < 0.4,
        "min_tokens": chance.choice((0, 0, 1)),
        "no_repeat_ngram_size": chance.choice((0, 0, 9)),  # it has to see each token before the next step
        "num_speculative_tokens": chance.choice((None, None, 0, 5)),
    }
    source = [chance.randrange(3)] * chance.choice((7, 20)) if chance.random() < 0.2 else 0
    priority = chance.choice((0, 0, 0, 5, BACKGROUND_PRIORITY))
    made = request(f"r{number}", ids, source=source, tenant=chance.choice("aaab"), priority=priority, **settings)
    return replace(made, streams=chance.random() < 0.5, cache_salt=chance.choice(("", "", "salt")))


class Breaks:
    """A model that fails on the requests in `poison`, and now and then on a step of several, before or after it ran.

    What runs after a failure in the same step may lack keys that were to be written, and then says nonsense.
    """

    def __init__(self, harness: Harness, poison: set[str], chance: random.Random) -> None:
        self.has_failed = False  # in this step
        self._real = harness.runner.launch
        self._poison = poison
        self._chance = chance
        harness.runner.launch = self.launch  # type: ignore[method-assign]

    def launch(self, output: SchedulerOutput, before: Late | None = None) -> Late:
        steps = output.scheduled
        fails = any(step.sequence.request.request_id in self._poison for step in steps)
        if fails or (len(steps) > 1 and self._chance.random() < 0.03):
            self.has_failed = True
            if self._chance.random() < 0.5:
                with suppress(AssertionError, KeyError):
                    self._real(output, before)
            raise RuntimeError("this step breaks the model")
        try:
            return self._real(output, before)
        except (AssertionError, KeyError):
            if not self.has_failed:
                raise
            return Late([SampledToken(0) if step.samples else None for step in steps], {})


def budget_of(harness: Harness, chance: random.Random) -> StepBudget:
    """Return the budget of a step as the loop and the pacer might choose it."""
    engine = harness.engine
    both = engine.has_background and engine.has_foreground
    background = chance.random() < 0.3 if both else chance.choice((None, True)) if engine.has_background else None
    demand = engine.demand(background)
    if demand.decodes and chance.random() < 0.2:
        return StepBudget(True, 0, 0, background)
    if chance.random() < 0.5:
        return replace(UNLIMITED, background=background)
    return StepBudget(True, chance.choice((None, 1, 7)), chance.choice((None, demand.whole_tokens)), background)


def play(harness: Harness, breaks: Breaks, made: list[Request], chance: random.Random) -> set[str]:
    """Run all requests; return those that were cancelled."""
    engine, waiting, cancelled = harness.engine, list(made), set[str]()
    for _ in range(4000):
        while waiting and (not engine.has_work or chance.random() < 0.4):
            engine.add(waiting.pop(0))
        if chance.random() < 0.03:
            one = chance.choice(made)
            if one not in waiting:
                cancelled.add(one.request_id)
                harness.outputs += engine.abort(one.request_id, chance.choice((None, 0)), FinishReason.CANCELLED)
        breaks.has_failed = False
        harness.outputs += engine.step(budget_of(harness, chance))[0]
        engine.check_invariants()
        if not waiting and not engine.has_work:
            return cancelled
    raise AssertionError("the engine does not come to an end")


def alone(made: Request) -> Harness:
    harness = Harness(script=copying, num_blocks=200, eos_token_ids=EOS, max_model_len=CONTEXT, budget=CONTEXT)
    harness.engine.add(replace(made, priority=0))
    return harness.run()


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("seed", rest_is_slow(range(40), lambda seed: seed < 12))
def test_outputs_are_those_of_each_request_alone(seed: int, overlap: bool) -> None:
    chance = random.Random(seed)
    made = [drawn_request(number, chance) for number in range(16)]
    size, num_seqs = chance.choice((1, 3, 4, 16)), chance.choice((2, 4, 8))
    least = max(-(-(len(one.prompt_token_ids) + one.params.max_tokens) // size) for one in made) + -(-20 // size)
    pools = [PoolSize(chance.choice((1, 1, 3)) * least + 1)]
    if seed % 4 == 1:
        pools.append(PoolSize(pools[0].num_blocks, 9))
    harness = Harness(
        script=copying,
        pools=pools,
        block_size=size,
        max_num_seqs=num_seqs,
        budget=chance.choice((24, 40, 200)),
        max_model_len=CONTEXT,
        eos_token_ids=EOS,
        prefix_caching=chance.random() < 0.7,
        overlap=overlap,
        num_speculative_tokens=chance.choice((0, 4)),
        states=StateSize(num_seqs, chance.choice((0, 4, 40))) if seed % 4 == 2 else None,
        encoder_layers=1 if overlap else chance.choice((1, 3)),
    )
    poison = {one.request_id for one in made if chance.random() < 0.1}
    cancelled = play(harness, Breaks(harness, poison, chance), made, chance)
    assert harness.engine.block_manager.is_empty
    ends = harness.ends()
    assert len(ends) == sum(one.params.n for one in made)
    for one in made:
        whole = alone(one)
        for index in range(one.params.n):
            key, tokens = (one.request_id, index), whole.tokens(one.request_id, index)
            found = harness.tokens(*key)
            if ends[key] in CUT:
                assert one.request_id in (poison if ends[key] is FinishReason.ERROR else cancelled)
                assert found == tokens[: len(found)]
            else:
                assert one.request_id not in poison
                assert (found, ends[key]) == (tokens, whole.ends()[key])
