"""One Triton kernel that draws a token for each row: temperature, top-k, top-p, min-p, then inversion.

A row is what `model.sampling.random_sampling` makes of it, up to the rounding of probabilities: the cuts keep what is
at least as likely as some token, ties too, and the row's uniform number falls on what is left in the vocabulary's
order. Nothing is put in order for that: how far below the likeliest the last kept token lies is searched, eight ways a
pass, among whole numbers, as positive floats are in the order of their bits. No pass writes anything, and the host
waits for none. Imported only where Triton is.

Shapes: B rows of logits, N of them drawn for, V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
from torch import Tensor
from triton import language as tl

from model.api.request import SamplingParams
from model.system.transfer import to_device

_BLOCK = 2048  # tokens worked on at a time
_WARPS = 8
_AHEAD = tl.constexpr(2)  # a block is fetched while the one before is worked on; of 3 registers spill in float32
_SETTINGS = tl.constexpr(6)  # numbers of a row: which it is, temperature, top-k, top-p, min-p, its uniform number
_INFINITE = tl.constexpr(0x7F800000)  # the bits of infinity: nothing is further from the likeliest


@triton.jit
def _distances(logits, begin, vocabulary, peak, inverse, BLOCK: tl.constexpr):
    """How far below the likeliest a block's tokens are, in units of the temperature; infinitely beyond the end."""
    at = begin + tl.arange(0, BLOCK)
    x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    return (peak - x) * inverse


@triton.jit
def _size(distance, COUNTS: tl.constexpr):
    """What a token counts for: itself, or its weight."""
    if COUNTS:
        return tl.full(distance.shape, 1.0, tl.float32)
    else:
        return tl.exp(-distance)


@triton.jit
def _search(logits, vocabulary, peak, inverse, wanted, last, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of the least distance within which tokens come to `wanted`; within `last` they do.

    The true one, or one with no other token in between.
    """
    low = -1  # within it they do not
    under = 0.0  # what they come to there
    over = float("inf")  # what they come to within `last`
    least = 0.0  # of a token not closer than `last`
    coarse = 1
    while (last - low > 1) & (over - under > 1.5 * least):
        gap = (last - low).to(tl.int64)
        t1 = tl.where(coarse == 1, _bits(0.4), low + (gap * 1 // 8).to(tl.int32))
        t2 = tl.where(coarse == 1, _bits(1.6), low + (gap * 2 // 8).to(tl.int32))
        t3 = tl.where(coarse == 1, _bits(3.6), low + (gap * 3 // 8).to(tl.int32))
        t4 = tl.where(coarse == 1, _bits(6.4), low + (gap * 4 // 8).to(tl.int32))
        t5 = tl.where(coarse == 1, _bits(10.0), low + (gap * 5 // 8).to(tl.int32))
        t6 = tl.where(coarse == 1, _bits(14.4), low + (gap * 6 // 8).to(tl.int32))
        t7 = tl.where(coarse == 1, _bits(19.6), low + (gap * 7 // 8).to(tl.int32))
        coarse = 0
        s1 = tl.zeros([BLOCK], tl.float32)
        s2, s3, s4, s5, s6, s7 = s1, s1, s1, s1, s1, s1
        for begin in tl.range(0, vocabulary, BLOCK, num_stages=_AHEAD):
            distance = _distances(logits, begin, vocabulary, peak, inverse, BLOCK)
            bits, size = distance.to(tl.int32, bitcast=True), _size(distance, COUNTS)
            s1 += tl.where(bits <= t1, size, 0.0)
            s2 += tl.where(bits <= t2, size, 0.0)
            s3 += tl.where(bits <= t3, size, 0.0)
            s4 += tl.where(bits <= t4, size, 0.0)
            s5 += tl.where(bits <= t5, size, 0.0)
            s6 += tl.where(bits <= t6, size, 0.0)
            s7 += tl.where(bits <= t7, size, 0.0)
        # From the furthest to the closest: the bracket closes from above, then from below.
        last, low, over, under = _closed(last, low, over, under, t7, tl.sum(s7), wanted)
        last, low, over, under = _closed(last, low, over, under, t6, tl.sum(s6), wanted)
        last, low, over, under = _closed(last, low, over, under, t5, tl.sum(s5), wanted)
        last, low, over, under = _closed(last, low, over, under, t4, tl.sum(s4), wanted)
        last, low, over, under = _closed(last, low, over, under, t3, tl.sum(s3), wanted)
        last, low, over, under = _closed(last, low, over, under, t2, tl.sum(s2), wanted)
        last, low, over, under = _closed(last, low, over, under, t1, tl.sum(s1), wanted)
        least = 1.0 if COUNTS else tl.exp(-last.to(tl.float32, bitcast=True))
    return last


@triton.jit
def _closed(last, low, over, under, tried, found, wanted):
    """The bracket, closed by what tokens within `tried` come to."""
    enough = found >= wanted
    nearer = enough & (tried < last)
    further = (found < wanted) & (tried > low)
    return (
        tl.where(nearer, tried, last),
        tl.where(further, tried, low),
        tl.where(nearer, found, over),
        tl.where(further, found, under),
    )


@triton.jit
def _bits(number: tl.constexpr):
    return tl.full([], number, tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _within(logits, vocabulary, peak, inverse, last, BLOCK: tl.constexpr):
    """Weight and number of the tokens within `last`."""
    weight = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, vocabulary, BLOCK, num_stages=_AHEAD):
        distance = _distances(logits, begin, vocabulary, peak, inverse, BLOCK)
        inside = distance.to(tl.int32, bitcast=True) <= last
        weight += tl.where(inside, tl.exp(-distance), 0.0)
        count += tl.where(inside, 1.0, 0.0)
    return tl.sum(weight), tl.sum(count)


@triton.jit
def sampling_kernel(
    logits,  # [B, V]
    tokens,  # [B]: where what is drawn goes
    settings,  # [N, 6] float64
    row_stride,
    vocabulary,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of two that is enough
):
    """Grid: rows that are drawn for."""
    mine = settings + tl.program_id(0) * _SETTINGS
    row = tl.load(mine).to(tl.int64)
    logits += row * row_stride
    inverse = (1.0 / tl.load(mine + 1)).to(tl.float32)
    top_k = tl.load(mine + 2).to(tl.int32)
    top_p = tl.load(mine + 3).to(tl.float32)
    min_p = tl.load(mine + 4).to(tl.float32)

    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in tl.range(0, vocabulary, BLOCK, num_stages=_AHEAD):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, x)
    peak = tl.max(highest)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # nothing is possible

    last = tl.full([], _INFINITE, tl.int32)
    if (top_k > 0) & (top_k < vocabulary):
        last = _search(logits, vocabulary, peak, inverse, top_k.to(tl.float32), last, True, BLOCK)
    if top_p < 1.0:
        weight, count = _within(logits, vocabulary, peak, inverse, last, BLOCK)
        if (top_k > 0) & (count > top_k):  # of equals at the end only as many as make k have a part in the whole
            weight -= (count - top_k) * tl.exp(-last.to(tl.float32, bitcast=True))
        last = _search(logits, vocabulary, peak, inverse, top_p * weight, last, False, BLOCK)
    if min_p > 0.0:
        last = tl.minimum(last, tl.abs(tl.log(min_p)).to(tl.int32, bitcast=True))

    number = tl.arange(0, BLOCKS)
    sums = tl.zeros([BLOCKS], tl.float64)
    for begin in tl.range(0, vocabulary, BLOCK, num_stages=_AHEAD):
        distance = _distances(logits, begin, vocabulary, peak, inverse, BLOCK)
        kept = tl.where(distance.to(tl.int32, bitcast=True) <= last, tl.exp(-distance), 0.0)
        sums = tl.where(number == begin // BLOCK, tl.sum(kept).to(tl.float64), sums)
    mass = tl.cumsum(sums)
    whole = tl.max(mass)
    target = tl.load(mine + 5) * whole
    # The first to pass the target, but never one that adds nothing.
    block = tl.minimum(tl.sum((mass <= target).to(tl.int32)), tl.sum((mass < whole).to(tl.int32)))
    target -= tl.sum(tl.where(number < block, sums, 0.0))
    distance = _distances(logits, block * BLOCK, vocabulary, peak, inverse, BLOCK)
    kept = tl.where(distance.to(tl.int32, bitcast=True) <= last, tl.exp(-distance), 0.0)
    inside = tl.cumsum(kept.to(tl.float64))
    place = tl.minimum(tl.sum((inside <= target).to(tl.int32)), tl.sum((inside < tl.max(inside)).to(tl.int32)))
    tl.store(tokens + row, (block * BLOCK + place).to(tl.int64))


def covers(params: SamplingParams) -> bool:
    """Whether the kernel knows these cuts: typical-p orders tokens by something else than likelihood."""
    return params.typical_p >= 1.0


def launch_sampling(
    logits: Tensor, tokens: Tensor, rows: Sequence[int], params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> None:
    """Draw for `rows` of logits `[B, V]` (any float, rows dense) into those places of tokens `[B]` int64.

    `uniforms` are the rows' uniform numbers in [0, 1).
    """
    table = np.array(
        [
            (row, p.temperature, p.top_k, p.top_p, p.min_p, point)
            for row, p, point in zip(rows, params, uniforms, strict=True)
        ],
        dtype=np.float64,
    )
    vocabulary = logits.shape[1]
    settings = to_device(torch.from_numpy(table), logits.device)
    with torch.cuda.device_of(logits):
        sampling_kernel[(len(rows),)](
            logits,
            tokens,
            settings,
            logits.stride(0),
            vocabulary,
            BLOCK=_BLOCK,
            BLOCKS=triton.next_power_of_2(triton.cdiv(vocabulary, _BLOCK)),
            num_warps=_WARPS,
        )
