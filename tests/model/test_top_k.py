"""Top-k and logsumexp of logits, by the native kernel and by torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from triptych.model.api.sampling_params import SamplingParams
from triptych.model.native.library import Library, native
from triptych.model.sampling import sampler
from triptych.model.sampling.sampler import SamplingRow, top_candidates, top_k_logsumexp

INF = float("inf")


@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with both implementations."""
    library = native()
    if request.param == "native" and not isinstance(library, Library):
        pytest.skip(library)
    monkeypatch.setattr(sampler, "loaded", lambda: library if request.param == "native" else None)
    return str(request.param)


def logits_of(rows: int, size: int) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(size)) * 4


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [1, 5, 16, 127, 128, 129, 1000, 50265])
@pytest.mark.parametrize("count", [0, 1, 4, 37, 256, 300])
def test_top_k_is_ordered_and_logsumexp_is_exact(size: int, count: int) -> None:
    logits = logits_of(3, size)
    values, tokens, logsumexp = top_k_logsumexp(logits, count)
    expected = logits.sort(dim=-1, descending=True)
    assert torch.equal(values, expected.values[:, :count])
    assert torch.equal(tokens, expected.indices[:, :count])
    torch.testing.assert_close(logsumexp.double(), logits.double().logsumexp(dim=-1, keepdim=True), atol=2e-6, rtol=0)


@pytest.mark.usefixtures("way")
def test_a_row_is_ranked_the_same_alone_to_the_last_bit() -> None:
    logits = logits_of(64, 5003)
    logits[5, 77] = float("nan")
    crowd = top_k_logsumexp(logits, 300)
    for i in (*range(5), *range(6, 64)):
        for of_all, alone in zip(crowd, top_k_logsumexp(logits[i : i + 1], 9), strict=True):
            assert torch.equal(of_all[i : i + 1, :9], alone)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("place", [0, 127, 128, 700, 999])
def test_what_is_impossible_comes_last_and_adds_nothing(place: int) -> None:
    logits = torch.full((2, 1000), -INF)
    logits[:, place] = torch.tensor([3.0, -200.0])
    values, tokens, logsumexp = top_k_logsumexp(logits, 3)
    assert tokens[:, 0].tolist() == [place, place]
    assert values[:, 0].tolist() == logsumexp[:, 0].tolist() == [3.0, -200.0]
    assert values[:, 1:].eq(-INF).all()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("count", [5, 256, 300])
def test_of_equals_the_first_comes_first(count: int) -> None:
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(0)).round()
    logits[3, 9] = float("nan")
    values, tokens, _ = top_k_logsumexp(logits, count)
    expected = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(tokens, expected.indices[:, :count])
    assert torch.equal(values.nan_to_num(), expected.values[:, :count].nan_to_num())


@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.parametrize("at", [0, 150, 999])
def test_what_is_not_a_number_is_ranked_as_torch_does(bad: float, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(2, 1000)
    logits[1, at] = bad
    native()
    found = top_k_logsumexp(logits, 4)
    monkeypatch.setattr(sampler, "loaded", lambda: None)
    for one, expected in zip(found, top_k_logsumexp(logits, 4), strict=True):
        torch.testing.assert_close(one, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("few", [3, 70])
def test_banned_tokens_are_no_candidates_and_cost_the_others_nothing(few: int) -> None:
    logits = logits_of(2, 400)
    order = logits.argsort(dim=-1, descending=True).tolist()
    bans = [tuple(order[0][:few]), ()]
    rows = [SamplingRow(SamplingParams(num_beams=4), 0, (1, 2), 2, ban) for ban in bans]
    first, second = top_candidates(logits, rows, [8, 6])
    possible = [(token, value) for token, value in first.tokens if value > -INF]
    assert [token for token, _ in possible] == order[0][few : few + 8]
    assert [token for token, _ in second.tokens] == order[1][:6]
    logprobs = logits.log_softmax(dim=-1)
    for row, found in enumerate((possible, second.tokens)):
        expected = [logprobs[row, token].item() for token, _ in found]
        assert [value for _, value in found] == pytest.approx(expected, abs=1e-5)


@pytest.mark.usefixtures("way")
def test_a_beams_candidates_are_the_same_beside_one_with_penalties() -> None:
    logits = logits_of(2, 5003)
    plain = SamplingRow(SamplingParams(num_beams=2), 0, (1, 2), 2)
    penal = SamplingRow(SamplingParams(num_beams=2, repetition_penalty=1.3), 0, (1, 2), 2)
    [alone] = top_candidates(logits[:1], [plain], [4])
    in_batch, _ = top_candidates(logits, [plain, penal], [4, 4])
    assert in_batch == alone
