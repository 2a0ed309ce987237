"""A request's tokens are its own: neighbours, chunks, preemption and order of arrival change nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from model.request import Request
from tests.engine.support import add_all, mixed, running

KINDS = ("llama-gqa", "marian", "t5-gated-untied")
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
WAYS = {"greedy": {}, "sampled": SAMPLED, "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.2}}


@cache
def alone(kind: str, way: str) -> dict[str, list[int]]:
    return {one.request_id: run_alone(kind, one) for one in thirty_two(kind, way)}


def run_alone(kind: str, one: Request) -> list[int]:
    run = running(kind)
    run.engine.add(one)
    return run.run().ids(one.request_id)


def thirty_two(kind: str, way: str) -> list[Request]:
    return mixed(kind, 32, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_alone_and_among_31_others(kind: str, way: str) -> None:
    run = running(kind, num_blocks=600)
    add_all(run, thirty_two(kind, way))
    run.run()
    assert {name: run.ids(name) for name in alone(kind, way)} == alone(kind, way)


@pytest.mark.parametrize("way", ["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_chunked_preempted_and_in_another_order(kind: str, way: str) -> None:
    run = running(kind, num_blocks=26 if kind.startswith("llama") else 34, budget=40, max_num_seqs=9)
    for at, one in enumerate(reversed(thirty_two(kind, way))):
        run.engine.add(one)
        run.step(at % 3)
    run.run()
    assert run.engine.stats().preemptions > 0
    assert {name: run.ids(name) for name in alone(kind, way)} == alone(kind, way)


def test_each_of_n_draws_its_own_and_the_first_is_that_of_n_1() -> None:
    one = thirty_two("llama-gqa", "sampled")[5]
    run = running("llama-gqa")
    run.engine.add(replace(one, params=replace(one.params, n=4)))
    run.run()
    sequences = [run.ids(one.request_id, index) for index in range(4)]
    assert sequences[0] == alone("llama-gqa", "sampled")[one.request_id]
    assert len({tuple(ids) for ids in sequences}) == 4


def test_control_another_seed_gives_other_tokens() -> None:
    one = thirty_two("llama-gqa", "sampled")[5]
    other = replace(one, params=replace(one.params, seed=12))
    assert run_alone("llama-gqa", other) != alone("llama-gqa", "sampled")[one.request_id]
