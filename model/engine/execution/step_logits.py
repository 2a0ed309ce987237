"""The logits of a step. Ranks of a split model send of a row only what rank 0 needs to choose its token.

A row is whole, or reduced: to its likeliest token (greedy requests), or to some candidates for top-k of each rank's
part of the vocabulary. The draw among candidates is the one among the whole row: what top-k removes counts for
nothing. Only of tokens that equal the k-th likeliest a rank sends no more than fit among its candidates.

Shapes: N rows, W of them whole, C with candidates; R ranks, K candidates of each; V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from triptych.model.engine.scheduling.scheduled_step import ScheduledSequence
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.network.transformer import Transformer
from triptych.model.sampling.random_sampling import likeliest
from triptych.model.sampling.sampler import (
    SamplingRow,
    change_scores,
    choose,
    process_logits,
    stable_top_k,
)
from triptych.model.system.devices import to_device

WHOLE, BEST, CANDIDATES = range(3)  # what the sampler needs of a row: a byte for each row of a plan
NUM_CANDIDATES = 256  # of each rank
MOST_TOP_K = 128  # the largest top-k for which candidates are sent: there is room for as many that equal the last
_NOTHING = torch.empty(0)


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The logits of a step on rank 0. Other ranks do not use theirs."""

    whole: Tensor  # [W, V] the whole rows, in order
    needed: bytes = b""  # of each row; empty: all are whole
    best: Tensor = _NOTHING  # the likeliest tokens of the rows that need no more
    candidates: Tensor = _NOTHING  # [C, R * K] logits in the vocabulary's order
    candidate_ids: Tensor = _NOTHING  # [C, R * K]

    def without_last(self, count: int) -> StepLogits:
        """Return all but the last `count` rows, which are whole."""
        if not count:
            return self
        return replace(self, whole=self.whole[:-count], needed=self.needed[:-count])

    def places(self, rows: Sequence[int]) -> Sequence[int]:
        """Return where rows that are whole are in `whole`."""
        if not self.needed:
            return rows
        place = np.cumsum(np.frombuffer(self.needed, np.uint8) == WHOLE) - 1
        found: list[int] = place[list(rows)].tolist()
        return found

    def choose(self, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor]:
        """Return a token for each row `[N]`, and the processed logits of the whole rows `[W, V]`."""
        if not self.needed:
            processed = process_logits(self.whole, rows)
            return choose(processed, rows), processed
        tokens, processed = torch.empty(len(rows), dtype=torch.int64, device=self.whole.device), self.whole
        whole, best, candidates = (_rows(self.needed, kind) for kind in (WHOLE, BEST, CANDIDATES))
        if len(best) == len(rows):
            return self.best, processed
        if len(whole):
            some = [rows[row] for row in whole]
            processed = process_logits(self.whole, some)
            tokens[self._on_device(whole)] = choose(processed, some)
        if len(best):
            tokens[self._on_device(best)] = self.best
        if len(candidates):
            drawn = choose(self.candidates, [rows[row] for row in candidates])
            tokens[self._on_device(candidates)] = self.candidate_ids.gather(1, drawn[:, None])[:, 0]
        return tokens, processed

    def _on_device(self, rows: NDArray[np.int64]) -> Tensor:
        return to_device(torch.from_numpy(rows), self.whole.device)


def needed_rows(steps: Sequence[ScheduledSequence], num_probed: int) -> bytes:
    """Return what the sampler needs of each row of a step's logits, the last `num_probed` of them whole.

    Empty: all rows whole.
    """
    needed = bytearray()
    for step in steps:
        if step.samples:
            needed.extend((_needed_of(step.sequence),) * (1 + len(step.drafts)))
    return bytes(needed) + bytes(num_probed) if any(needed) else b""


def _needed_of(sequence: SequenceState) -> int:
    params = sequence.params
    scored = params.logprobs is not None or params.cumulative_logprob or sequence.beams is not None
    if scored or not sequence.is_unconstrained or change_scores(params):
        return WHOLE
    if params.temperature <= 0:
        return BEST
    return CANDIDATES if 0 < params.top_k <= MOST_TOP_K else WHOLE


def step_logits(model: Transformer, hidden: Tensor, needed: bytes) -> StepLogits:
    """Return the logits of hidden states `[N, d]`; each rank of the model makes this call.

    `needed` has a byte for each row; if it is empty, all rows are whole.
    """
    collective = model.linear.collective
    if collective is None or not needed:
        return StepLogits(Transformer.logits(model, hidden))  # which sends nothing to other ranks
    part, (first, _) = model.partial_logits(hidden), model.vocabulary[collective.shard.rank]
    whole = _select(part, _rows(needed, WHOLE))
    if len(whole):
        whole = collective.concatenate(whole, model.vocabulary)
    sent: dict[int, Tensor] = {}  # [2, rows, count] of each kind of row that there is
    for kind, count in ((BEST, 1), (CANDIDATES, _num_candidates(model))):
        rows = _rows(needed, kind)
        if len(rows):
            sent[kind] = _likeliest(_select(part, rows), count, first)
    stacked = collective.stack(torch.cat([numbers.flatten() for numbers in sent.values()]))  # [R, numbers]
    if collective.shard.rank:
        return StepLogits(whole, needed)
    found = StepLogits(whole, needed)
    for (kind, own), numbers in zip(
        sent.items(), stacked.split([one.numel() for one in sent.values()], 1), strict=True
    ):
        bits, tokens = numbers.view(len(stacked), *own.shape).permute(1, 2, 0, 3).flatten(2)  # [2, rows, R * count]
        values = bits.view(torch.float32)
        if kind == BEST:
            rank = values.argmax(dim=-1, keepdim=True)  # of ranks with equal values the first
            found = replace(found, best=tokens.gather(1, rank)[:, 0].long())
        else:
            found = replace(found, candidates=values, candidate_ids=tokens.long())
    return found


def _likeliest(part: Tensor, count: int, first: int) -> Tensor:
    """Return the bits of the `count` highest logits of each row of `part`, and their ids, in the order of these.

    The shape is `[2, rows, count]`. The ids of `part` begin at `first`. A rank with fewer tokens fills up with -inf.
    """
    if count == 1:
        at = likeliest(part)[:, None]
    else:
        at = stable_top_k(part.float(), min(count, part.shape[1]))[1].sort(dim=-1).values
    values, ids = part.gather(1, at).float(), at + first  # float32 has all digits of other dtypes
    if (unused := count - at.shape[1]) > 0:
        values, ids = pad(values, (0, unused), value=-torch.inf), pad(ids, (0, unused))
    return torch.stack((values.view(torch.int32), ids.int()))


def candidate_columns(model: Transformer) -> int:
    """Return the number of columns of rows that are reduced to candidates; 0: the model has one rank."""
    return len(model.vocabulary) * _num_candidates(model) if model.linear.collective is not None else 0


def _num_candidates(model: Transformer) -> int:
    """Return how many candidates each rank sends of a row."""
    return min(NUM_CANDIDATES, max(last - first for first, last in model.vocabulary))


def _rows(needed: bytes, kind: int) -> NDArray[np.int64]:
    return np.flatnonzero(np.frombuffer(needed, np.uint8) == kind)


def _select(part: Tensor, rows: NDArray[np.int64]) -> Tensor:
    if len(rows) in (0, len(part)):
        return part[: len(rows)]
    return part[to_device(torch.from_numpy(rows), part.device)]
