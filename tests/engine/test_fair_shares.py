"""Tenants of one priority share the engine: by tokens, without one that waits for another's flood."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.scripted import Harness, expected_tokens, request
from triptych.model.engine.scheduling.fair_shares import place_in_turn
from triptych.model.engine.scheduling.scheduled_step import DECODES_ONLY
from triptych.model.engine.step_pacer import StepPacer, StepWork


def sizes(harness: Harness, begin: int = 0) -> list[dict[str, int]]:
    """Return the tokens of each request in each step."""
    return [
        {s.sequence.request.request_id: s.num_tokens for s in step.scheduled} for step in harness.runner.steps[begin:]
    ]


def flood(harness: Harness, number: int = 60, prompt: int = 20, **params: Any) -> None:
    for at in range(number):
        ids = [1000 * (at + 1) + token for token in range(prompt)]  # no common prefixes
        harness.add(f"flood-{at}", ids, tenant="heavy", **{"max_tokens": 30, **params})


@pytest.mark.parametrize("num_blocks", [400, 60])
def test_the_first_token_of_a_light_tenant_comes_beside_a_flood_in_a_step_of_twice_its_prompt(num_blocks: int) -> None:
    """Places and, with few blocks, the KV cache are taken by the flood: it gives some up at once."""
    harness = Harness(max_num_seqs=8, num_blocks=num_blocks, budget=256)
    flood(harness)
    for _ in range(5):
        harness.step()
    begin = len(harness.runner.steps)
    made = harness.add("light", [7] * 24, tenant="light", max_tokens=3)
    harness.step()
    first = sizes(harness, begin)[0]
    assert first["light"] == 24
    assert sum(first.values()) <= 2 * 24 + 8
    for _ in range(2):
        harness.step()
    assert harness.tokens("light") == expected_tokens(made)


@pytest.mark.parametrize("streams", [True, False])
def test_the_pacer_knows_of_a_prompt_for_which_a_flood_gives_up_a_place(streams: bool) -> None:
    """The light prompt is in the first step after it came, though no place was free before that step."""
    harness, pacer = Harness(max_num_seqs=8, num_blocks=400, budget=256), StepPacer()
    key = ("scripted", "generate")

    def add(name: str, ids: list[int], tenant: str) -> None:
        harness.engine.add(replace(request(name, ids, tenant=tenant, max_tokens=200), streams=streams))

    def step() -> None:
        turn = pacer.next({key: harness.engine.demand()})
        assert turn is not None
        harness.limits = turn.budget
        harness.step()
        computed = sizes(harness, -1)[0].values()
        decodes = sum(tokens == 1 for tokens in computed)
        prompts = sum(computed) - decodes
        pacer.observe(key, StepWork(0.01 + 1e-4 * prompts, decodes, prompts))

    for at in range(60):
        add(f"flood-{at}", [1000 * (at + 1) + token for token in range(20)], "heavy")
    for at in range(3):
        for _ in range(20):
            step()
        scheduler = harness.engine.scheduler
        assert len(scheduler.running) == scheduler.max_num_seqs
        add(f"light-{at}", [7 + at] * 24, "light")
        step()
        assert sizes(harness, -1)[0][f"light-{at}"] == 24


def test_no_place_is_taken_for_a_prompt_that_gets_no_tokens() -> None:
    harness = Harness(max_num_seqs=8, num_blocks=400, budget=256)
    flood(harness)
    harness.step()
    harness.add("light", [7] * 24, tenant="light")
    harness.limits = DECODES_ONLY
    harness.step()
    assert len(sizes(harness, -1)[0]) == 8


def test_with_one_tenant_nothing_changes() -> None:
    def steps(tenant: str) -> list[dict[str, int]]:
        harness, numbers = Harness(max_num_seqs=6, num_blocks=40, budget=24), random.Random(3)
        for at in range(30):
            harness.add(f"r{at}", numbers.randint(1, 30), tenant=tenant, max_tokens=numbers.randint(1, 20))
            harness.step()
        harness.run()
        return sizes(harness)

    assert steps("") == steps("alice")


def test_floods_share_tokens_whatever_their_requests_are_like() -> None:
    harness = Harness(max_num_seqs=8, num_blocks=400, budget=64)
    for at in range(150):
        harness.add(f"long-{at}", [10 * at + 5, 1], tenant="a", max_tokens=60)
        harness.add(f"short-{at}", [10 * at + 6] * 24, tenant="b", max_tokens=4)
    for _ in range(300):
        harness.step()
    done: Counter[str] = Counter()
    for step in sizes(harness):
        for name, tokens in step.items():
            done[name[:4]] += tokens
    assert 0.4 < done["long"] / done.total() < 0.6


@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_with_its_tokens_however_tenants_press_each_other(seed: int) -> None:
    numbers = random.Random(seed)
    harness = Harness(
        max_num_seqs=numbers.randint(1, 6), num_blocks=numbers.choice([14, 30, 80]), budget=24, overlap=seed % 2 == 1
    )
    made = []
    for at in range(60):
        made.append(
            harness.add(
                f"r{at}",
                [numbers.randint(1, 3) for _ in range(numbers.randint(1, 30))],
                tenant=numbers.choice("aaaabc"),
                priority=numbers.choice([0, 0, 0, 5]),
                max_tokens=numbers.randint(1, 20),
                n=numbers.choice([1, 1, 2]),
            )
        )
        for _ in range(numbers.randint(0, 3)):
            harness.step()
    harness.run()
    for one in made:
        if one.params.n == 1:
            assert harness.tokens(one.request_id) == expected_tokens(one)
    assert len(harness.ends()) == sum(request.params.n for request in made)


def test_a_request_that_needs_the_whole_cache_ends_beside_another_tenants_flood() -> None:
    harness = Harness(max_num_seqs=8, num_blocks=16, block_size=4, budget=64)
    flood(harness, 40, 6, max_tokens=10)
    made = harness.add("large", [3] * 40, tenant="large", max_tokens=16)
    for at in range(40):
        harness.add(f"later-{at}", [40_000 + at, 2, 3], tenant="heavy", max_tokens=10)
    harness.run()
    assert harness.tokens("large") == expected_tokens(made)
    assert list(harness.ends()).index(("large", 0)) < 60


@pytest.mark.parametrize("length", [5, 7])
def test_one_that_gives_way_while_its_token_is_sampled_waits_for_it(length: int) -> None:
    """Its drafts had room for the light prompt, so it could begin again in the same step, with the token before."""
    settings: dict[str, Any] = {"num_blocks": 73, "block_size": 1, "max_num_seqs": 16, "budget": 256}
    harness = Harness(**settings, overlap=True, script=lambda source, tokens: 7, max_model_len=400)
    flood(harness, 3, 10, max_tokens=40)
    harness.add("drafted", [7] * 10, tenant="heavy", max_tokens=40, num_speculative_tokens=16)
    for _ in range(3):
        harness.step()
    harness.add("light", range(900, 900 + length), tenant="light", max_tokens=4)
    harness.run()
    assert harness.tokens("drafted") == [7] * 40
    assert len(harness.ends()) == 5


def test_priority_goes_before_fairness() -> None:
    harness = Harness(max_num_seqs=2, num_blocks=100)
    for at in range(4):
        harness.add(f"urgent-{at}", tenant="a", priority=-1, max_tokens=8)
    harness.step()
    harness.add("other", tenant="b", max_tokens=2)
    assert harness.run().first_steps[:4] == [f"urgent-{at}" for at in range(4)]


@pytest.mark.parametrize(
    ("waiting", "place"),
    [
        ("", 0),
        ("aaaa", 1),
        ("bbb", 3),
        ("abaaa", 3),  # the second of b after the second of a
        ("aba", 3),
        ("acacac", 2),
    ],
)
def test_inputs_of_tenants_alternate(waiting: str, place: int) -> None:
    assert place_in_turn([(tenant, 10) for tenant in waiting], "b") == place
