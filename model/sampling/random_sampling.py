"""A token for each row of logits by its temperature and cuts: top-k, top-p, min-p, typical-p.

Each row falls on one uniform number, by inversion of its cumulative distribution in the vocabulary's order (Devroye
1986, section II.2), so a row depends on nothing but itself. The first three cuts leave what is at least as likely as
some token; tokens as likely as that one stay too. Which one it is, a short head of the likeliest nearly always tells;
where it does not, a longer one is taken, at last all values in order. On a GPU one kernel does all of it for all rows
(`model.sampling.triton_sampling`); what is here is its oracle, and what rows with typical-p go through everywhere.

Shapes: B rows, V tokens, H of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from model.api.request import SamplingParams
from model.system import fallbacks
from model.system.transfer import device_tensor

HEADS = (64, 1024)  # tokens looked at before the whole vocabulary is put in order
_BLOCK = 256  # weights added up together
_LEAF = 32  # tokens of which only the likeliest is compared at first
_MANY_KERNELS = "tokens are drawn in many kernels"
_CHUNK = 1 << 20  # scores worked on at a time, so that they stay in the CPU's cache


def sample_into(
    tokens: Tensor, logits: Tensor, rows: Sequence[int], params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> None:
    """Draw for `rows` of logits `[B, V]`, of any float type, into those places of tokens `[B]`."""
    left: Sequence[int] = range(len(rows))
    kernel = _kernel(logits.device)
    if kernel is not None:
        taken = [i for i in left if kernel.covers(params[i])]
        if taken and _launched(kernel, logits, tokens, *([of[i] for i in taken] for of in (rows, params, uniforms))):
            left = [i for i in left if not kernel.covers(params[i])]
    if left:
        at = device_tensor([rows[i] for i in left], logits.device, torch.int64)
        scores = logits if len(left) == len(logits) else logits[at]
        tokens[at] = sample_rows(scores.float(), [params[i] for i in left], [uniforms[i] for i in left])


def _kernel(device: torch.device) -> ModuleType | None:
    """What draws in one launch; None where that does not work."""
    if device.type != "cuda" or fallbacks.noted(_MANY_KERNELS) or not _has_triton(device):
        return None
    from model.sampling import triton_sampling

    return triton_sampling


@cache
def _has_triton(device: torch.device) -> bool:
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)


def _launched(kernel: ModuleType, *arguments: object) -> bool:
    """Whether that worked; if not, it is not tried again."""
    try:
        kernel.launch_sampling(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        fallbacks.note(_MANY_KERNELS, error)
        return False
    return True


def sample_rows(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """Token ids `[B]` of logits `[B, V]`; `uniforms` are the rows' uniform numbers in [0, 1)."""
    size = max(1, _CHUNK // logits.shape[1]) if logits.device.type == "cpu" else len(params)
    parts = range(0, len(params), size)
    drawn = [_sample_chunk(logits[i : i + size], params[i : i + size], uniforms[i : i + size]) for i in parts]
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def _sample_chunk(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    device = logits.device
    scaled = logits / _column([p.temperature for p in params], device, torch.float32)
    scaled -= scaled.amax(dim=-1, keepdim=True)
    weights = scaled.exp()
    cut = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.min_p]
    if len(cut) == len(params):
        weights = _cut(scaled, weights, params)
    elif cut:
        at = device_tensor(cut, device, torch.int64)
        weights[at] = _cut(scaled[at], weights[at], [params[i] for i in cut])
    typical = [i for i, p in enumerate(params) if p.typical_p < 1.0]
    if typical:
        at = device_tensor(typical, device, torch.int64)
        weights[at] = _typical(weights[at], _column([params[i].typical_p for i in typical], device))
    return _invert(weights, _column(uniforms, device))


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    return device_tensor(values, device, dtype)[:, None]


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Where the points `[B, 1]` fall in weights `[B, V]`: first among blocks of tokens, then in the block."""
    blocks = _blocks(weights, _BLOCK, 0.0)
    sums = blocks.sum(dim=-1).double()
    mass = sums.cumsum(dim=-1)
    target = uniforms * mass[:, -1:]
    block = _reach(mass, target)  # [B, 1]
    before = mass.gather(1, block) - sums.gather(1, block)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(dim=-1)
    return (block * _BLOCK + _reach(inside, target - before))[:, 0]


def _reach(mass: Tensor, target: Tensor) -> Tensor:
    """Where cumulative `mass` `[B, N]` passes `target` `[B, 1]`: `[B, 1]`, always a place that adds to it."""
    last = (mass < mass[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(mass, target, right=True), last)


def _cut(scaled: Tensor, weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The weights without what top-k, top-p and min-p leave out; `scaled` is 0 at each row's likeliest token."""
    device = scaled.device
    least = _column([p.min_p for p in params], device, torch.float32).log()  # -inf: off
    ordered = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1.0]
    if ordered:
        at = device_tensor(ordered, device, torch.int64)
        found = _least_likely(scaled[at], weights[at], [params[i] for i in ordered])
        least[at] = torch.maximum(least[at], found)
    return weights.masked_fill_(scaled < least, 0.0)


def _least_likely(scaled: Tensor, weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The lowest score `[B, 1]` that top-k and then top-p keep."""
    total = _blocks(weights, _BLOCK, 0.0).sum(dim=-1).sum(dim=-1, keepdim=True, dtype=torch.float64)  # [B, 1]
    least = torch.empty(len(scaled), 1, device=scaled.device)
    left = list(range(len(params)))
    for size in (*(size for size in HEADS if size < scaled.shape[1]), scaled.shape[1]):
        tried = [i for i in left if params[i].top_k <= size or size == scaled.shape[1]]
        if not tried:
            continue
        at = device_tensor(tried, scaled.device, torch.int64)
        values = highest(scaled[at], size)
        least[at], reached = _last_kept(values, total[at], [params[i] for i in tried])
        done = set(tried)
        if size < scaled.shape[1] and not all(params[i].top_k for i in tried):  # else nothing waits for the device
            done = {i for i, yes in zip(tried, reached.tolist(), strict=True) if yes}
        left = [i for i in left if i not in done]
        if not left:
            break
    return least


def _last_kept(values: Tensor, total: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """The lowest of the head `values` `[B, H]` that is kept `[B, 1]`, and whether the head reaches that far `[B]`."""
    size = values.shape[1]
    count = [min(p.top_k or size, size) for p in params]
    kept = device_tensor(count, values.device, torch.int64)[:, None]
    weights = values.exp().double().masked_fill(torch.arange(size, device=values.device) >= kept, 0.0)
    mass = weights.cumsum(dim=-1)
    by_count = device_tensor([p.top_k > 0 for p in params], values.device, torch.bool)[:, None]
    limit = _column([p.top_p for p in params], values.device) * torch.where(by_count, mass[:, -1:], total)
    reaching = torch.searchsorted(mass, limit) + 1  # tokens until the share is reached
    last = torch.minimum(reaching, kept) - 1
    return values.gather(1, last), ((reaching <= kept) | by_count)[:, 0]


def highest(scores: Tensor, size: int) -> Tensor:
    """The `size` highest of each row of `[B, V]`, in order: `[B, size]`."""
    if scores.device.type != "cpu":
        return scores.topk(size, dim=-1).values
    rows = scores.numpy()
    maxima = _blocks(scores, _LEAF, float("-inf")).amax(dim=-1).numpy()
    if size >= maxima.shape[1]:
        return torch.from_numpy(np.sort(rows, axis=-1)[:, ::-1][:, :size].copy())
    # `size` leaves have a token as high as the lowest of the highest maxima: few tokens are left to be put in order.
    bounds = np.partition(maxima, -size, axis=-1)[:, -size]
    found = [np.sort(row[row >= bound])[::-1][:size] for row, bound in zip(rows, bounds, strict=True)]
    return torch.from_numpy(np.stack(found))


def _blocks(rows: Tensor, size: int, fill: float) -> Tensor:
    """`[B, V]` as `[B, blocks, size]`."""
    return pad(rows, (0, -rows.shape[1] % size), value=fill).unflatten(1, (-1, size))


def _typical(weights: Tensor, share: Tensor) -> Tensor:
    """The tokens whose surprise is nearest to the entropy, as many as hold `share` (Meister et al. 2023)."""
    probs = weights.double()
    probs = probs / probs.sum(dim=-1, keepdim=True)
    surprise = -probs.log()  # infinite for what is out already
    entropy = (probs * surprise).nansum(dim=-1, keepdim=True)
    order = (surprise - entropy).abs().argsort(dim=-1, stable=True)
    ordered = probs.gather(1, order)
    outside = ordered.cumsum(dim=-1) - ordered >= share  # the share was reached before
    return weights.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), 0.0)
