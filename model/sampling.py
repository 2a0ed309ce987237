"""Logits to tokens, over the whole batch; each row depends on nothing but its own request.

Order, as in the literature's usual chain: logit bias, repetition, presence and frequency penalties, bans and grammars,
temperature, top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024), typical-p, draw. Randomness is
counter-based: one uniform number for (seed, sequence, output position), so a token is the same whatever the neighbours
or the history of the process. Temperature 0 is argmax.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.drawing import draw
from model.request import SamplingParams, TokenLogprob

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row of logits is sampled by."""

    params: SamplingParams
    index: int  # which of the request's n sequences
    token_ids: Rows[int]  # prompt and output so far
    num_prompt_tokens: int
    banned_token_ids: Rows[int] = ()
    forced_token_id: int | None = None  # the only one allowed
    allowed: NDArray[np.bool_] | None = None  # those that a grammar leaves, [V]; bans are counted in

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


def uniform(seed: int, index: int, counter: int) -> float:
    """A number in [0, 1) of (seed, index, counter): three rounds of the splitmix64 finaliser (Steele et al. 2014)."""
    state = 0
    for word in (seed, index, counter):
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Rows[SamplingRow]) -> Tensor:
    """Token ids `[B]` of logits `[B, V]`, which are left as they are."""
    logits = _process(logits.float(), rows)
    tokens = logits.argmax(dim=-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        at = torch.tensor(drawn, device=logits.device)
        chosen = [rows[i] for i in drawn]
        points = [uniform(row.params.seed, row.index, row.num_output_tokens) for row in chosen]
        tokens[at] = draw(logits[at], [row.params for row in chosen], points)
    return tokens


def _process(logits: Tensor, rows: Rows[SamplingRow]) -> Tensor:
    """Bias, bans and penalties of the rows that have any, on a copy."""
    touched = [i for i, row in enumerate(rows) if _needs_processing(row)]
    if touched:
        logits = logits.clone()
    for i in touched:
        _process_row(logits[i], rows[i])
    masks = {i: rows[i].allowed for i in touched if rows[i].forced_token_id is None}
    limited = {i: mask for i, mask in masks.items() if mask is not None}
    if limited:
        allowed = torch.from_numpy(np.stack(list(limited.values()))).to(logits.device)
        at = torch.tensor(list(limited), device=logits.device)
        logits[at] = logits[at].masked_fill(~allowed, float("-inf"))
    return logits


def _needs_processing(row: SamplingRow) -> bool:
    p = row.params
    penalties = p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty
    imposed = row.banned_token_ids or row.forced_token_id is not None or row.allowed is not None
    return bool(penalties or p.logit_bias or imposed)


def _process_row(logits: Tensor, row: SamplingRow) -> None:
    params, device = row.params, logits.device
    if params.logit_bias:
        logits[torch.tensor(list(params.logit_bias), device=device)] += torch.tensor(
            list(params.logit_bias.values()), device=device
        )
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(row.token_ids, dtype=torch.int64, device=device).unique()
        scores = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / factor, scores * factor)
    if row.num_output_tokens and (params.presence_penalty or params.frequency_penalty):
        used, counts = torch.tensor(row.token_ids[row.num_prompt_tokens :], device=device).unique(return_counts=True)
        logits[used] -= params.presence_penalty + params.frequency_penalty * counts
    if row.banned_token_ids:
        logits[torch.tensor(list(row.banned_token_ids), device=device)] = float("-inf")
    if row.forced_token_id is not None:
        logits.fill_(float("-inf"))[row.forced_token_id] = 0.0


def logprobs_of(logits: Tensor, tokens: Tensor, top: Rows[int]) -> list[TokenLogprob]:
    """Tokens `[N]` under the model's own distribution (logits `[N, V]`), each with the `top[i]` likeliest."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(max(max(top), 1), logprobs.shape[1]), dim=-1)
    ranked = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return [
        TokenLogprob(token, value, tuple(best[:count]))
        for token, value, best, count in zip(tokens.tolist(), chosen, ranked, top, strict=True)
    ]


def likeliest(logits: Tensor, rows: Rows[SamplingRow], counts: Rows[int]) -> list[list[tuple[int, float]]]:
    """For each beam of logits `[B, V]` its `counts[i]` likeliest tokens with their log-probabilities, best first.

    Bans and penalties act on log-probabilities, as they do in the reference library's beam search.
    """
    count = min(max(counts), logits.shape[1])
    if any(map(_needs_processing, rows)):
        values, tokens = _process(logits.float().log_softmax(dim=-1), rows).topk(count, dim=-1)
    else:  # the same order, without a second table of the vocabulary's size
        logits = logits.float()
        values, tokens = logits.topk(count, dim=-1)
        values = values - logits.logsumexp(dim=-1, keepdim=True)
    return [
        list(zip(ids[:count], found[:count], strict=True))
        for ids, found, count in zip(tokens.tolist(), values.tolist(), counts, strict=True)
    ]
