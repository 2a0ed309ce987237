"""The GPU's kernels, in Triton: write pages, attend over pages or packed rows, combine what was split over the keys.

A tile of `attend` holds BLOCK_M rows: some consecutive queries of one segment, each with all heads that share a key
head (GROUP = HEADS // KV_HEADS), so a key is read once for all of them. It walks over its keys BLOCK_N at a time and
keeps a running maximum and sum (Milakov & Gimelshein 2018; Dao et al. 2022). Loops run to lengths that lie on the
device, and no launch depends on them: what was captured may be replayed over other lengths. Imported only where Triton
is.
"""

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triptych.model.system.float8_kernels import to_float8
from triptych.model.system.held_kernels import held

TABLE, SLOPES = tl.constexpr(1), tl.constexpr(2)  # values of BIASED; 0: nothing is added to scores
LOG2E = tl.constexpr(1.4426950408889634)  # exponentials are powers of two, as the hardware has them
_LEVELS = tl.constexpr(128.0)  # times the worth of 1 in a page of 8 bits it is not too small for float16
_TO_NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2**23: what is added to it and taken off again is a whole number


@held
@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_pages(
    key,  # [T, KV_HEADS, DIM]
    value,
    slots,  # [T]; -1: a padding row
    keys,  # [slots, KV_HEADS, DIM]
    values,
    key_scales,  # [slots, KV_HEADS] float32, where QUANTIZED
    value_scales,
    key_row,  # strides
    key_head,
    value_row,
    value_head,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUANTIZED: tl.constexpr,
    OVERLAP: tl.constexpr,  # as `triptych.model.system.held_kernels.overlap`
):
    """Grid: tokens, blocks of heads."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_D)
    there = (heads < KV_HEADS)[:, None] & (dims < DIM)[None, :]
    at_key = key + row * key_row + heads[:, None] * key_head + dims[None, :]
    at_value = value + row * value_row + heads[:, None] * value_head + dims[None, :]
    to = (slot * KV_HEADS + heads[:, None]) * DIM + dims[None, :]
    k = tl.load(at_key, mask=there, other=0.0).to(tl.float32)
    v = tl.load(at_value, mask=there, other=0.0).to(tl.float32)
    if QUANTIZED:
        k, k_scale = quantized(k, keys)
        v, v_scale = quantized(v, values)
        at_scale = slot * KV_HEADS + heads
        tl.store(key_scales + at_scale, k_scale, mask=heads < KV_HEADS)
        tl.store(value_scales + at_scale, v_scale, mask=heads < KV_HEADS)
    tl.store(keys + to, k.to(keys.dtype.element_ty), mask=there)
    tl.store(values + to, v.to(values.dtype.element_ty), mask=there)


@triton.jit
def quantized(x, pages):
    """Rows `[heads, D]` as numbers that `pages` take, up to 127 or 448, and what 1 is worth: as `LayerCache.write`."""
    most = tl.max(tl.abs(x), axis=1)
    levels = tl.full(most.shape, 127.0 if pages.dtype.element_ty == tl.int8 else 448.0, tl.float32)
    numbers = x * tl.div_rn(levels, tl.maximum(most, 1e-30))[:, None]
    worth = tl.div_rn(most, levels)
    if pages.dtype.element_ty == tl.int8:
        return (numbers + _TO_NEAREST) - _TO_NEAREST, worth
    else:
        return to_float8(numbers), worth


@triton.jit
def _segment_of(cu_seqlens_q, num_segments, tile, TILE_Q: tl.constexpr):
    """Return a tile's segment. Tiles of segment b are numbered from `cu_seqlens_q[b] // TILE_Q + b`; starts count from
    the first of them."""
    low = 0
    high = num_segments
    origin = tl.load(cu_seqlens_q).to(tl.int32)
    while low + 1 < high:
        middle = (low + high) // 2
        begun = (tl.load(cu_seqlens_q + middle).to(tl.int32) - origin) // TILE_Q + middle <= tile
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    return low


@triton.jit
def _walk(
    q,  # [M, D]
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    cu_seqlens_k,
    bias,
    peak,  # [M], with the two below what was seen so far
    total,
    mixed,  # [M, D]
    segment,
    kv_head,
    head,  # [M]
    live,  # [M]
    position,  # [M]
    low,
    high,
    scale,
    table_stride,
    reach,
    key_row,
    key_head,
    value_row,
    value_head,
    kept: tl.constexpr,  # what probabilities are rounded to
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    PAGED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BIASED: tl.constexpr,
    FACTOR: tl.constexpr,
    MASKED: tl.constexpr,  # False: whole blocks in which every query sees every key
):
    """A tile's queries over the keys from `low` to `high`."""
    dims = tl.arange(0, BLOCK_D)
    wide = dims < DIM
    if not PAGED:
        origin = tl.load(cu_seqlens_k + segment)
    for begin in range(low, high, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        within = n < high
        if PAGED:
            at_page = tables + segment.to(tl.int64) * table_stride + n // BLOCK_SIZE
            page = tl.load(at_page, mask=within, other=0) if MASKED else tl.load(at_page)
            slot = page.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
        else:
            slot = (origin + n).to(tl.int64)
        k_at = keys + slot[None, :] * key_row + kv_head * key_head + dims[:, None]
        if MASKED:
            k = tl.load(k_at, mask=within[None, :] & wide[:, None], other=0.0)  # [D, N]
        elif DIM == BLOCK_D:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=wide[:, None], other=0.0)
        if QUANTIZED:  # as below: the GPU converts float8 to bfloat16 slowly, and by way of float32 fast
            k = k.to(tl.float32)
        unit = scale * LOG2E
        if SOFTCAP > 0.0:
            unit = scale
        scores = tl.dot(q, k.to(FACTOR), input_precision="ieee") * unit  # [M, N]
        if QUANTIZED:
            scores *= tl.load(key_scales + slot * KV_HEADS + kv_head, mask=within, other=0.0)[None, :]
        if SOFTCAP > 0.0:  # tanh x = 1 - 2 / (exp(2 x) + 1)
            power = tl.exp2(scores * (2.0 * LOG2E / SOFTCAP))
            scores = (SOFTCAP * LOG2E) * (1.0 - 2.0 / (power + 1.0))
        if BIASED == SLOPES:
            away = (n[None, :] - position[:, None]).to(tl.float32)
            scores += away * tl.load(bias + head).to(tl.float32)[:, None] * LOG2E
        elif BIASED == TABLE:
            distance = tl.minimum(tl.maximum(n[None, :] - position[:, None], -reach), reach)
            bias_at = bias + head[:, None] * (2 * reach + 1) + reach + distance
            scores += tl.load(bias_at).to(tl.float32) * LOG2E
        if MASKED:
            seen = within[None, :] & live[:, None]
            if CAUSAL:
                seen = seen & (n[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (tl.abs(position[:, None] - n[None, :]) < WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        safe = higher
        if MASKED:
            safe = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: 2**(-inf - 0), not inf - inf
        p = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(p, axis=1)
        if QUANTIZED:  # V stays as it is stored: its numbers are exact in every type, and only p is rounded
            worth = tl.load(value_scales + slot * KV_HEADS + kv_head, mask=within, other=0.0)
            p *= (worth * _LEVELS)[None, :]
        v_at = values + slot[:, None] * value_row + kv_head * value_head + dims[None, :]
        if MASKED:
            v = tl.load(v_at, mask=within[:, None] & wide[None, :], other=0.0)  # [N, D]
        elif DIM == BLOCK_D:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=wide[None, :], other=0.0)
        if QUANTIZED:
            v = v.to(tl.float32)
        mixed = tl.dot(p.to(kept).to(FACTOR), v.to(FACTOR), mixed * shrink[:, None], input_precision="ieee")
        peak = higher
    return peak, total, mixed


@held
@triton.jit(
    do_not_specialize=["num_segments", "table_stride", "reach", "least_share"],
    do_not_specialize_on_alignment=["tables", "cu_seqlens_q", "cu_seqlens_k", "kv_lens"],
)
def attend(
    query,  # [T, HEADS, DIM]
    keys,  # rows [*, KV_HEADS, DIM]: slots of the pool where PAGED, else packed
    values,
    key_scales,  # [slots, KV_HEADS] float32, where QUANTIZED
    value_scales,
    tables,  # [B, M] blocks, where PAGED
    cu_seqlens_q,  # [B + 1], unless SINGLE
    cu_seqlens_k,  # [B + 1], unless PAGED
    kv_lens,  # [B], as the other lengths of 32 or 64 bits
    bias,  # where BIASED [HEADS, 2 * reach + 1] to add by distance, or [HEADS] slopes, times the distance
    sinks,  # [HEADS] scores without values, or None
    out,  # [T, HEADS, DIM]; where SPLIT [T, HEADS, splits, DIM] float32
    weight,  # [T, HEADS, splits] float32, where SPLIT: the base-2 logarithm of what each part's sum is of the whole
    scale,
    num_segments,
    table_stride,
    reach,
    least_share,  # keys of a part at least, where SPLIT: as many as a whole number of BLOCK_N
    query_row,  # strides
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # slots of a page
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # 0.0: none
    CAUSAL: tl.constexpr,
    PAGED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BIASED: tl.constexpr,
    SINGLE: tl.constexpr,  # every segment has one query
    SPLIT: tl.constexpr,
    FACTOR: tl.constexpr,  # the type of a product's factors: the query's, float32 in the interpreter
    OVERLAP: tl.constexpr,
):
    """Grid: tiles, key heads, parts of the keys; unless SINGLE tiles and key heads in one, tiles with most keys first.

    What begins last would otherwise have most keys of a causal prompt, while most processors have nothing to do.
    """
    if OVERLAP:
        gdc_launch_dependents()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILE_Q: tl.constexpr = 1 if SINGLE else BLOCK_M // GROUP
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if SINGLE:
        segment = tile
        start = tile
        q_len = 1
        first = 0  # of the tile's queries, within the segment
    else:
        kv_head = tile % KV_HEADS
        tile = (tl.num_programs(0) - 1 - tile) // KV_HEADS
        segment = _segment_of(cu_seqlens_q, num_segments, tile, TILE_Q)
        start = tl.load(cu_seqlens_q + segment).to(tl.int32)
        q_len = tl.load(cu_seqlens_q + segment + 1).to(tl.int32) - start
        begin_tile = (start - tl.load(cu_seqlens_q).to(tl.int32)) // TILE_Q + segment
        first = (tile - begin_tile) * TILE_Q
        if first >= q_len:
            return  # others do not: rows of padding are a segment too, so a launch always waits for the one before
    kv_len = tl.load(kv_lens + segment).to(tl.int32)  # wide ones would take twice the registers, [M, N] of them

    if OVERLAP:
        gdc_wait()  # lengths do not come from the kernel before, queries and keys do

    # Which keys any query of the tile sees.
    first_position = kv_len - q_len + first
    last_position = tl.minimum(first_position + TILE_Q, kv_len) - 1
    low = 0
    high = kv_len
    if CAUSAL:
        high = last_position + 1
    elif WINDOW > 0:
        high = tl.minimum(kv_len, last_position + WINDOW)
    if WINDOW > 0:
        low = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    if SPLIT:
        share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BLOCK_N), tl.num_programs(2)) * BLOCK_N
        share = tl.maximum(share, least_share)
        low += part * share
        high = tl.minimum(high, low + share)

    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    at = first + rows // GROUP  # which query of the segment
    head = kv_head * GROUP + rows % GROUP
    live = (rows < TILE_Q * GROUP) & (at < q_len)
    position = first_position + rows // GROUP
    token = (start + at).to(tl.int64)
    wide = dims < DIM
    q_at = query + token[:, None] * query_row + head[:, None] * query_head + dims[None, :]
    q = tl.load(q_at, mask=live[:, None] & wide[None, :], other=0.0).to(FACTOR)
    kept: tl.constexpr = query.dtype.element_ty

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:  # the first part has them
        begun = live & (part == 0)
        peak = tl.where(begun, tl.load(sinks + head, mask=begun, other=0.0).to(tl.float32) * LOG2E, peak)
        total = tl.where(begun, 1.0, total)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if not (SINGLE or WINDOW > 0 or BLOCK_D > 128):  # a single query waits for its keys; wide heads would spill
        seen_by_all = high
        if CAUSAL:
            seen_by_all = tl.minimum(high, first_position + 1)
        whole = low + tl.maximum(seen_by_all - low, 0) // BLOCK_N * BLOCK_N
        peak, total, mixed = _walk(
            q, keys, values, key_scales, value_scales, tables, cu_seqlens_k, bias, peak, total, mixed,
            segment, kv_head, head, live, position, low, whole, scale, table_stride, reach,
            key_row, key_head, value_row, value_head, kept, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D,
            WINDOW, SOFTCAP, CAUSAL, PAGED, QUANTIZED, BIASED, FACTOR, False,
        )  # fmt: skip
        low = whole
    peak, total, mixed = _walk(
        q, keys, values, key_scales, value_scales, tables, cu_seqlens_k, bias, peak, total, mixed,
        segment, kv_head, head, live, position, low, high, scale, table_stride, reach,
        key_row, key_head, value_row, value_head, kept, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        WINDOW, SOFTCAP, CAUSAL, PAGED, QUANTIZED, BIASED, FACTOR, True,
    )  # fmt: skip

    mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]  # a row that sees nothing is zeros
    if QUANTIZED:
        mixed *= 1.0 / _LEVELS
    to = token * HEADS + head
    stored = live[:, None] & wide[None, :]
    if SPLIT:
        to = to * tl.num_programs(2) + part
        some = total > 0.0  # nothing of an empty part is read
        tl.store(weight + to, tl.where(some, peak + tl.log2(tl.where(some, total, 1.0)), float("-inf")), mask=live)
        stored = stored & some[:, None]
    tl.store(out + to[:, None] * DIM + dims[None, :], mixed.to(out.dtype.element_ty), mask=stored)


@held
@triton.jit(
    do_not_specialize_on_alignment=["weight"]
)  # it is not aligned for prompts after decoding rows with few, odd heads
def combine(
    parts,  # [T * HEADS, SPLITS, DIM] float32
    weight,  # [T * HEADS, SPLITS] float32
    out,  # [T * HEADS, DIM]
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row and head a program: the parts of its keys, each with its share (Dao et al. 2023, flash decoding)."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    logs = tl.load(weight + row * SPLITS + splits)
    peak = tl.max(logs, axis=0)
    share = tl.exp2(logs - tl.where(peak == float("-inf"), 0.0, peak))
    known = (logs > float("-inf"))[:, None] & (dims < DIM)[None, :]
    mixed = tl.load(parts + (row * SPLITS + splits[:, None]) * DIM + dims[None, :], mask=known, other=0.0)
    total = tl.sum(share, axis=0)
    result = tl.sum(mixed * share[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * DIM + dims, result.to(out.dtype.element_ty), mask=dims < DIM)


INTERPRETED = not isinstance(attend, triton.JITFunction)
