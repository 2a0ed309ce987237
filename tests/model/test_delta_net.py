"""The gated delta rule in chunks against its definition, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych.model.cache.kv_cache import StateCache, StateSpan, StateTables, independent_spans, segments
from triptych.model.config.attention import GatedDeltaConfig
from triptych.model.config.cache import NO_STATE
from triptych.model.network.delta_net import delta_rule

HEADS, KEY, VALUE = 3, 12, 8


def inputs(length: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Return queries, keys, values, decays, rates and a state of two sequences."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=draw)

    query, key = (torch.nn.functional.normalize(normal(length, HEADS, KEY), dim=-1) for _ in range(2))
    decay = -torch.rand(2, length, HEADS, generator=draw).square() * 3
    rate = torch.rand(2, length, HEADS, generator=draw)
    return query, key, normal(length, HEADS, VALUE), decay, rate, normal(HEADS, KEY, VALUE)


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the definition in float64."""
    query, key, value, decay, rate, state = (x.double() for x in (query, key, value, decay, rate, state))
    outputs = []
    for t in range(query.shape[1]):
        state = state * decay[:, t, :, None, None].exp()
        for b in range(2):
            for h in range(HEADS):
                seen = state[b, h].T @ key[b, t, h]
                state[b, h] += torch.outer(key[b, t, h], rate[b, t, h] * (value[b, t, h] - seen))
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(outputs, dim=1), state


def test_chunks_are_what_the_definition_gives() -> None:
    given = inputs(150)
    for ours, theirs in zip(delta_rule(*given), one_by_one(*given), strict=True):
        assert (ours - theirs).abs().max() < 1e-5


def test_a_prompt_in_parts_is_the_whole_prompt() -> None:
    *rows, state = inputs(131)
    whole, last = delta_rule(*rows, state)
    begin, found = 0, []
    for length in (1, 63, 1, 1, 65):
        part, state = delta_rule(*(one[:, begin : begin + length] for one in rows), state)
        found.append(part)
        begin += length
    assert (torch.cat(found, dim=1) - whole).abs().max() < 1e-5
    assert (state - last).abs().max() < 1e-5


def test_strong_decays_neither_overflow_nor_vanish() -> None:
    query, key, value, decay, rate, state = inputs(128)
    outputs, state = delta_rule(query, key, value, decay * 300, rate, state)
    expected, _ = one_by_one(query, key, value, decay * 300, rate, inputs(128)[-1])
    assert torch.isfinite(outputs).all()
    assert (outputs - expected).abs().max() < 1e-5


def test_spans_are_computed_behind_those_that_they_go_on_from() -> None:
    first, second = StateSpan(0, 8, NO_STATE, 3), StateSpan(8, 11, 3, 4)
    other = StateSpan(11, 12, 7, 5)
    assert independent_spans([first, second, other]) == [[first, other], [second]]


def test_spans_that_follow_each_other_are_one_segment() -> None:
    spans = [
        StateSpan(0, 8, NO_STATE, 3),
        StateSpan(8, 11, 3, 4),
        StateSpan(11, 12, 7, NO_STATE),
        StateSpan(12, 13, 4, 1),
    ]
    found = segments(spans)
    assert [(one.first, one.last, one.source) for one in found] == [(0, 11, NO_STATE), (11, 12, 7), (12, 13, 4)]
    assert [one.kept for one in found] == [{8: 3, 11: 4}, {}, {13: 1}]
    tables = StateTables.of(spans[:2], 5, torch.device("cpu"))
    assert tables.singles is None and tables.segments is not None and tables.chunks is not None
    assert tables.segments.T.tolist() == [[0, 3, NO_STATE]]
    assert tables.chunks.T.tolist() == [[0, 5, 0, NO_STATE, NO_STATE], [5, 8, 0, NO_STATE, 3], [8, 11, 0, NO_STATE, 4]]


def test_slots_keep_what_was_written_and_no_state_is_zeros() -> None:
    config = GatedDeltaConfig(1, 2, 4, 3, 4, 1e-6)
    states = StateCache.zeros(config, 3, torch.device("cpu"))
    recurrent, convolution = (torch.randn(2, *shape) for shape in config.state_shapes)
    states.write([2, NO_STATE], recurrent, convolution)
    found = states.read([NO_STATE, 2])
    assert all(torch.equal(there[1], given[0]) for there, given in zip(found, (recurrent, convolution), strict=True))
    assert not any(there[0].any() for there in found)
    assert states.nbytes == 3 * 4 * config.state_elements
