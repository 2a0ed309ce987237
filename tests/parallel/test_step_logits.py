"""Ranks send of a row what its token is chosen from: the tokens are those that whole rows give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.support import request
from tests.model.checkpoints import loaded
from tests.parallel.ranks import load_rank, on_ranks
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.config.sharding import Shard
from triptych.model.engine import warmup
from triptych.model.engine.execution.step_logits import (
    BEST,
    CANDIDATES,
    NUM_CANDIDATES,
    WHOLE,
    StepLogits,
    candidate_columns,
    needed_rows,
    step_logits,
)
from triptych.model.engine.scheduling.scheduled_step import ScheduledSequence
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.parallel.group import Group
from triptych.model.sampling.random_sampling import LIKELIEST_PARTS
from triptych.model.sampling.sampler import SamplingRow, sample
from triptych.model.system.background_work import finish

VOCABULARY = 1531  # no multiple of a number of ranks

# Parameters, and what the sampler needs of their rows.
KINDS: list[tuple[dict[str, Any], int]] = [
    ({}, BEST),
    ({"top_k": 5, "top_p": 0.5}, BEST),  # greedy all the same
    ({"temperature": 1.0, "top_k": 1}, CANDIDATES),  # ties are drawn
    ({"temperature": 1.0, "top_k": 40}, CANDIDATES),
    ({"temperature": 0.7, "top_k": 128, "top_p": 0.9}, CANDIDATES),
    ({"temperature": 1.5, "top_k": 50, "min_p": 0.05}, CANDIDATES),
    ({"temperature": 1.0, "top_k": 20, "typical_p": 0.6}, CANDIDATES),
    ({"temperature": 1.0, "top_k": 30, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02}, CANDIDATES),
    ({"temperature": 1.0}, WHOLE),
    ({"temperature": 1.0, "top_p": 0.8}, WHOLE),
    ({"temperature": 1.0, "top_k": 129}, WHOLE),
    ({"logit_bias": {3: 50.0}}, WHOLE),
    ({"allowed_token_ids": (1, 2)}, WHOLE),
    ({"repetition_penalty": 1.2}, WHOLE),
    ({"frequency_penalty": 1.0}, WHOLE),
    ({"min_tokens": 3}, WHOLE),
    ({"suppress_tokens": (4,)}, WHOLE),
    ({"no_repeat_ngram_size": 2}, WHOLE),
    ({"logprobs": 0}, WHOLE),
    ({"cumulative_logprob": True}, WHOLE),
]


def params_of(settings: dict[str, Any], seed: int = 0) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 9, "seed": seed, **settings})


def step_of(settings: dict[str, Any], drafts: tuple[int, ...] = ()) -> ScheduledSequence:
    asked = request("llama", "r", 4, **settings)
    return ScheduledSequence(SequenceState.of(asked, 0, 0, ()), 0, 4 + len(drafts), encode_source=False, drafts=drafts)


def reduced(size: int, logits: Tensor, needed: bytes) -> list[StepLogits]:
    """Return what each of `size` ranks has of rows of logits after they were sent."""

    def work(group: Group) -> StepLogits:
        ranges = [Shard(rank, size).shard_range(logits.shape[1]) for rank in range(size)]
        model: Any = SimpleNamespace(
            linear=SimpleNamespace(collective=group),
            vocabulary=ranges,
            partial_logits=lambda hidden: logits[:, slice(*ranges[group.shard.rank])].contiguous(),
        )
        assert candidate_columns(model) == size * min(NUM_CANDIDATES, -(-logits.shape[1] // size))
        return step_logits(model, logits, needed)

    return on_ranks(size, work)


def check(size: int, logits: Tensor, kinds: list[tuple[dict[str, Any], int]]) -> None:
    """Compare the tokens of rows that `size` ranks reduced with those of whole rows, for some draws of each."""
    found, *_ = reduced(size, logits, bytes(kind for _, kind in kinds))
    for seed in range(5):
        rows = [SamplingRow(params_of(settings, seed), 0, (3, 4), 2) for settings, _ in kinds]
        tokens, processed = found.choose(rows)
        assert tokens.tolist() == sample(logits, rows).tolist()
        assert len(processed) == sum(kind == WHOLE for _, kind in kinds)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_reduced_rows_give_the_tokens_of_whole_rows(size: int) -> None:
    kinds = [one for one in KINDS if not {"min_tokens", "suppress_tokens"} & one[0].keys()] * 3
    logits = 3 * torch.randn(len(kinds), VOCABULARY, generator=torch.Generator().manual_seed(size))
    check(size, logits, kinds)
    check(size, logits[:6], KINDS[:6])  # no row is whole
    check(size, logits[:1], KINDS[:1])
    check(size, logits[:2], KINDS[3:5])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equal_logits_are_kept_together_and_the_first_is_the_best(dtype: torch.dtype) -> None:
    """Check rows of few distinct numbers: many tokens equal the best, and the last that top-k keeps."""
    kinds = [one for one in KINDS if one[1] != WHOLE] * 4
    generator = torch.Generator().manual_seed(5)
    logits = torch.randint(-6, 3, (len(kinds), 200), generator=generator).to(dtype)
    check(2, logits, kinds)
    check(3, torch.zeros_like(logits), kinds)


def test_a_small_vocabulary_is_divided_unevenly() -> None:
    kinds = [KINDS[0], KINDS[3], KINDS[0], KINDS[8]]
    check(3, torch.randn(4, 7, generator=torch.Generator().manual_seed(2)), kinds)


def test_whole_rows_keep_their_places() -> None:
    needed = bytes([BEST, WHOLE, CANDIDATES, WHOLE, WHOLE])
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(1))
    first, other = reduced(2, logits, needed)
    assert torch.equal(first.whole, logits[[1, 3, 4]])
    assert list(first.places([1, 4])) == [0, 2]
    assert torch.equal(first.without_last(1).whole, logits[[1, 3]])
    assert first.without_last(1).needed == needed[:4]
    assert not len(other.candidates)  # rank 0 alone draws


def test_a_row_that_is_not_known_is_sent_as_it_is() -> None:
    """Check NaN, which a broken model gives, and rows without any likely token."""
    logits = torch.zeros(3, 100)
    logits[0, 70] = torch.nan
    logits[1] = -torch.inf
    logits[2, :99] = -torch.inf
    found, *_ = reduced(2, logits, bytes([BEST] * 3))
    assert found.best.tolist() == [70, 0, 99]


@pytest.mark.parametrize(("settings", "kind"), KINDS, ids=str)
def test_what_is_needed_of_a_request(settings: dict[str, Any], kind: int) -> None:
    assert needed_rows([step_of(settings)], 0) == (bytes([kind]) if kind else b"")
    drafted = needed_rows([step_of({}), step_of(settings, (1, 2))], 2)
    assert drafted == bytes([BEST, kind, kind, kind, WHOLE, WHOLE])


def test_beams_and_prompts_that_go_on() -> None:
    searching = step_of({"num_beams": 2})
    searching.sequence.searching()
    assert needed_rows([step_of({}), searching], 0) == bytes([BEST, WHOLE])
    unfinished = ScheduledSequence(step_of({}).sequence, 0, 2, encode_source=False)
    assert needed_rows([unfinished], 1) == b""


def test_each_rank_compiles_the_reduction_of_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: set[tuple[int, int]] = set()
    monkeypatch.setattr(warmup, "likeliest", lambda logits: shapes.add(tuple(logits.shape)))
    assert finish(warmup.compile_own_kernels(loaded("llama-gqa"))) == 0
    launched = on_ranks(2, lambda group: finish(warmup.compile_own_kernels(load_rank("llama-gqa", group))))
    assert shapes == {(rows, columns) for rows in LIKELIEST_PARTS for columns in (48, 49)}
    assert launched == [len(LIKELIEST_PARTS)] * 2
