"""What steps cost is learnt from the steps, and one that was late is no measure."""

from __future__ import annotations

import pytest

from model.engine.step_cost import DecodeCost, WorkCost


def learnt(fixed: float, per_token: float, sizes: tuple[int, ...]) -> WorkCost:
    cost = WorkCost()
    for tokens in sizes * 10:
        cost.observe(tokens, fixed + per_token * tokens)
    return cost


@pytest.mark.parametrize("fixed", [0.0, 0.006])
def test_the_fixed_part_is_told_from_that_of_each_token(fixed: float) -> None:
    cost = learnt(fixed, 1e-5, (16, 300, 1500))
    assert cost.fixed == pytest.approx(fixed, abs=1e-6)
    assert cost.per_token == pytest.approx(1e-5, rel=0.01)
    assert cost.tokens_within(0.016, 16) == pytest.approx((0.016 - fixed) / 1e-5, rel=0.01)


def test_of_one_size_alone_larger_ones_are_tried() -> None:
    cost = learnt(0.006, 1e-5, (36,))
    assert cost.seconds(36) == pytest.approx(0.006 + 36e-5)
    assert cost.tokens_within(0.001, 16) == 72


def test_a_worthwhile_piece_costs_as_much_as_starting_it() -> None:
    cost = learnt(0.006, 1e-5, (16, 300, 1500))
    assert cost.seconds(cost.worthwhile_tokens(16)) == pytest.approx(2 * 0.006, rel=0.01)
    assert learnt(0.0, 1e-5, (16, 1500)).worthwhile_tokens(16) == 16


def test_no_part_is_negative() -> None:
    cost = WorkCost()
    for tokens, seconds in ((16, 0.010), (256, 0.008), (1024, 0.009)) * 5:  # noise and nothing else
        cost.observe(tokens, seconds)
    assert cost.fixed >= 0 and cost.per_token > 0


def test_a_late_step_counts_as_four_times_what_was_expected() -> None:
    cost, decode = learnt(0.0, 1e-4, (16, 100)), DecodeCost()
    cost.observe(100, 5.0)
    assert cost.seconds(100) < 0.02
    for seconds in (0.01, 0.01, 5.0):
        decode.observe(seconds)
    assert decode.seconds == pytest.approx(0.016)


def test_a_decode_step_is_due_when_none_was_alone_for_long() -> None:
    decode = DecodeCost()
    assert decode.is_due
    decode.observe(0.01)
    assert not decode.is_due
    for _ in range(32):
        decode.observe_mixed()
    assert decode.is_due
