"""Draws over vocabularies of real size against their definition: one row, sorted whole, in float64."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.drawing import draw, highest
from model.request import SamplingParams

SIZES = [1, 7, 300, 5_000, 50_257]  # below a block, below and above the short heads, a real one


def scores(vocabulary: int, spread: float, rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def defined(row: Tensor, params: SamplingParams, point: float) -> tuple[int, float]:
    """The token at `point` of what the cuts leave, in the vocabulary's order, and how near a border it is."""
    scaled = row.double().numpy() / params.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    ordered = weights[order][: params.top_k or len(order)]
    limit = params.top_p * (ordered.sum() if params.top_k else weights.sum())
    count = min(int(np.searchsorted(ordered.cumsum(), limit)) + 1, len(ordered))
    least = max(ordered[count - 1], params.min_p * weights.max())
    mass = np.where(weights >= least, weights, 0.0).cumsum()
    target = point * mass[-1]
    chosen = int(np.searchsorted(mass, target, side="right"))
    edges = [mass[chosen] - target, target - (mass[chosen - 1] if chosen else 0.0)]
    return chosen, min(edges) / mass[-1]


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.sampled_from(SIZES),
    spread=st.sampled_from([0.3, 3.0, 8.0]),
    top_k=st.sampled_from([0, 1, 40, 64, 500, 4_000, 60_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.01, 0.4]),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    point=st.floats(0.0, 0.999999),
)
def test_the_token_is_the_defined_one(
    vocabulary: int, spread: float, top_k: int, top_p: float, min_p: float, temperature: float, point: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = scores(vocabulary, spread)
    expected, distance = defined(row[0], params, point)
    found = int(draw(row, [params], [point]))
    assert found == expected or distance < 1e-5  # float32 weights: a point on a border may fall to either side


def test_rows_of_all_kinds_in_one_batch_draw_as_they_do_alone() -> None:
    kinds = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.95),  # most of a flat row: the whole vocabulary is sorted
        SamplingParams(temperature=0.7, top_k=50),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.0, typical_p=0.5),
    ] * 10
    points = [((7 * i) % 50) / 50 for i in range(50)]
    rows = torch.cat((scores(50_257, 0.5, 25), scores(50_257, 6.0, 25, seed=1)))
    together = draw(rows, kinds, points).tolist()
    assert together == [int(draw(rows[i : i + 1], [kinds[i]], [points[i]])) for i in range(50)]


def test_tokens_as_likely_as_the_last_one_kept_stay() -> None:
    row = torch.zeros(1, 3_000)
    row[0, 100:110] = 5.0
    params = SamplingParams(temperature=1.0, top_k=3)
    found = Counter(draw(row.expand(200, -1), [params] * 200, [i / 200 for i in range(200)]).tolist())
    assert set(found) == set(range(100, 110))


def test_what_is_ruled_out_is_not_drawn_even_at_the_ends() -> None:
    row = torch.full((1, 1_000), float("-inf"))
    row[0, [300, 700]] = 0.0
    found = draw(row.expand(3, -1), [SamplingParams(temperature=1.0)] * 3, [0.0, 0.49999, 1 - 2**-53]).tolist()
    assert found == [300, 300, 700]


@pytest.mark.parametrize("size", [1, 64, 1_024, 5_000])
def test_highest_are_the_highest_in_order(size: int) -> None:
    rows = scores(50_257, 1.0, 3).round(decimals=2)  # with many equals
    rows[1] = float("-inf")
    rows[1, 5] = 0.0
    assert torch.equal(highest(rows, size), rows.sort(dim=-1, descending=True).values[:, :size])


def test_top_k_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value fetched from a GPU would keep the host from preparing the next step."""

    def fetched(_: Tensor) -> None:
        raise AssertionError("the host waits")

    monkeypatch.setattr(Tensor, "tolist", fetched)
    params = [SamplingParams(temperature=1.0, top_k=k, top_p=p) for k, p in ((20, 0.95), (5, 1.0), (1500, 0.5))]
    logits = torch.randn(4, 2000)
    draw(logits, [*params, SamplingParams(temperature=0.7, min_p=0.1)], [0.1, 0.5, 0.9, 0.3])
    with pytest.raises(AssertionError, match="waits"):
        draw(logits[:1], [SamplingParams(temperature=1.0, top_p=0.9)], [0.5])
