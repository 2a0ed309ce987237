"""The sampler against a row-by-row reference, the logits processors of `transformers`, and statistical expectations."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from triptych.model.api.sampling_params import SamplingParams
from triptych.model.sampling.sampler import SamplingRow, sample, token_logprobs, uniform

V = 40
INFINITY = float("inf")


def row(params: SamplingParams, *, prompt=(), output=(), banned=(), index: int = 0) -> SamplingRow:  # type: ignore[no-untyped-def]
    return SamplingRow(params, index, [*prompt, *output], len(prompt), banned)


def logits(seed: int = 0, rows: int = 1) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2


def support(scores: Tensor, params: SamplingParams) -> dict[int, float]:
    """Return the probabilities of the tokens by the definitions, one row at a time."""
    scaled = scores.double().numpy() / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    kept = list(order[: params.top_k or V])
    mass, total, nucleus = 0.0, sum(probs[i] for i in kept), []
    for i in kept:
        if nucleus and mass >= params.top_p * total:
            break
        nucleus.append(i)
        mass += probs[i]
    kept = [i for i in nucleus if probs[i] >= params.min_p * probs[order[0]]]
    total = sum(probs[i] for i in kept)
    return {int(i): float(probs[i] / total) for i in kept}


GRID = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.5, top_k=5),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=1.0, top_p=0.01),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=1.3, top_k=12, top_p=0.8, min_p=0.05),
]


def draws(scores: Tensor, params: SamplingParams, count: int) -> Counter[int]:
    rows = [row(replace(params, seed=seed)) for seed in range(count)]
    return Counter(sample(scores.expand(count, V), rows).tolist())


@pytest.mark.parametrize("params", GRID, ids=str)
def test_draws_have_the_defined_support_and_distribution(params: SamplingParams) -> None:
    scores, count = logits(3)[0], 4000
    expected, found = support(scores, params), draws(scores, params, count)
    assert found.keys() <= expected.keys()
    common = {token: p for token, p in expected.items() if p * count >= 5}
    assert common.keys() <= found.keys()
    chi_square = sum((found[token] - p * count) ** 2 / (p * count) for token, p in common.items())
    freedom = max(len(common) - 1, 1)
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 1  # about five standard deviations; seeds are fixed


def test_greedy_is_argmax_whatever_the_other_settings() -> None:
    scores = logits(1, rows=6)
    rows = [row(SamplingParams(top_k=3, top_p=0.5, seed=seed)) for seed in range(6)]
    assert torch.equal(sample(scores, rows), scores.argmax(-1))


def test_sampling_leaves_the_logits_as_they_are() -> None:
    scores = logits(1, rows=2)
    before = scores.clone()
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0, logit_bias={1: 5.0})
    sample(scores, [row(params, prompt=[1, 2], banned=[3]), row(params)])
    assert torch.equal(scores, before)


def test_the_same_row_alone_or_in_a_crowd_gives_the_same_token() -> None:
    settings_ = [
        *GRID,
        SamplingParams(),
        SamplingParams(temperature=0.9, repetition_penalty=1.5, presence_penalty=0.3),
        SamplingParams(logit_bias={4: 100.0}),
    ]
    rows = [row(replace(p, seed=i), prompt=[1, 2, 3], output=[5, 5, i], index=i % 3) for i, p in enumerate(settings_)]
    scores = logits(7, rows=len(rows))
    crowd = sample(scores, rows).tolist()
    alone = [sample(scores[i : i + 1], [rows[i]]).item() for i in range(len(rows))]
    assert crowd == alone
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = sample(scores[order], [rows[i] for i in order]).tolist()
    assert shuffled == [crowd[i] for i in order]


@pytest.mark.parametrize("change", [{"seed": 1}, {"index": 1}, {"output": [0]}])
def test_seed_sequence_and_position_each_change_the_draw(change: dict[str, object]) -> None:
    params = SamplingParams(temperature=1.0)
    flat = torch.zeros(64, V)
    seeds = [replace(params, seed=100 * i) for i in range(64)]
    base = sample(flat, [row(p) for p in seeds])
    if "seed" in change:
        other = sample(flat, [row(replace(p, seed=p.seed + 1)) for p in seeds])
    else:
        other = sample(flat, [row(p, **change) for p in seeds])
    assert (base == other).float().mean() < 0.2


class TestPenaltiesAgainstTransformers:
    PROMPT, OUTPUT = [3, 4, 4, 9], [5, 5, 7]

    def processed(self, params: SamplingParams) -> Tensor:
        """Return our processed scores, read from greedy choices between pairs of tokens."""
        from triptych.model.sampling.sampler import process_logits

        return process_logits(logits(2), [row(params, prompt=self.PROMPT, output=self.OUTPUT)])

    @pytest.mark.parametrize("penalty", [1.3, 0.7])
    def test_repetition(self, penalty: float) -> None:
        from transformers import RepetitionPenaltyLogitsProcessor

        theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([self.PROMPT + self.OUTPUT]), logits(2))
        torch.testing.assert_close(self.processed(SamplingParams(repetition_penalty=penalty)), theirs)

    def test_presence_and_frequency_count_the_output_only(self) -> None:
        expected = logits(2)
        expected[0, 5] -= 0.5 + 2 * 0.25
        expected[0, 7] -= 0.5 + 0.25
        params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
        torch.testing.assert_close(self.processed(params), expected)

    def test_bias_is_added_before_repetition(self) -> None:
        from transformers import RepetitionPenaltyLogitsProcessor

        biased = logits(2)
        biased[0, 4] += 3.0
        theirs = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([self.PROMPT + self.OUTPUT]), biased)
        ours = self.processed(SamplingParams(logit_bias={4: 3.0}, repetition_penalty=1.5))
        torch.testing.assert_close(ours, theirs)

    @pytest.mark.parametrize(
        ("params", "warper"),
        [
            (SamplingParams(temperature=1.0, top_k=7), "TopKLogitsWarper(7)"),
            (SamplingParams(temperature=1.0, top_p=0.8), "TopPLogitsWarper(0.8)"),
            (SamplingParams(temperature=1.0, min_p=0.1), "MinPLogitsWarper(0.1)"),
        ],
    )
    def test_supports(self, params: SamplingParams, warper: str) -> None:
        import transformers

        name, value = warper.rstrip(")").split("(")
        kept = getattr(transformers, name)(float(value) if "." in value else int(value))(None, logits(2))
        assert support(logits(2)[0], params).keys() == set(kept[0].isfinite().nonzero()[:, 0].tolist())


def processed_row_by_row(scores: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Apply bias, penalties, bans and grammars by the definitions, one row and one token at a time."""
    scores = scores.clone()
    for i, one in enumerate(rows):
        p = one.params
        for token, bias in p.logit_bias.items():
            scores[i, token] += bias
        window = one.token_ids[-p.penalty_window :] if p.penalty_window else None
        seen = one.token_ids if window is None else window
        for token in set(seen) if p.repetition_penalty != 1.0 else ():
            score, factor = scores[i, token], torch.tensor(p.repetition_penalty)
            scores[i, token] = score / factor if score > 0 else score * factor
        counted = one.token_ids[one.num_prompt_tokens :] if window is None else window
        for token, count in Counter(counted).items():
            frequency = torch.tensor(p.frequency_penalty) * torch.tensor(float(count))
            scores[i, token] -= torch.tensor(p.presence_penalty) + frequency
        for token in one.banned_token_ids:
            scores[i, token] = -INFINITY
        if one.forced_token_id is not None:
            scores[i] = -INFINITY
            scores[i, one.forced_token_id] = 0.0
        elif one.allowed is not None:
            scores[i, torch.from_numpy(~one.allowed)] = -INFINITY
    return scores


token_ids = st.lists(st.integers(0, V - 1), max_size=12)
imposed_rows = st.builds(
    lambda params, prompt, output, banned, forced, allowed: SamplingRow(
        params, 0, prompt + output, len(prompt), tuple(banned), forced, allowed
    ),
    st.builds(
        SamplingParams,
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
        presence_penalty=st.sampled_from([0.0, 0.4, -0.3]),
        frequency_penalty=st.sampled_from([0.0, 0.1, -0.7]),
        penalty_window=st.sampled_from([0, 0, 1, 3, 100]),
        logit_bias=st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100, width=32), max_size=4),
    ),
    token_ids,
    token_ids,
    st.lists(st.integers(0, V - 1), max_size=4),
    st.none() | st.integers(0, V - 1),
    st.none() | st.lists(st.booleans(), min_size=V, max_size=V).map(np.array),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.just(SamplingRow(SamplingParams(), 0, [1], 1)) | imposed_rows, min_size=1, max_size=6))
def test_batch_processing_equals_row_processing_bit_for_bit(rows: list[SamplingRow]) -> None:
    from triptych.model.sampling.sampler import process_logits

    scores = logits(11, rows=len(rows))
    before = scores.clone()
    assert torch.equal(process_logits(scores, rows), processed_row_by_row(scores, rows))
    assert torch.equal(scores, before)


def test_logprobs_are_the_same_alone_and_among_others() -> None:
    """With several threads torch's own sum over a single row of this length differs."""
    scores = torch.randn(64, 50_257, generator=torch.Generator().manual_seed(0))
    tokens, top = torch.arange(64), [i % 5 for i in range(64)]
    crowd = token_logprobs(scores, tokens, top)
    alone = [token_logprobs(scores[i : i + 1], tokens[i : i + 1], [top[i]])[0] for i in range(64)]
    assert crowd == alone
    assert [len(found.top) for found in crowd] == top


def test_banned_tokens_are_never_drawn() -> None:
    scores = logits(3)
    banned = scores[0].argsort(descending=True)[: V - 2].tolist()
    hot = [row(SamplingParams(temperature=5.0, seed=seed), banned=banned) for seed in range(200)]
    drawn = set(sample(scores.expand(200, V), hot).tolist())
    assert drawn == set(range(V)) - set(banned)
    greedy = sample(scores, [row(SamplingParams(logit_bias={banned[0]: 1e4}), banned=banned)])
    assert greedy.item() not in banned


def test_logprobs_are_the_models_own_distribution_best_first() -> None:
    scores, tokens = logits(5, rows=3), torch.tensor([4, 0, 11])
    expected = scores.log_softmax(-1)
    for i, found in enumerate(token_logprobs(scores, tokens, [0, 3, V + 5])):
        assert found.token_id == tokens[i]
        assert found.logprob == pytest.approx(expected[i, tokens[i]].item())
        assert len(found.top) == (0, 3, V)[i]
        values = [value for _, value in found.top]
        assert values == sorted(values, reverse=True)
        assert all(value == pytest.approx(expected[i, token].item()) for token, value in found.top)
    assert found.top[0][0] == scores[2].argmax()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(0, 10**6))
def test_uniform_is_a_function_into_the_unit_interval(seed: int, index: int, counter: int) -> None:
    value = uniform(seed, index, counter)
    assert 0 <= value < 1
    assert value == uniform(seed, index, counter)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_uniform_numbers_are_uniform_and_uncorrelated_along_each_argument(axis: int) -> None:
    count = 4096
    words = [[7, 7, 7] for _ in range(count)]
    for at, word in enumerate(words):
        word[axis] = at
    values = np.array([uniform(*word) for word in words])
    assert len(set(values)) == count
    histogram = np.histogram(values, bins=16, range=(0, 1))[0]
    assert (((histogram - count / 16) ** 2) / (count / 16)).sum() < 45  # 15 degrees of freedom
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.06


def test_arguments_of_uniform_are_not_interchangeable() -> None:
    assert len({uniform(*words) for words in [(1, 2, 3), (3, 2, 1), (2, 1, 3), (1, 3, 2), (6, 0, 0)]}) == 5


@pytest.mark.parametrize("share", [0.05, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("top_k", [0, 9])
def test_typical_sampling_keeps_what_transformers_keeps(share: float, top_k: int) -> None:
    from transformers import TopKLogitsWarper, TypicalLogitsWarper

    scores = logits(3, rows=6)
    expected = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    expected = TypicalLogitsWarper(mass=share)(None, expected).softmax(-1)
    for at in range(len(scores)):
        params = [SamplingParams(temperature=1.0, typical_p=share, top_k=top_k, seed=seed) for seed in range(400)]
        drawn = sample(scores[at].expand(400, V), [row(one) for one in params])
        kept = set(expected[at].nonzero()[:, 0].tolist())
        assert set(drawn.tolist()) <= kept
        likely = {token for token in kept if expected[at, token] > 0.05}
        assert likely <= set(drawn.tolist())
