"""Logits to tokens, over the whole batch; each row depends on nothing but its own request.

Order, as in the literature's usual chain: logit bias, repetition, presence and frequency penalties, bans and grammars,
temperature, top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024), typical-p, draw. Randomness is
counter-based: one uniform number for (seed, sequence, output position), so a token is the same whatever the neighbours
or the history of the process. Temperature 0 is argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.api.request import SamplingParams, TokenLogprob
from model.api.token_history import History
from model.sampling.random_sampling import sample_into
from model.sampling.top_k import top_k_logsumexp
from model.system.transfer import device_tensor, to_device

_MASK = (1 << 64) - 1
_FEW_BANS = 64  # that a list of candidates may be longer by


@dataclass(slots=True)  # made for every token: a frozen one takes thrice the time
class SamplingRow:
    """What one row of logits is sampled by."""

    params: SamplingParams
    index: int  # which of the request's n sequences
    token_ids: Sequence[int]  # prompt and output so far
    num_prompt_tokens: int
    banned_token_ids: Sequence[int] = ()
    forced_token_id: int | None = None  # the only one allowed
    allowed: NDArray[np.bool_] | None = None  # those that a grammar leaves, [V]; bans are counted in
    history: History | None = None  # of `token_ids`, where it is kept from step to step

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def past(self) -> History:
        return self.history if self.history is not None else History(self.num_prompt_tokens)


def uniform(seed: int, index: int, counter: int) -> float:
    """A number in [0, 1) of (seed, index, counter): three rounds of the splitmix64 finaliser (Steele et al. 2014)."""
    state = 0
    for word in (seed, index, counter):
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Token ids `[B]` of logits `[B, V]`, which are left as they are."""
    logits = _process(logits, rows)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if len(drawn) < len(rows):
        tokens = _largest(logits)
    else:
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    if drawn:
        chosen = [rows[i] for i in drawn]
        uniforms = [uniform(row.params.seed, row.index, row.num_output_tokens) for row in chosen]
        sample_into(tokens, logits, drawn, [row.params for row in chosen], uniforms)
    return tokens


def _largest(logits: Tensor) -> Tensor:
    """Where each row's largest is, the first of equals. For a row of 50,000 torch takes 20 times as long as numpy."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.float().numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _process(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Bias, penalties and bans of the rows that have any, on a float32 copy: a few scatters, however many rows.

    What is written where is put together on the host, so nothing waits for the device.
    """
    touched = [i for i, row in enumerate(rows) if _needs_processing(row)]
    if not touched:
        return logits
    logits, at, chosen = logits.to(torch.float32, copy=True), np.array(touched), [rows[i] for i in touched]
    if any(row.params.logit_bias for row in chosen):
        biases = [bias for row in chosen for bias in row.params.logit_bias.values()]
        _, where = _flat([tuple(row.params.logit_bias) for row in chosen], at, logits.device)
        logits[where] += device_tensor(biases, logits.device, torch.float32)
    if any(row.params.repetition_penalty != 1.0 for row in chosen):
        _repetition(logits, chosen, at)
    if any(row.params.presence_penalty or row.params.frequency_penalty for row in chosen):
        _presence_and_frequency(logits, chosen, at)
    if any(row.banned_token_ids for row in chosen):
        _, where = _flat([row.banned_token_ids for row in chosen], at, logits.device)
        logits[where] = float("-inf")
    _impose(logits, chosen, at)
    return logits


def _flat(
    lists: list[Sequence[int]], at: NDArray[np.int64], device: torch.device
) -> tuple[NDArray[np.int64], tuple[Tensor, Tensor]]:
    """For each token of the lists, its list, and its place in the logits; list `i` is of the logits' row `at[i]`."""
    lengths = [len(tokens) for tokens in lists]
    tokens = np.fromiter(chain.from_iterable(lists), np.int64, sum(lengths))
    of = np.repeat(np.arange(len(lists)), lengths)
    return of, (to_device(torch.from_numpy(at[of]), device), to_device(torch.from_numpy(tokens), device))


def _repetition(logits: Tensor, rows: Sequence[SamplingRow], at: NDArray[np.int64]) -> None:
    """What was seen becomes less likely by a factor (Keskar et al. 2019); what comes twice is written twice."""
    penal = [i for i, row in enumerate(rows) if row.params.repetition_penalty != 1.0]
    seen = [rows[i].past.seen(rows[i].token_ids) for i in penal]
    factors = np.array([rows[i].params.repetition_penalty for i in penal], dtype=np.float32)
    factor = to_device(torch.from_numpy(np.repeat(factors, [len(tokens) for tokens in seen])), logits.device)
    where = _places(logits, at[penal], seen)
    scores = logits.view(-1).index_select(0, where)
    logits.view(-1).scatter_(0, where, torch.where(scores > 0, scores / factor, scores * factor))


def _presence_and_frequency(logits: Tensor, rows: Sequence[SamplingRow], at: NDArray[np.int64]) -> None:
    """What the output has already costs a constant and a price for each time."""
    costly = [i for i, row in enumerate(rows) if row.params.presence_penalty or row.params.frequency_penalty]
    outputs = [rows[i].past.output(rows[i].token_ids) for i in costly]
    prices = [
        np.float32(rows[i].params.presence_penalty)
        + np.float32(rows[i].params.frequency_penalty) * output.counts.astype(np.float32)
        for i, output in zip(costly, outputs, strict=True)
    ]
    where = _places(logits, at[costly], [output.tokens for output in outputs])
    price = to_device(torch.from_numpy(np.concatenate(prices)), logits.device)
    logits.view(-1).scatter_(0, where, logits.view(-1).index_select(0, where) - price)


def _places(logits: Tensor, at: NDArray[np.int64], tokens: Sequence[NDArray[np.int64]]) -> Tensor:
    """Where tokens stand in flat logits, list `i` being of row `at[i]`: half the time of two indices."""
    width = logits.shape[1]
    flat = np.concatenate([row * width + found for row, found in zip(at, tokens, strict=True)])
    return to_device(torch.from_numpy(flat), logits.device)


def _impose(logits: Tensor, rows: Sequence[SamplingRow], at: NDArray[np.int64]) -> None:
    """What grammars leave, and the only token where one is forced, whatever a grammar says."""
    forced = [i for i, row in enumerate(rows) if row.forced_token_id is not None]
    limited = [i for i, row in enumerate(rows) if row.allowed is not None and row.forced_token_id is None]
    if limited:
        allowed = to_device(torch.from_numpy(np.stack([rows[i].allowed for i in limited])), logits.device)  # type: ignore[misc]
        where = to_device(torch.from_numpy(at[limited]), logits.device)
        logits[where] = logits[where].masked_fill(~allowed, float("-inf"))
    if forced:
        where = to_device(torch.from_numpy(at[forced]), logits.device)
        logits[where] = float("-inf")
        logits[where, device_tensor([rows[i].forced_token_id or 0 for i in forced], logits.device, torch.int64)] = 0.0


def _needs_processing(row: SamplingRow) -> bool:
    return bool(row.banned_token_ids) or _rescores(row)


def _rescores(row: SamplingRow) -> bool:
    """Whether more is done to the row's logits than banning some."""
    p = row.params
    penalties = p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty
    return bool(penalties or p.logit_bias or row.forced_token_id is not None or row.allowed is not None)


def logprobs_of(logits: Tensor, tokens: Tensor, top: Sequence[int]) -> list[TokenLogprob]:
    """Tokens `[N]` under the model's own distribution (logits `[N, V]`), each with the `top[i]` likeliest tokens of its
    row."""
    logits = logits.float()
    # The order is that of the logits, so no second table of them is made.
    values, ids, logsumexp = top_k_logsumexp(logits, max(top))
    chosen = (logits.gather(1, tokens[:, None]) - logsumexp)[:, 0]
    values = values - logsumexp
    ranked = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return [
        TokenLogprob(token, value, tuple(best[:count]))
        for token, value, best, count in zip(tokens.tolist(), chosen.tolist(), ranked, top, strict=True)
    ]


def top_candidates(logits: Tensor, rows: Sequence[SamplingRow], counts: Sequence[int]) -> list[list[tuple[int, float]]]:
    """For each beam of logits `[B, V]` its `counts[i]` likeliest tokens with their log-probabilities, best first.

    Bans and penalties act on log-probabilities, as they do in the reference library's beam search.
    """
    bans: list[set[int]] = [set(row.banned_token_ids) for row in rows]
    if any(map(_rescores, rows)) or max(map(len, bans)) > _FEW_BANS:
        _, _, logsumexp = top_k_logsumexp(logits, 1)
        values, tokens, _ = top_k_logsumexp(_process(logits - logsumexp, rows), max(counts))
        bans = [set() for _ in rows]  # they have come last
    else:  # what is banned is left out of a longer list, without a second table of the vocabulary's size
        values, tokens, logsumexp = top_k_logsumexp(logits, max(counts) + max(map(len, bans)))
        values = values - logsumexp
    return [
        [(token, value) for token, value in zip(ids, found, strict=True) if token not in banned][:count]
        for ids, found, banned, count in zip(tokens.tolist(), values.tolist(), bans, counts, strict=True)
    ]
