"""The sampler turns a batch of logits into tokens; the result of a row depends only on its own request.

The steps are, in the literature's usual order: logit biases; penalties of the source's tokens and of repetition,
presence and frequency; the growing chance of an end; banned tokens, grammar masks and rules of timestamps;
temperature; top-n-sigma (Tang et al. 2024); top-k; top-p (Holtzman et al. 2020); min-p (Nguyen et al. 2024);
typical-p; cutoffs; sampling. Random numbers are counter-based: one uniform number for (seed, sequence index, output
position), independent of other rows and of earlier steps. Temperature 0 is argmax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.model.api.request import TokenLogprob
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.api.token_history import History
from triptych.model.native.library import loaded
from triptych.model.sampling.random_sampling import likeliest, sample_into
from triptych.model.system.devices import device_tensor, to_device

# -- Top-k and logsumexp of rows of logits; a logit minus its row's logsumexp is a log-probability. The result of a row
# depends only on that row, bit for bit. On a CPU the native kernels compute it if they are in use: torch takes four to
# six times as long for rows of 50,000.

_MAX_NATIVE = 256  # the native kernel's bound on k; it keeps its candidates in order by insertion


def top_k_logsumexp(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the top `count` (at most V) of logits `[B, V]` and their logsumexp, in float32.

    The results are values `[B, count]` in descending order, tokens `[B, count]` and logsumexp `[B, 1]`. Equal values
    are in the order of their tokens.
    """
    logits, count = logits.float(), min(count, logits.shape[1])
    library = loaded() if logits.device.type == "cpu" else None
    if library is None:
        return *stable_top_k(logits, count), _logsumexp(logits)
    values, tokens, logsumexp = library.run_top_k(logits.contiguous(), max(1, min(count, _MAX_NATIVE)))
    values, tokens, failed = values[:, :count], tokens[:, :count], logsumexp.isnan()[:, 0]
    if failed.any():  # only these rows are computed again
        logsumexp[failed] = _logsumexp(logits[failed])
    if count > _MAX_NATIVE:
        values, tokens = stable_top_k(logits, count)
    elif failed.any():
        values[failed], tokens[failed] = stable_top_k(logits[failed], count)
    return values, tokens, logsumexp


def stable_top_k(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute `topk` with equal values in the order of their tokens, so that no row depends on `count`.

    On a GPU this holds within the list only: the device decides which of the values equal to its last one are in it.
    """
    values, tokens = logits.topk(count, dim=-1)
    tokens, order = tokens.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(-1, order)
    if count and logits.device.type == "cpu":
        last = values[:, -1:]
        tie_cut = (logits == last).sum(dim=-1) > (values == last).sum(
            dim=-1
        )  # some values equal to the last are not in
        for row in (tie_cut & ~last[:, 0].isneginf()).nonzero()[:, 0].tolist():
            tokens[row] = logits[row].sort(descending=True, stable=True).indices[:count]
    return values, tokens


def _logsumexp(logits: Tensor) -> Tensor:
    """Return each row's logsumexp `[B, 1]`. A single row is computed twice: torch would split its sum over threads."""
    if len(logits) > 1:
        return logits.logsumexp(dim=-1, keepdim=True)
    return logits.expand(2, -1).logsumexp(dim=-1, keepdim=True)[:1]


_MASK = (1 << 64) - 1
_BARRED = float("-inf")
_MAX_EXPONENT = 80.0  # of e: larger factors of a logit are no float32
_MAX_EXTRA_CANDIDATES = 64  # candidates beyond those asked for, in place of banned ones


@dataclass(slots=True)  # created for every token: a frozen dataclass takes three times as long
class SamplingRow:
    """The sampling parameters and the state of the sequence of one row of logits."""

    params: SamplingParams
    index: int  # of the sequence among the request's n
    token_ids: Sequence[int]  # prompt and output so far
    num_prompt_tokens: int
    banned_token_ids: Sequence[int] = ()
    forced_token_id: int | None = None  # the only token allowed
    allowed: NDArray[np.bool_] | None = None  # [V], the grammar's mask; excludes banned tokens too
    history: History | None = None  # incremental statistics of `token_ids`; None: computed from scratch
    biases: Mapping[int, float] | None = None  # the checkpoint's, by token
    ending_token_ids: Sequence[int] = ()  # those that `exponential_decay_length_penalty` makes likelier
    num_ahead: int = 0  # drafts between `token_ids` and the row

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) + self.num_ahead - self.num_prompt_tokens

    @property
    def token_history(self) -> History:
        if self.history is not None:
            return self.history
        return History(self.num_prompt_tokens, window=self.params.penalty_window)


def uniform(seed: int, index: int, counter: int) -> float:
    """Return a number in [0, 1) for (seed, index, counter) by the splitmix64 finaliser (Steele et al. 2014)."""
    state = 0
    for word in (seed, index, counter):
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Choose a token for each row of logits `[B, V]`; return token ids `[B]`. The logits are not changed."""
    return choose(process_logits(logits, rows), rows)


def choose(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Choose a token for each row of processed logits `[B, V]`; return token ids `[B]`."""
    random_indices = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if len(random_indices) < len(rows):
        tokens = likeliest(logits)
    else:
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    if random_indices:
        random_rows = [rows[i] for i in random_indices]
        uniforms = [uniform(row.params.seed, row.index, row.num_output_tokens) for row in random_rows]
        sample_into(tokens, logits, random_indices, [row.params for row in random_rows], uniforms)
    return tokens


def process_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply biases, penalties, bans, masks and rules to a float32 copy; without any, return the logits themselves.

    Only allowed ids and rules of timestamps take operations for each row that has them. Indices and values are computed
    on the host, so nothing waits for the device.
    """
    indices = [i for i, row in enumerate(rows) if _needs_processing(row)]
    if not indices:
        return logits
    logits, at, rows = logits.to(torch.float32, copy=True), np.array(indices), [rows[i] for i in indices]
    if any(row.biases for row in rows):
        _add(logits, at, [row.biases or {} for row in rows])
    if any(row.params.logit_bias for row in rows):
        _add(logits, at, [row.params.logit_bias for row in rows])
    if any(row.params.encoder_repetition_penalty != 1.0 for row in rows):
        _apply_source_penalty(logits, rows, at)
    if any(row.params.repetition_penalty != 1.0 for row in rows):
        _apply_repetition_penalty(logits, rows, at)
    if any(row.params.presence_penalty or row.params.frequency_penalty for row in rows):
        _apply_presence_and_frequency_penalties(logits, rows, at)
    if any(row.ending_token_ids for row in rows):
        _apply_decay(logits, rows, at)
    bans = [_bans(row) for row in rows]
    if any(bans):
        logits[_row_and_column(bans, at, logits.device)] = _BARRED
    _apply_allowed_ids(logits, rows, at)
    _apply_timestamp_rules(logits, rows, at)
    _apply_masks(logits, rows, at)
    return logits


def _bans(row: SamplingRow) -> Sequence[int]:
    """Return the tokens that a row bans; none where they are all that is allowed."""
    banned = row.banned_token_ids
    return banned if not row.params.allowed_token_ids or set(row.params.allowed_token_ids).difference(banned) else ()


def _apply_allowed_ids(logits: Tensor, rows: Sequence[SamplingRow], at: NDArray[np.int64]) -> None:
    """Bar all tokens but those that a request allows, in place."""
    for place, row in zip(at.tolist(), rows, strict=True):
        if row.params.allowed_token_ids:
            ids = device_tensor(row.params.allowed_token_ids, logits.device, torch.int64)
            kept = logits[place, ids]
            logits[place] = _BARRED
            logits[place, ids] = kept


def _apply_timestamp_rules(logits: Tensor, rows: Sequence[SamplingRow], at: NDArray[np.int64]) -> None:
    """Bar what `TimestampRules` do, in place; and text where timestamps together are likelier than any of it."""
    for begin in {row.params.timestamps.timestamp_begin_id for row in rows if row.params.timestamps is not None}:
        ruled = [
            (place, row.params.timestamps, row.params.timestamps.left(row.token_ids[row.num_prompt_tokens :]))
            for place, row in zip(at.tolist(), rows, strict=True)
            if row.params.timestamps is not None and row.params.timestamps.timestamp_begin_id == begin
        ]
        for place, rules, left in ruled:
            scores = logits[place]
            scores[rules.no_timestamps_id] = _BARRED
            scores[: left.first_text] = _BARRED
            scores[begin : left.first_time] = _BARRED
            scores[left.end_time :] = _BARRED
        places = [place for place, _, _ in ruled]
        where = slice(None) if len(places) == len(logits) else device_tensor(places, logits.device, torch.int64)
        scores = logits[where]  # [R, V] a view of all rows, or a copy of some
        times, text = scores[:, begin:], scores[:, :begin]
        sums_up = top_k_logsumexp(times, 1)[2] > text.amax(dim=-1, keepdim=True)
        text.masked_fill_(sums_up, _BARRED)
        if len(places) < len(logits):
            logits[where] = scores


def _row_and_column(lists: list[Sequence[int]], at: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the index of each token in the logits; the tokens of list `i` are columns of row `at[i]`."""
    lengths = [len(tokens) for tokens in lists]
    tokens = np.fromiter(chain.from_iterable(lists), np.int64, sum(lengths))
    return to_device(torch.from_numpy(np.repeat(at, lengths)), device), to_device(torch.from_numpy(tokens), device)


def _add(logits: Tensor, at: NDArray[np.int64], biases: Sequence[Mapping[int, float]]) -> None:
    """Add each row's biases to the logits of its tokens, in place."""
    where = _row_and_column([tuple(one) for one in biases], at, logits.device)
    logits[where] += device_tensor([bias for one in biases for bias in one.values()], logits.device, torch.float32)


def _apply_decay(logits: Tensor, rows: Sequence[SamplingRow], at: NDArray[np.int64]) -> None:
    """Raise what ends an output by |logit| * (factor ** tokens beyond the start - 1), in place."""
    raised = [(int(place), row) for place, row in zip(at, rows, strict=True) if row.ending_token_ids]
    for place, row in raised:
        start, factor = row.params.exponential_decay_length_penalty or (0, 1.0)
        if (beyond := row.num_output_tokens - start) > 0:
            ids = device_tensor(row.ending_token_ids, logits.device, torch.int64)
            finite = factor <= 1 or beyond * math.log(factor) < _MAX_EXPONENT
            growth = factor**beyond if finite else math.exp(_MAX_EXPONENT)
            logits[place, ids] += logits[place, ids].abs() * (growth - 1)


def _apply_source_penalty(logits: Tensor, rows: Sequence[SamplingRow], at: NDArray[np.int64]) -> None:
    """Multiply positive and divide negative logits of the source's tokens by the penalty, in place."""
    penalised = [
        (i, row.history.source.distinct, 1 / row.params.encoder_repetition_penalty)
        for i, row in enumerate(rows)
        if row.params.encoder_repetition_penalty != 1.0 and row.history is not None and row.history.source is not None
    ]
    if penalised:
        places, tokens, factors = (list(column) for column in zip(*penalised, strict=True))
        _divide(logits, at[places], tokens, factors)


def _apply_repetition_penalty(logits: Tensor, rows: Sequence[SamplingRow], at: NDArray[np.int64]) -> None:
    """Divide positive and multiply negative logits of seen tokens by the penalty (Keskar et al. 2019), in place.

    A token of both prompt and output is written twice, with the same value.
    """
    penalised = [i for i, row in enumerate(rows) if row.params.repetition_penalty != 1.0]
    seen = [rows[i].token_history.seen(rows[i].token_ids) for i in penalised]
    _divide(logits, at[penalised], seen, [rows[i].params.repetition_penalty for i in penalised])


def _divide(logits: Tensor, at: NDArray[np.int64], seen: Sequence[NDArray[np.int64]], by: Sequence[float]) -> None:
    """Divide positive and multiply negative logits of each row's tokens by its number, in place."""
    factors = np.array(by, dtype=np.float32)
    factor = to_device(torch.from_numpy(np.repeat(factors, [len(tokens) for tokens in seen])), logits.device)
    where = _flat_indices(logits, at, seen)
    scores = logits.view(-1).index_select(0, where)
    logits.view(-1).scatter_(0, where, torch.where(scores > 0, scores / factor, scores * factor))


def _apply_presence_and_frequency_penalties(logits: Tensor, rows: Sequence[SamplingRow], at: NDArray[np.int64]) -> None:
    """Subtract presence + frequency x count from the logits of the tokens that are counted, in place."""
    penalised = [i for i, row in enumerate(rows) if row.params.presence_penalty or row.params.frequency_penalty]
    counted = [rows[i].token_history.counted(rows[i].token_ids) for i in penalised]
    penalties = [
        np.float32(rows[i].params.presence_penalty)
        + np.float32(rows[i].params.frequency_penalty) * counts.astype(np.float32)
        for i, (_, counts) in zip(penalised, counted, strict=True)
    ]
    where = _flat_indices(logits, at[penalised], [tokens for tokens, _ in counted])
    penalty = to_device(torch.from_numpy(np.concatenate(penalties)), logits.device)
    logits.view(-1).scatter_(0, where, logits.view(-1).index_select(0, where) - penalty)


def _flat_indices(logits: Tensor, at: NDArray[np.int64], tokens: Sequence[NDArray[np.int64]]) -> Tensor:
    """Return indices into flattened logits of the tokens of rows `at`; half the time of row and column indices."""
    vocab_size = logits.shape[1]
    flat = np.concatenate([row * vocab_size + columns for row, columns in zip(at, tokens, strict=True)])
    return to_device(torch.from_numpy(flat), logits.device)


def _apply_masks(logits: Tensor, rows: Sequence[SamplingRow], at: NDArray[np.int64]) -> None:
    """Apply grammar masks and forced tokens, in place; a forced token overrides the grammar."""
    forced = [i for i, row in enumerate(rows) if row.forced_token_id is not None]
    masked = [i for i, row in enumerate(rows) if row.allowed is not None and row.forced_token_id is None]
    if masked:
        allowed = to_device(torch.from_numpy(np.stack([rows[i].allowed for i in masked])), logits.device)  # type: ignore[misc]
        where = to_device(torch.from_numpy(at[masked]), logits.device)
        logits[where] = logits[where].masked_fill(~allowed, _BARRED)
    if forced:
        where = to_device(torch.from_numpy(at[forced]), logits.device)
        logits[where] = _BARRED
        logits[where, device_tensor([rows[i].forced_token_id or 0 for i in forced], logits.device, torch.int64)] = 0.0


def _needs_processing(row: SamplingRow) -> bool:
    return bool(row.banned_token_ids) or _changes_scores(row)


def _changes_scores(row: SamplingRow) -> bool:
    """Return whether the row's logits are changed by more than a list of banned tokens."""
    left = row.forced_token_id is not None or row.allowed is not None
    return bool(change_scores(row.params) or row.ending_token_ids or row.biases or left)


def change_scores(p: SamplingParams) -> bool:
    """Return whether a request changes its logits in another way than by bans or a grammar."""
    penalties = p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty
    return bool(penalties or p.encoder_repetition_penalty != 1.0 or p.logit_bias or p.allowed_token_ids or p.timestamps)


def chosen_logprobs(processed: Tensor, tokens: Tensor) -> list[float]:
    """Return the log-probabilities of tokens `[N]` under their rows of processed logits `[N, V]`."""
    processed = processed.float()
    _, _, logsumexp = top_k_logsumexp(processed, 1)
    found: list[float] = (processed.gather(1, tokens[:, None]) - logsumexp)[:, 0].tolist()
    return found


def logprobs_of(logits: Tensor, token_ids: Sequence[int]) -> list[float]:
    """Return the log-probabilities of some tokens under one row of unprocessed logits `[1, V]`."""
    logits = logits.float()
    _, _, logsumexp = top_k_logsumexp(logits, 1)
    found: list[float] = (logits[0, device_tensor(token_ids, logits.device, torch.int64)] - logsumexp[0]).tolist()
    return found


def token_logprobs(logits: Tensor, tokens: Tensor, top: Sequence[int]) -> list[TokenLogprob]:
    """Return log-probabilities of tokens `[N]` under unprocessed logits `[N, V]`, each with its row's top `top[i]`."""
    logits = logits.float()
    # Top-k of the logits is top-k of the log-probabilities, so these are not computed for the whole vocabulary.
    values, ids, logsumexp = top_k_logsumexp(logits, max(top))
    logprobs = (logits.gather(1, tokens[:, None]) - logsumexp)[:, 0]
    values = values - logsumexp
    candidates = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return [
        TokenLogprob(token, logprob, tuple(best[:count]))
        for token, logprob, best, count in zip(tokens.tolist(), logprobs.tolist(), candidates, top, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """The most likely tokens of one beam."""

    tokens: list[tuple[int, float]]  # with log-probabilities, descending
    log_mass: float = 0.0  # logsumexp of the log-probabilities that bans and rules left, if that is asked for


def top_candidates(logits: Tensor, rows: Sequence[SamplingRow], counts: Sequence[int]) -> list[BeamCandidates]:
    """Return the `counts[i]` most likely tokens of each beam of logits `[B, V]`.

    Bans and penalties apply to log-probabilities, as in `transformers`' beam search.
    """
    bans: list[set[int]] = [set(row.banned_token_ids) for row in rows]
    weighed = any(row.params.cumulative_logprob or row.params.renormalize_logits for row in rows)
    masses = [0.0 for _ in rows]
    if weighed or any(map(_changes_scores, rows)) or max(map(len, bans)) > _MAX_EXTRA_CANDIDATES:
        _, _, logsumexp = top_k_logsumexp(logits, 1)
        values, tokens, left = top_k_logsumexp(process_logits(logits - logsumexp, rows), max(counts))
        masses = left[:, 0].tolist() if weighed else masses
        again = [i for i, row in enumerate(rows) if row.params.renormalize_logits and masses[i] > _BARRED]
        for i in again:
            values[i] -= left[i]
            masses[i] = 0.0
        bans = [set() for _ in rows]  # their log-probability is -inf now
    else:  # banned tokens are removed from a longer list, which avoids a copy of the logits
        values, tokens, logsumexp = top_k_logsumexp(logits, max(counts) + max(map(len, bans)))
        values = values - logsumexp
    return [
        BeamCandidates(
            [(token, value) for token, value in zip(ids, logprobs, strict=True) if token not in banned][:count], mass
        )
        for ids, logprobs, banned, count, mass in zip(
            tokens.tolist(), values.tolist(), bans, counts, masses, strict=True
        )
    ]
