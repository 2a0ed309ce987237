"""Step costs are learned from measured steps, and outliers hardly change them."""

from __future__ import annotations

import pytest

from triptych.model.engine.step_cost import DecodeCost, WorkCost


def learnt(fixed: float, per_token: float, sizes: tuple[int, ...]) -> WorkCost:
    cost = WorkCost()
    for tokens in sizes * 10:
        cost.observe(tokens, fixed + per_token * tokens)
    return cost


@pytest.mark.parametrize("fixed", [0.0, 0.006])
def test_fixed_cost_is_separated_from_the_cost_per_token(fixed: float) -> None:
    cost = learnt(fixed, 1e-5, (16, 300, 1500))
    for tokens in (1, 16, 100, 700, 1500, 2500):
        assert cost.seconds(tokens) == pytest.approx(fixed + 1e-5 * tokens, rel=0.01)
    assert cost.tokens_within(0.014, 16) == pytest.approx((0.014 - fixed) / 1e-5, rel=0.02)


def test_larger_sizes_are_explored_while_one_size_is_known() -> None:
    cost = learnt(0.006, 1e-5, (36,))
    assert cost.seconds(36) == pytest.approx(0.006 + 36e-5)
    assert cost.tokens_within(0.001, 16) == 72


def test_worthwhile_size_costs_at_most_twice_the_best_per_token() -> None:
    assert learnt(0.006, 1e-5, (16, 300, 600, 1500)).worthwhile_tokens(16) == 600
    assert learnt(0.0, 1e-5, (16, 1500)).worthwhile_tokens(16) == 16


def test_no_size_beyond_twice_the_largest_is_returned() -> None:
    """Check that cheap prompts of 32 tokens do not predict a cheap one of 900."""
    cost = learnt(0.0, 1e-9, (8, 32))
    assert cost.tokens_within(1.0, 16) == 64
    cost.observe(64, 0.002)
    cost.observe(900, 0.036)
    assert cost.seconds(900) > 0.003


def test_a_larger_size_never_costs_less() -> None:
    cost = WorkCost()
    for tokens, seconds in ((16, 0.010), (256, 0.008), (1024, 0.009)) * 5:  # noise alone
        cost.observe(tokens, seconds)
    costs = [cost.seconds(tokens) for tokens in range(0, 3000, 10)]
    assert costs == sorted(costs)


def test_stale_cost_of_a_small_size_is_corrected() -> None:
    cost = learnt(0.001, 2.5e-5, (100, 400))
    cost.observe(30, 0.020)  # while another program used the CPU
    assert cost.seconds(30) <= cost.seconds(100) < 0.006


def test_other_sizes_follow_a_change_a_little() -> None:
    cost = learnt(0.0, 1e-4, (16, 100, 1000))
    for _ in range(60):
        cost.observe(100, 0.1)  # ten times as slow
    assert cost.seconds(1000) > 1.2 * 0.1


def test_outlier_counts_as_four_times_the_estimate() -> None:
    cost, decode = learnt(0.0, 1e-4, (16, 100)), DecodeCost()
    cost.observe(100, 5.0)
    assert cost.seconds(100) == pytest.approx(0.0164, rel=0.1)
    for seconds in (0.01, 0.01, 5.0):
        decode.observe(seconds)
    assert decode.seconds == pytest.approx(0.016)


def test_decode_only_step_is_due_after_many_mixed_ones() -> None:
    decode = DecodeCost()
    assert decode.is_due
    decode.observe(0.01)
    assert not decode.is_due
    for _ in range(32):
        decode.observe_mixed()
    assert decode.is_due
