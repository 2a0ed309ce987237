"""A request's tokens do not depend on the batch, chunked prefill, preemption or the order of arrival."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from tests.engine.support import add_all, mixed, running
from tests.matrix import rest_is_slow
from tests.model.checkpoints import native_backends
from triptych.model.api.request import Request
from triptych.model.attention.base import AttentionBackend
from triptych.model.attention.sdpa import SdpaBackend

KINDS = ("llama-gqa", "marian", "t5-gated-untied")
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
WAYS = {"greedy": {}, "sampled": SAMPLED, "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.2}}


BACKENDS = (SdpaBackend(), *native_backends())
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


@cache
def alone(kind: str, way: str, backend: AttentionBackend) -> dict[str, list[int]]:
    """Return the tokens of every third of the 32 requests, each generated alone."""
    return {one.request_id: run_alone(kind, one, backend) for one in thirty_two(kind, way)[::3]}


def run_alone(kind: str, one: Request, backend: AttentionBackend = BACKENDS[-1]) -> list[int]:
    run = running(kind, backend=backend)
    run.engine.add(one)
    return run.run().ids(one.request_id)


def thirty_two(kind: str, way: str) -> list[Request]:
    return mixed(kind, 32, **WAYS[way])


# Sampled tokens show any change of their probabilities, greedy tokens only a change of the most likely one.
# Penalties belong to the sampler and do not depend on the backend.
ALIKE = rest_is_slow(
    [(kind, *how) for kind in KINDS for how in [("sampled", BACKENDS[0]), *product(WAYS, BACKENDS[1:])]],
    lambda kind, way, backend: kind == KINDS[0] or (way == "sampled" and (kind == KINDS[1] or backend != BACKENDS[0])),
)


@pytest.mark.parametrize(("kind", "way", "backend"), ALIKE, ids=lambda part: getattr(part, "name", part))
def test_tokens_are_the_same_alone_and_among_31_others(kind: str, way: str, backend: AttentionBackend) -> None:
    run = running(kind, backend=backend, num_blocks=600)
    add_all(run, thirty_two(kind, way))
    run.run()
    assert {name: run.ids(name) for name in alone(kind, way, backend)} == alone(kind, way, backend)


@each_backend
@pytest.mark.parametrize("kind", KINDS)
def test_chunked_preempted_and_in_another_order(kind: str, backend: AttentionBackend) -> None:
    run = running(kind, backend=backend, num_blocks=26 if kind.startswith("llama") else 34, budget=40, max_num_seqs=9)
    for at, one in enumerate(reversed(thirty_two(kind, "sampled"))):
        run.engine.add(one)
        run.step(at % 3)
    run.run()
    assert run.engine.stats().preemptions > 0
    assert {name: run.ids(name) for name in alone(kind, "sampled", backend)} == alone(kind, "sampled", backend)


def test_n_sequences_differ_and_the_first_equals_n_1() -> None:
    one = thirty_two("llama-gqa", "sampled")[6]
    run = running("llama-gqa", backend=BACKENDS[-1])
    run.engine.add(replace(one, params=replace(one.params, n=4)))
    run.run()
    sequences = [run.ids(one.request_id, index) for index in range(4)]
    assert sequences[0] == alone("llama-gqa", "sampled", BACKENDS[-1])[one.request_id]
    assert len({tuple(ids) for ids in sequences}) == 4


def test_control_another_seed_gives_other_tokens() -> None:
    one = thirty_two("llama-gqa", "sampled")[6]
    other = replace(one, params=replace(one.params, seed=12))
    assert run_alone("llama-gqa", other) != alone("llama-gqa", "sampled", BACKENDS[-1])[one.request_id]


@pytest.mark.parametrize("backend", native_backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("kind", [*KINDS, "mistral"])
def test_native_logits_are_the_same_bit_for_bit(kind: str, backend: AttentionBackend) -> None:
    requests = mixed(kind, 12)
    together = running(kind, backend=backend, num_blocks=34, budget=40, max_num_seqs=9)
    add_all(together, requests)
    together.run()
    for one in requests:
        by_itself = running(kind, backend=backend)
        by_itself.engine.add(one)
        by_itself.run()
        expected = dict(by_itself.runner.rows[one.request_id])
        for position, row in together.runner.rows[one.request_id]:
            assert torch.equal(row, expected[position]), (one.request_id, position)
