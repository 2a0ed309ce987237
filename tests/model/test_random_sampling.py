"""Random sampling over real vocabulary sizes against its definition: one row, fully sorted, in float64."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from itertools import product
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.matrix import rest_is_slow
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.sampling import random_sampling
from triptych.model.sampling.random_sampling import LIKELIEST_PARTS, likeliest, sample_rows, sorted_top
from triptych.model.sampling.sampler import SamplingRow, sample
from triptych.model.system import fallbacks

SIZES = [1, 7, 300, 5_000, 50_257]  # below a block, below and above the short heads, a real one


def scores(vocabulary: int, spread: float, rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def defined(row: Tensor, params: SamplingParams, point: float) -> tuple[int, float]:
    """Return the token at `point` of the kept distribution, in the vocabulary's order, and the distance to a border."""
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
    found = int(sample_rows(row, [params], [point]))
    assert found == expected or distance < 1e-5  # float32 weights: a point on a border may fall to either side


def test_rows_of_all_kinds_in_one_batch_draw_as_they_do_alone() -> None:
    kinds = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.95),  # most of a flat row: the whole vocabulary is sorted
        SamplingParams(temperature=0.7, top_k=50),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.0, typical_p=0.5),
        SamplingParams(temperature=1.0, top_n_sigma=3.0, top_p=0.9),
    ] * 9
    uniforms = [((7 * i) % 54) / 54 for i in range(54)]
    rows = torch.cat((scores(50_257, 0.5, 27), scores(50_257, 6.0, 27, seed=1)))
    together = sample_rows(rows, kinds, uniforms).tolist()
    assert together == [int(sample_rows(rows[i : i + 1], [kinds[i]], [uniforms[i]])) for i in range(54)]


@pytest.mark.parametrize(("epsilon", "eta"), [(0.002, 0.0), (0.0, 0.004), (0.001, 0.01), (0.9, 0.0), (0.0, 0.9)])
@pytest.mark.parametrize("spread", [0.3, 3.0, 8.0])
def test_cutoffs_leave_what_they_leave_in_transformers(epsilon: float, eta: float, spread: float) -> None:
    from transformers.generation.logits_process import EpsilonLogitsWarper, EtaLogitsWarper, TopKLogitsWarper

    row, ids = scores(300, spread), torch.tensor([[1]])
    theirs = TopKLogitsWarper(200)(ids, row)
    theirs = EpsilonLogitsWarper(epsilon)(ids, theirs) if epsilon else theirs
    theirs = EtaLogitsWarper(eta)(ids, theirs) if eta else theirs
    left = set(theirs[0].isfinite().nonzero()[:, 0].tolist())
    params = SamplingParams(temperature=1.0, top_k=200, epsilon_cutoff=epsilon, eta_cutoff=eta)
    points = theirs[0].softmax(-1).double().cumsum(-1)[sorted(left)]  # where each token's interval ends
    middles = (points - theirs[0].softmax(-1).double()[sorted(left)] / 2).tolist()
    assert sample_rows(row.expand(len(left), -1), [params] * len(left), middles).tolist() == sorted(left)
    assert len(left) < 200 or spread < 1


@pytest.mark.parametrize("top_p", [1.0, 0.6])
@pytest.mark.parametrize(
    ("n", "temperature"), [(0.5, 1.0), (1.0, 1.0), (1.0, 4.0), (1.5, 0.7), (-1.0, 1.0), (0.0, 1.0)]
)
def test_top_n_sigma_keeps_the_largest_logits_by_their_deviation(n: float, temperature: float, top_p: float) -> None:
    row = scores(300, 2.0)
    row[0, [3, 77]] = float("-inf")  # banned tokens are not among the logits
    finite = row[0][row[0].isfinite()].double().numpy()
    left = row[0].double().numpy() >= (finite.max() - n * finite.std() if n > 0 else finite.min())
    weights = np.where(left, np.exp((row[0].double().numpy() - finite.max()) / temperature), 0.0)
    order = np.argsort(-weights, kind="stable")
    mass = weights[order].cumsum() / weights.sum()
    kept = sorted(order[: int((mass < top_p).sum()) + 1 if top_p < 1 else int(left.sum())].tolist())
    ends = weights[kept].cumsum() / weights[kept].sum()  # where each token's interval ends
    middles = (ends - weights[kept] / weights[kept].sum() / 2).tolist()
    params = SamplingParams(temperature=temperature, top_n_sigma=n, top_p=top_p)
    assert sample_rows(row.expand(len(kept), -1), [params] * len(kept), middles).tolist() == kept
    assert (len(kept) == 298) == (n <= 0 and top_p == 1)


def test_tokens_as_likely_as_the_last_one_kept_stay() -> None:
    row = torch.zeros(1, 3_000)
    row[0, 100:110] = 5.0
    params = SamplingParams(temperature=1.0, top_k=3)
    found = Counter(sample_rows(row.expand(200, -1), [params] * 200, [i / 200 for i in range(200)]).tolist())
    assert set(found) == set(range(100, 110))


def test_what_is_ruled_out_is_not_drawn_even_at_the_ends() -> None:
    row = torch.full((1, 1_000), float("-inf"))
    row[0, [300, 700]] = 0.0
    found = sample_rows(row.expand(3, -1), [SamplingParams(temperature=1.0)] * 3, [0.0, 0.49999, 1 - 2**-53]).tolist()
    assert found == [300, 300, 700]


@pytest.mark.parametrize("size", [1, 64, 1_024, 5_000])
def test_sorted_top_is_descending(size: int) -> None:
    rows = scores(50_257, 1.0, 3).round(decimals=2)  # with many equals
    rows[1] = float("-inf")
    rows[1, 5] = 0.0
    assert torch.equal(sorted_top(rows, size), rows.sort(dim=-1, descending=True).values[:, :size])


def test_top_k_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value fetched from a GPU would delay the host in preparing the next step."""

    def fetched(_: Tensor) -> None:
        raise AssertionError("the host waits")

    monkeypatch.setattr(Tensor, "tolist", fetched)
    params = [SamplingParams(temperature=1.0, top_k=k, top_p=p) for k, p in ((20, 0.95), (5, 1.0), (1500, 0.5))]
    logits = torch.randn(4, 2000)
    sample_rows(logits, [*params, SamplingParams(temperature=0.7, min_p=0.1)], [0.1, 0.5, 0.9, 0.3])
    with pytest.raises(AssertionError, match="waits"):
        sample_rows(logits[:1], [SamplingParams(temperature=1.0, top_p=0.9)], [0.5])


class TestKernel:
    """The Triton kernel in the interpreter against `sample_rows`."""

    pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

    @staticmethod
    def drawn(rows: Tensor, params: list[SamplingParams], uniforms: list[float]) -> list[int]:
        from triptych.model.sampling.triton_sampling import launch_sampling

        tokens = torch.full((len(rows),), -1)
        launch_sampling(rows, tokens, range(len(rows)), params, uniforms)
        return tokens.tolist()

    @pytest.mark.parametrize("vocabulary", [7, 300, 5000])
    @pytest.mark.parametrize("spread", [0.3, 8.0])
    def test_it_draws_the_same_tokens(self, vocabulary: int, spread: float) -> None:
        every = {300: 3, 7: 3, 5000: 5}[vocabulary]  # the interpreter takes 70 ms for a row
        cuts = list(product((0, 1, 40, 60_000), (1.0, 0.9), (0.0, 0.1)))[::every]
        chance = Random(vocabulary)
        params = [
            SamplingParams(temperature=chance.choice([0.5, 1.0, 1.7]), top_k=k, top_p=p, min_p=m) for k, p, m in cuts
        ]
        uniforms = [chance.random() for _ in cuts]
        rows = scores(vocabulary, spread, len(cuts))
        if spread > 1:
            rows = rows.bfloat16()  # with equal values among them
        assert self.drawn(rows, params, uniforms) == sample_rows(rows.float(), params, uniforms).tolist()

    ROWS: ClassVar = {
        "ties": [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, -2.0, 1.0],
        "banned": [float("-inf")] * 3 + [0.25, float("-inf"), 0.25, 3.0],
        "equal": [0.0] * 9,
        "one left": [float("-inf")] * 2 + [5.0],
        "far apart": [-1e4, 0.0, -1e4, -90.0, -1e-30, -104.0],
        "close": [1e-3 * i for i in range(50)],
        "extreme": [1e38, -1e38, 0.0],
    }
    CUTS: ClassVar = [
        *({}, {"top_k": 5, "top_p": 0.9}),
        *({"top_k": 1}, {"top_k": 2}, {"top_p": 0.5}, {"top_p": 1e-6}, {"min_p": 0.7}),
    ]
    EACH: ClassVar = rest_is_slow(
        product(ROWS, CUTS),
        lambda name, cut: (
            name == "ties"
            or cut == {"top_k": 5, "top_p": 0.9}
            or (name, cut) in (("banned", {}), ("banned", {"min_p": 0.7}), ("far apart", {}))
        ),
    )

    @pytest.mark.parametrize(("name", "cut"), EACH, ids=str)
    def test_it_keeps_what_is_as_likely(self, name: str, cut: dict[str, Any]) -> None:
        uniforms = [0.0, 1 - 2**-53]  # the first and the last of what is kept
        params = [SamplingParams(temperature=1.0, **cut)] * len(uniforms)
        rows = torch.tensor([self.ROWS[name]] * len(uniforms))
        assert self.drawn(rows, params, uniforms) == sample_rows(rows, params, uniforms).tolist()

    def test_rows_among_others_are_filled_in_and_the_others_left_alone(self) -> None:
        from triptych.model.sampling.triton_sampling import launch_sampling

        rows = scores(300, 3.0, 9)
        tokens = torch.full((9,), -1)
        params = [SamplingParams(temperature=1.0, top_p=0.8), SamplingParams(temperature=0.7, top_k=5)]
        launch_sampling(rows, tokens, [7, 2], params, [0.4, 0.9])
        expected = sample_rows(rows[[7, 2]], params, [0.4, 0.9])
        assert tokens.tolist() == [-1, -1, int(expected[1]), -1, -1, -1, -1, int(expected[0]), -1]

    @pytest.mark.parametrize(
        ("rows", "vocabulary"),
        rest_is_slow(product(LIKELIEST_PARTS, (7, 5_000)), lambda rows, size: size == 7 or rows < max(LIKELIEST_PARTS)),
    )
    def test_it_finds_the_first_of_the_largest(self, rows: int, vocabulary: int) -> None:
        from triptych.model.sampling.triton_sampling import launch_greedy

        wide = scores(vocabulary + 3, 1.0, rows).bfloat16()[:, :vocabulary]  # with equal values, in longer rows
        for logits in (wide, -wide.abs(), torch.full_like(wide, float("-inf")), torch.zeros_like(wide)):
            tokens = torch.full((rows,), -1)
            launch_greedy(logits, tokens, LIKELIEST_PARTS[rows])
            assert tokens.tolist() == likeliest(logits).tolist()

    def test_minus_zero_is_as_large_as_zero(self) -> None:
        from triptych.model.sampling.triton_sampling import launch_greedy

        logits, tokens = torch.full((1, 5_000), -0.0), torch.full((1,), -1)
        logits[0, 3_000:] = 0.0
        launch_greedy(logits, tokens, 64)
        assert tokens.tolist() == [0]


class Kernel:
    """A fake of `triptych.model.sampling.triton_sampling` on a GPU."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.rows: list[list[int]] = []

    def covers(self, params: SamplingParams) -> bool:
        return params.typical_p >= 1.0

    def launch_sampling(self, logits: Tensor, tokens: Tensor, rows: list[int], *_: object) -> None:
        self.rows.append(rows)
        if self.error is not None:
            raise self.error
        tokens[torch.tensor(rows)] = 77


MIXED = [
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(),
    SamplingParams(temperature=1.0, typical_p=0.5),
    SamplingParams(temperature=1.0, top_k=3),
]


def test_a_gpu_draws_what_it_can_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    rows = [SamplingRow(params, 0, (1,), 1) for params in MIXED]
    logits = scores(100, 3.0, 4)
    alone = sample(logits, rows).tolist()
    monkeypatch.setattr(random_sampling, "_kernel", lambda device: kernel)
    assert sample(logits, rows).tolist() == [77, alone[1], alone[2], 77]
    assert kernel.rows == [[0, 3]]


def test_top_p_alone_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [SamplingRow(SamplingParams(temperature=1.0, top_p=0.9), 0, (1,), 1)] * 4
    logits = scores(5000, 3.0, 4)

    def waits(tensor: Tensor) -> None:
        raise AssertionError("the host waited")

    for name in ("tolist", "item", "cpu"):
        monkeypatch.setattr(Tensor, name, waits)
    with pytest.raises(AssertionError, match="the host waited"):
        sample(logits, rows)
    monkeypatch.setattr(random_sampling, "_kernel", lambda device: Kernel())
    sample(logits, rows)


def test_where_the_kernel_fails_tokens_are_drawn_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [SamplingRow(params, 0, (1,), 1) for params in MIXED]
    logits = scores(100, 3.0, 4)
    expected = sample(logits, rows)
    fallbacks.forget()
    kernel = Kernel(ValueError("ptxas is missing"))
    monkeypatch.setattr(random_sampling, "_kernel", lambda device: kernel)
    assert torch.equal(sample(logits, rows), expected)
    assert fallbacks.found() == ("tokens are drawn in many kernels: ptxas is missing",)
    monkeypatch.undo()
    monkeypatch.setattr(random_sampling, "has_triton", lambda device: True)
    assert random_sampling._kernel(torch.device("cuda")) is None  # and is not tried again
    fallbacks.forget()
    kernel.error = torch.OutOfMemoryError("for now")
    monkeypatch.setattr(random_sampling, "_kernel", lambda device: kernel)
    with pytest.raises(torch.OutOfMemoryError):
        sample(logits, rows)
    assert fallbacks.found() == ()
