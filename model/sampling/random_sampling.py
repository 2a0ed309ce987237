"""Random sampling of tokens with temperature and truncation: top-n-sigma, top-k, top-p, min-p, typical-p, cutoffs.

Each row is sampled from one uniform number by inversion of its cumulative distribution, in the vocabulary's order
(Devroye 1986, section II.2), so the result of a row depends only on that row. Top-k, top-p and min-p keep the tokens
whose score reaches a threshold, ties included. The threshold is nearly always found in the H highest scores (the head);
otherwise a longer head is taken, and at last all scores are sorted. On a GPU one Triton kernel does all of this for
all rows (`triptych.model.sampling.triton_sampling`). This module is its reference, and samples rows with top-n-sigma,
typical-p or cutoffs everywhere.

Shapes: B rows, V tokens, H tokens of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from triptych.model.api.sampling_params import SAMPLING, SamplingParams
from triptych.model.system import fallbacks
from triptych.model.system.devices import device_tensor, has_triton

HEADS = (64, 1024)  # sizes of the head, tried before the whole vocabulary is sorted
# How many programs search a row for its largest logit on a GPU, by the first number of rows: few kinds of launch, since
# each is compiled.
LIKELIEST_PARTS = {1: 64, 5: 8, 33: 1}
_BLOCK = 256  # weights summed together
_GROUP = 32  # tokens compared at first by their maximum alone
_FALLBACK = "tokens are drawn in many kernels"
_CHUNK = 1 << 20  # scores of a chunk of rows, which fits in the CPU's cache
_COMPUTED = {"temperature", "top_n_sigma", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"}
if {name for name, column in SAMPLING.items() if column.row.draws} != _COMPUTED:
    raise TypeError(f"parameters that draw tokens are computed here, and no others: {', '.join(sorted(_COMPUTED))}")


def sample_into(
    tokens: Tensor, logits: Tensor, rows: Sequence[int], params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> None:
    """Sample a token for each of `rows` of logits `[B, V]`, of any float type, into those elements of tokens `[B]`."""
    remaining: Sequence[int] = range(len(rows))
    kernel = _kernel(logits.device)
    if kernel is not None:
        covered = [i for i in remaining if kernel.covers(params[i])]
        chosen = ([v[i] for i in covered] for v in (rows, params, uniforms))
        if covered and _launched(kernel.launch_sampling, logits, tokens, *chosen):
            remaining = [i for i in remaining if not kernel.covers(params[i])]
    if remaining:
        at = device_tensor([rows[i] for i in remaining], logits.device, torch.int64)
        scores = logits if len(remaining) == len(logits) else logits[at]
        tokens[at] = sample_rows(scores.float(), [params[i] for i in remaining], [uniforms[i] for i in remaining])


def likeliest(logits: Tensor) -> Tensor:
    """Return the first of the largest logits of each row `[B, V]`. On a CPU torch takes 20 times as long as numpy.

    On a GPU torch searches a row in one program: 37 us for 128,256 tokens on an H200.
    """
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.float().numpy().argmax(axis=-1))
    kernel = _kernel(logits.device)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    parts = LIKELIEST_PARTS[max(first for first in LIKELIEST_PARTS if first <= len(logits))] if len(logits) else 1
    if kernel is None or not _launched(kernel.launch_greedy, logits, tokens, parts):
        tokens = logits.argmax(dim=-1)
    return tokens


def use_torch(error: Exception) -> None:
    """Sample by torch from now on, as the kernel is broken."""
    fallbacks.note_once(_FALLBACK, error)


def _kernel(device: torch.device) -> ModuleType | None:
    """Return the module of the Triton kernel; None on a CPU and after a failed launch."""
    if device.type != "cuda" or fallbacks.noted(_FALLBACK) or not has_triton(device):
        return None
    from triptych.model.sampling import triton_sampling

    return triton_sampling


def _launched(launch: Callable[..., None], *arguments: object) -> bool:
    return fallbacks.attempt(_FALLBACK, launch, *arguments) is not NotImplemented


def sample_rows(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """Sample token ids `[B]` from logits `[B, V]`; `uniforms` are the rows' uniform numbers in [0, 1)."""
    size = max(1, _CHUNK // logits.shape[1]) if logits.device.type == "cpu" else len(params)
    starts = range(0, len(params), size)
    tokens = [_sample_chunk(logits[i : i + size], params[i : i + size], uniforms[i : i + size]) for i in starts]
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)


def _sample_chunk(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    device = logits.device
    scaled = logits / _column([p.temperature for p in params], device, torch.float32)
    scaled -= scaled.amax(dim=-1, keepdim=True)
    wide = [i for i, p in enumerate(params) if p.top_n_sigma > 0]
    if wide:
        at = device_tensor(wide, device, torch.int64)
        scaled[at] = _truncate_deviating(scaled[at], _column([params[i].top_n_sigma for i in wide], device))
    weights = scaled.exp()
    truncated = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.min_p]
    if len(truncated) == len(params):
        weights = _truncate(scaled, weights, params)
    elif truncated:
        at = device_tensor(truncated, device, torch.int64)
        weights[at] = _truncate(scaled[at], weights[at], [params[i] for i in truncated])
    typical = [i for i, p in enumerate(params) if p.typical_p < 1.0]
    if typical:
        at = device_tensor(typical, device, torch.int64)
        weights[at] = _truncate_typical(weights[at], _column([params[i].typical_p for i in typical], device))
    cut = [i for i, p in enumerate(params) if p.epsilon_cutoff or p.eta_cutoff]
    if cut:
        at = device_tensor(cut, device, torch.int64)
        bounds = (
            _column([params[i].epsilon_cutoff for i in cut], device),
            _column([params[i].eta_cutoff for i in cut], device),
        )
        weights[at] = _cut_off(weights[at], *bounds)
    return _invert(weights, _column(uniforms, device))


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    return device_tensor(values, device, dtype)[:, None]


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the tokens `[B]` at which the cumulative sums of weights `[B, V]` pass `uniforms` `[B, 1]`.

    The block of tokens is found first, then the token within the block.
    """
    blocks = _split_blocks(weights, _BLOCK, 0.0)
    block_sums = blocks.sum(dim=-1).double()
    cumulative = block_sums.cumsum(dim=-1)
    target = uniforms * cumulative[:, -1:]
    block = _first_above(cumulative, target)  # [B, 1]
    before = cumulative.gather(1, block) - block_sums.gather(1, block)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(dim=-1)
    return (block * _BLOCK + _first_above(inside, target - before))[:, 0]


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the first index `[B, 1]` at which `cumulative` `[B, N]` exceeds `target` `[B, 1]`.

    It is never an index after the last weight above 0, whatever the rounding.
    """
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)


def _truncate(scaled: Tensor, weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set weights to 0 that top-k, top-p or min-p remove; `scaled` scores are 0 at each row's maximum."""
    device = scaled.device
    threshold = _column([p.min_p for p in params], device, torch.float32).log()  # -inf: off
    by_rank = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1.0]
    if by_rank:
        at = device_tensor(by_rank, device, torch.int64)
        lowest = _lowest_kept(scaled[at], weights[at], [params[i] for i in by_rank])
        threshold[at] = torch.maximum(threshold[at], lowest)
    return weights.masked_fill_(scaled < threshold, 0.0)


def _lowest_kept(scaled: Tensor, weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the lowest score `[B, 1]` that top-k and then top-p keep."""
    total = _split_blocks(weights, _BLOCK, 0.0).sum(dim=-1).sum(dim=-1, keepdim=True, dtype=torch.float64)  # [B, 1]
    lowest = torch.empty(len(scaled), 1, device=scaled.device)
    remaining = list(range(len(params)))
    for size in (*(size for size in HEADS if size < scaled.shape[1]), scaled.shape[1]):
        current = [i for i in remaining if params[i].top_k <= size or size == scaled.shape[1]]
        if not current:
            continue
        at = device_tensor(current, scaled.device, torch.int64)
        head = sorted_top(scaled[at], size)
        lowest[at], conclusive = _lowest_in_head(head, total[at], [params[i] for i in current])
        done = set(current)
        # With top-k the head is always conclusive, and the host need not wait for the device.
        if size < scaled.shape[1] and not all(params[i].top_k for i in current):
            done = {i for i, is_done in zip(current, conclusive.tolist(), strict=True) if is_done}
        remaining = [i for i in remaining if i not in done]
        if not remaining:
            break
    return lowest


def _lowest_in_head(head: Tensor, total: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Return the lowest kept score `[B, 1]` of the head `[B, H]`, and whether the head is long enough for it `[B]`.

    `total` `[B, 1]`: the sum of all weights of the row.
    """
    size = head.shape[1]
    counts = [min(p.top_k or size, size) for p in params]
    count = device_tensor(counts, head.device, torch.int64)[:, None]
    weights = head.exp().double().masked_fill(torch.arange(size, device=head.device) >= count, 0.0)
    cumulative = weights.cumsum(dim=-1)
    has_top_k = device_tensor([p.top_k > 0 for p in params], head.device, torch.bool)[:, None]
    limit = _column([p.top_p for p in params], head.device) * torch.where(has_top_k, cumulative[:, -1:], total)
    reached = torch.searchsorted(cumulative, limit) + 1  # number of tokens that reach top-p
    last = torch.minimum(reached, count) - 1
    return head.gather(1, last), ((reached <= count) | has_top_k)[:, 0]


def sorted_top(scores: Tensor, size: int) -> Tensor:
    """Return the `size` highest of each row of scores `[B, V]`, in descending order: `[B, size]`."""
    if scores.device.type != "cpu":
        return scores.topk(size, dim=-1).values
    rows = scores.numpy()
    maxima = _split_blocks(scores, _GROUP, float("-inf")).amax(dim=-1).numpy()
    if size >= maxima.shape[1]:
        return torch.from_numpy(np.sort(rows, axis=-1)[:, ::-1][:, :size].copy())
    # At least `size` scores reach the `size`-th highest maximum of the groups, and few more: only these are sorted.
    bounds = np.partition(maxima, -size, axis=-1)[:, -size]
    top = [np.sort(row[row >= bound])[::-1][:size] for row, bound in zip(rows, bounds, strict=True)]
    return torch.from_numpy(np.stack(top))


def _split_blocks(rows: Tensor, size: int, fill: float) -> Tensor:
    """Reshape rows `[B, V]` to `[B, blocks, size]`, padded with `fill`."""
    return pad(rows, (0, -rows.shape[1] % size), value=fill).unflatten(1, (-1, size))


def _cut_off(weights: Tensor, epsilon: Tensor, eta: Tensor) -> Tensor:
    """Remove tokens below `epsilon`, then those below what `eta` allows at the entropy that is left (0: off).

    The likeliest token stays.
    """
    probs = weights.double() / weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    weights = weights.masked_fill((probs < epsilon) & (probs < probs.amax(dim=-1, keepdim=True)), 0.0)
    probs = weights.double() / weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    entropy = -(probs * probs.log()).nansum(dim=-1, keepdim=True)
    least = torch.minimum(eta, eta.sqrt() * (-entropy).exp())
    return weights.masked_fill((probs < least) & (probs < probs.amax(dim=-1, keepdim=True)), 0.0)


def _truncate_deviating(scaled: Tensor, n: Tensor) -> Tensor:
    """Keep the scores within `n` standard deviations of the largest, which is 0; -inf is no score."""
    scores = scaled.double()
    mean = scores.masked_fill(scaled.isneginf(), torch.nan).nanmean(dim=-1, keepdim=True)
    variance = (scores - mean).square().masked_fill(scaled.isneginf(), torch.nan).nanmean(dim=-1, keepdim=True)
    return scaled.masked_fill(scores < -n * variance.sqrt(), -torch.inf)


def _truncate_typical(weights: Tensor, typical_p: Tensor) -> Tensor:
    """Keep the tokens whose surprisal is nearest to the entropy, up to the mass `typical_p` (Meister et al. 2023)."""
    probs = weights.double()
    probs = probs / probs.sum(dim=-1, keepdim=True)
    surprisal = -probs.log()  # infinite for tokens that were removed before
    entropy = (probs * surprisal).nansum(dim=-1, keepdim=True)
    order = (surprisal - entropy).abs().argsort(dim=-1, stable=True)
    ordered = probs.gather(1, order)
    removed = ordered.cumsum(dim=-1) - ordered >= typical_p  # tokens before this one reach the mass
    return weights.masked_fill(torch.zeros_like(removed).scatter(1, order, removed), 0.0)
