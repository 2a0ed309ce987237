"""Triton kernels choose one token for each row: the likeliest, or by temperature, top-k, top-p, min-p and inversion.

The results are those of `triptych.model.sampling.random_sampling`, up to the rounding of probabilities: truncation
keeps the tokens whose logit reaches a threshold, ties included, and the row's uniform number selects one of them in the
vocabulary's order. Nothing is sorted. The threshold, as a distance below the row's maximum, is found by an eight-way
search on the distance's bits: positive floats are in the order of their bits. No pass writes to memory, and the host
waits for none. Import this module only if Triton is installed.

Shapes: B rows of logits, N of them sampled, V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import triton
from torch import Tensor
from triton import language as tl

from triptych.model.api.sampling_params import SAMPLING, SamplingParams
from triptych.model.system.devices import to_device
from triptych.model.system.held_kernels import cdiv, held, next_power_of_2

# Tokens of an iteration, and warps. On an H200, 1 to 64 rows of 128,256 logits with top-p take 268 us, and 340 us in
# blocks of 2,048 with 8 warps; 256 rows take 557 and 547 us.
_BLOCK = 4096
_WARPS = 16
_GREEDY_BLOCK = 2048  # of the search for the largest logit alone
_GREEDY_WARPS = 8
_STAGES = tl.constexpr(2)  # the next block is loaded during the work on this one; with 3, float32 spills registers
_COUNTERS = 1024  # rows that may be searched in parts
_SETTINGS = tl.constexpr(6)  # columns: row, temperature, top-k, top-p, min-p, uniform number
_INFINITY = tl.constexpr(0x7F800000)  # the bits of infinity, the largest distance
_COMPUTED = {"temperature", "top_k", "top_p", "min_p"}
_NOT_COMPUTED = [(name, one.default) for name, one in SAMPLING.items() if one.row.draws and name not in _COMPUTED]


@triton.jit
def _distances(logits, begin, vocabulary, peak, inverse, BLOCK: tl.constexpr):
    """Return the distances of a block's logits below `peak`, divided by the temperature; infinity beyond the end."""
    at = begin + tl.arange(0, BLOCK)
    x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    return (peak - x) * inverse


@triton.jit
def _measure(distance, COUNTS: tl.constexpr):
    """Return 1 for each token where COUNTS, else its weight exp(-distance)."""
    if COUNTS:
        return tl.full(distance.shape, 1.0, tl.float32)
    else:
        return tl.exp(-distance)


@triton.jit
def _search(logits, vocabulary, peak, inverse, wanted, last, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bits of the smallest distance within which the tokens' measure reaches `wanted`.

    Within `last` it must reach it. The result may be larger than the true distance if no token lies in between.
    """
    low = -1  # the largest distance known to be too small
    under = 0.0  # the measure within `low`
    over = float("inf")  # the measure within `last`
    smallest = 0.0  # the measure of a single token at distance `last`
    coarse = 1
    while (last - low > 1) & (over - under > 1.5 * smallest):
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
        for begin in tl.range(0, vocabulary, BLOCK, num_stages=_STAGES):
            distance = _distances(logits, begin, vocabulary, peak, inverse, BLOCK)
            bits, measure = distance.to(tl.int32, bitcast=True), _measure(distance, COUNTS)
            s1 += tl.where(bits <= t1, measure, 0.0)
            s2 += tl.where(bits <= t2, measure, 0.0)
            s3 += tl.where(bits <= t3, measure, 0.0)
            s4 += tl.where(bits <= t4, measure, 0.0)
            s5 += tl.where(bits <= t5, measure, 0.0)
            s6 += tl.where(bits <= t6, measure, 0.0)
            s7 += tl.where(bits <= t7, measure, 0.0)
        # From the largest to the smallest distance: the bracket is narrowed from above, then from below.
        last, low, over, under = _narrow(last, low, over, under, t7, tl.sum(s7), wanted)
        last, low, over, under = _narrow(last, low, over, under, t6, tl.sum(s6), wanted)
        last, low, over, under = _narrow(last, low, over, under, t5, tl.sum(s5), wanted)
        last, low, over, under = _narrow(last, low, over, under, t4, tl.sum(s4), wanted)
        last, low, over, under = _narrow(last, low, over, under, t3, tl.sum(s3), wanted)
        last, low, over, under = _narrow(last, low, over, under, t2, tl.sum(s2), wanted)
        last, low, over, under = _narrow(last, low, over, under, t1, tl.sum(s1), wanted)
        smallest = 1.0 if COUNTS else tl.exp(-last.to(tl.float32, bitcast=True))
    return last


@triton.jit
def _narrow(last, low, over, under, probe, measure, wanted):
    """Narrow the bracket (low, last] by the measure of the tokens within distance `probe`."""
    lowers_last = (measure >= wanted) & (probe < last)
    raises_low = (measure < wanted) & (probe > low)
    return (
        tl.where(lowers_last, probe, last),
        tl.where(raises_low, probe, low),
        tl.where(lowers_last, measure, over),
        tl.where(raises_low, measure, under),
    )


@triton.jit
def _bits(number: tl.constexpr):
    return tl.full([], number, tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _within(logits, vocabulary, peak, inverse, last, BLOCK: tl.constexpr):
    """Return the weight and the number of the tokens within distance `last`."""
    weight = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, vocabulary, BLOCK, num_stages=_STAGES):
        distance = _distances(logits, begin, vocabulary, peak, inverse, BLOCK)
        inside = distance.to(tl.int32, bitcast=True) <= last
        weight += tl.where(inside, tl.exp(-distance), 0.0)
        count += tl.where(inside, 1.0, 0.0)
    return tl.sum(weight), tl.sum(count)


@held
@triton.jit
def sampling_kernel(
    logits,  # [B, V]
    tokens,  # [B], written
    settings,  # [N, 6] float64
    row_stride,
    vocabulary,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of two, at least the number of blocks
):
    """Sample a token for each row of `settings`; grid: [N]."""
    setting = settings + tl.program_id(0) * _SETTINGS
    row = tl.load(setting).to(tl.int64)
    logits += row * row_stride
    inverse = (1.0 / tl.load(setting + 1)).to(tl.float32)
    top_k = tl.load(setting + 2).to(tl.int32)
    top_p = tl.load(setting + 3).to(tl.float32)
    min_p = tl.load(setting + 4).to(tl.float32)

    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in tl.range(0, vocabulary, BLOCK, num_stages=_STAGES):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, x)
    peak = tl.max(highest)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # every token is banned

    last = tl.full([], _INFINITY, tl.int32)  # bits of the largest distance that is kept
    if (top_k > 0) & (top_k < vocabulary):
        last = _search(logits, vocabulary, peak, inverse, top_k.to(tl.float32), last, True, BLOCK)
    if top_p < 1.0:
        weight, count = _within(logits, vocabulary, peak, inverse, last, BLOCK)
        if (top_k > 0) & (count > top_k):  # of ties at the last distance only as many as make k count in the total
            weight -= (count - top_k) * tl.exp(-last.to(tl.float32, bitcast=True))
        last = _search(logits, vocabulary, peak, inverse, top_p * weight, last, False, BLOCK)
    if min_p > 0.0:
        last = tl.minimum(last, tl.abs(tl.log(min_p)).to(tl.int32, bitcast=True))

    index = tl.arange(0, BLOCKS)
    sums = tl.zeros([BLOCKS], tl.float64)
    for begin in tl.range(0, vocabulary, BLOCK, num_stages=_STAGES):
        distance = _distances(logits, begin, vocabulary, peak, inverse, BLOCK)
        kept = tl.where(distance.to(tl.int32, bitcast=True) <= last, tl.exp(-distance), 0.0)
        sums = tl.where(index == begin // BLOCK, tl.sum(kept).to(tl.float64), sums)
    cumulative = tl.cumsum(sums)
    total = tl.max(cumulative)
    target = tl.load(setting + 5) * total
    # The first block that exceeds the target, but never one after the last weight above 0.
    block = tl.minimum(tl.sum((cumulative <= target).to(tl.int32)), tl.sum((cumulative < total).to(tl.int32)))
    target -= tl.sum(tl.where(index < block, sums, 0.0))
    distance = _distances(logits, block * BLOCK, vocabulary, peak, inverse, BLOCK)
    kept = tl.where(distance.to(tl.int32, bitcast=True) <= last, tl.exp(-distance), 0.0)
    inside = tl.cumsum(kept.to(tl.float64))
    offset = tl.minimum(tl.sum((inside <= target).to(tl.int32)), tl.sum((inside < tl.max(inside)).to(tl.int32)))
    tl.store(tokens + row, (block * BLOCK + offset).to(tl.int64))


@held
@triton.jit
def greedy_kernel(
    logits,  # [B, V]
    tokens,  # [B] int64, written
    keys,  # [B, PARTS] int64, or None for one part
    finished,  # [B] int32: parts that are done, zeros between launches; None for one part
    row_stride,
    vocabulary,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two
):
    """Find each row's largest logit, the first of equals; grid: [B, PARTS]. The last part of a row to finish joins."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * row_stride
    lanes = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = part * BLOCK + lanes
    for begin in tl.range(part * BLOCK, vocabulary, PARTS * BLOCK, num_stages=_STAGES):
        at = begin + lanes
        x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        where = tl.where(x > highest, at, where)
        highest = tl.maximum(highest, x)
    peak = tl.max(highest)
    first = tl.min(tl.where(highest == peak, where, vocabulary))
    first = tl.minimum(first, vocabulary - 1)  # a row of NaN
    if PARTS == 1:
        tl.store(tokens + row, first.to(tl.int64))
    else:  # a key orders by logit, then by how early the token is
        bits = (peak + 0.0).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        tl.store(keys + row * PARTS + part, (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - first))
        tl.debug_barrier()
        if tl.atomic_add(finished + row, 1, sem="acq_rel") == PARTS - 1:
            best = tl.max(tl.load(keys + row * PARTS + tl.arange(0, PARTS), cache_modifier=".cg"))
            tl.store(tokens + row, 0x7FFFFFFF - (best & 0xFFFFFFFF))
            tl.store(finished + row, 0)


def launch_greedy(logits: Tensor, tokens: Tensor, parts: int) -> None:
    """Write the first of the largest logits of each row `[B, V]` (any float type, dense rows) to tokens `[B]` int64.

    `parts` programs search a row, a power of two; more than one only for up to 1,024 rows.
    """
    rows, vocabulary = logits.shape
    keys = finished = None
    if parts > 1:
        assert rows <= _COUNTERS
        keys = torch.empty(rows * parts, dtype=torch.int64, device=logits.device)
        finished = _counters(logits.device)
    greedy_kernel[(rows, parts)](
        logits,
        tokens,
        keys,
        finished,
        logits.stride(0),
        vocabulary,
        BLOCK=_GREEDY_BLOCK,
        PARTS=parts,
        num_warps=_GREEDY_WARPS,
    )


@cache
def _counters(device: torch.device) -> Tensor:
    """Return zeros that launches count finished parts in, and leave as zeros; those of a device follow each other."""
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


def covers(params: SamplingParams) -> bool:
    """Return whether the kernel computes all that these parameters ask for."""
    return all(getattr(params, name) == default for name, default in _NOT_COMPUTED)


def launch_sampling(
    logits: Tensor, tokens: Tensor, rows: Sequence[int], params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> None:
    """Sample a token for each of `rows` of logits `[B, V]` (any float type, dense rows) into tokens `[B]` int64.

    `uniforms` are the rows' uniform numbers in [0, 1).
    """
    table = np.array(
        [
            (row, p.temperature, p.top_k, p.top_p, p.min_p, uniform)
            for row, p, uniform in zip(rows, params, uniforms, strict=True)
        ],
        dtype=np.float64,
    )
    vocabulary = logits.shape[1]
    settings = to_device(torch.from_numpy(table), logits.device)
    sampling_kernel[(len(rows),)](
        logits,
        tokens,
        settings,
        logits.stride(0),
        vocabulary,
        BLOCK=_BLOCK,
        BLOCKS=next_power_of_2(cdiv(vocabulary, _BLOCK)),
        num_warps=_WARPS,
    )
