"""A Triton kernel between the projections and attention: norms and rotations of heads, and the write into pages.

One launch does what would be a norm of queries, one of keys, a rotation and `write_pages`. Everything is computed in
float32 and rounded once. Imported only where Triton is.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triptych.model.attention.base import HeadNorm, Preparation
from triptych.model.attention.triton_kernels import quantized
from triptych.model.cache.kv_cache import LayerCache
from triptych.model.system.held_kernels import cdiv, held, next_power_of_2, overlap

_ELEMENTS = 2048  # of a program
_RMS, _LAYER = tl.constexpr(1), tl.constexpr(2)  # values of NORM; 0: there is none
_UNALIGNED = ["slots", "cos", "sin", "query_gain", "query_bias", "key_gain", "key_bias"]  # views of larger tensors


@triton.jit
def _normed(x, gain, bias, at, inside, mean, factor, NORM: tl.constexpr):
    """Apply a norm whose statistics are known to columns `at` of the rows `x`."""
    if NORM == _LAYER:
        x = x - mean[:, None]
    x = x * factor[:, None] * tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        x += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def _prepared(
    rows,  # [heads, BLOCK_D] pointers at the first column
    there,  # [heads]
    row,
    cos,  # [T, TURNED]
    sin,
    gain,
    bias,
    eps,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
):
    """Return the heads of one token, normalised and turned by its position: `[heads, BLOCK_D]` float32."""
    HALF: tl.constexpr = TURNED // 2
    dims = tl.arange(0, BLOCK_D)
    inside = dims < DIM
    mask = there[:, None] & inside[None, :]
    x = tl.load(rows + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.zeros_like(tl.sum(x, axis=1))
    factor = mean
    if NORM > 0:
        if NORM == _LAYER:
            mean = tl.sum(x, axis=1) / DIM
        apart = tl.where(mask, x - mean[:, None], 0.0)
        factor = tl.rsqrt(tl.sum(apart * apart, axis=1) / DIM + eps)
        x = _normed(x, gain, bias, dims, inside, mean, factor, NORM)
    if TURNED > 0:
        turns = dims < TURNED
        if INTERLEAVED:
            first = dims % 2 == 0
            partner = tl.where(turns, dims ^ 1, dims)
        else:
            first = dims < HALF
            partner = tl.where(first, dims + HALF, tl.where(turns, dims - HALF, dims))
        y = tl.load(rows + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORM > 0:
            y = _normed(y, gain, bias, partner, inside, mean, factor, NORM)
        c = tl.load(cos + row * TURNED + dims, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + row * TURNED + dims, mask=turns, other=0.0).to(tl.float32)
        x = x * c[None, :] + y * tl.where(first, -s, s)[None, :]
    return x


@triton.jit
def _store_queries(
    query, prepared, row, block, cos, sin, gain, bias, eps, query_row, query_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Prepare a block of a token's query heads."""
    heads, dims = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    there = heads < HEADS
    rows = query + row * query_row + heads[:, None] * query_head
    q = _prepared(rows, there, row, cos, sin, gain, bias, eps, DIM, TURNED, INTERLEAVED, BLOCK_D, NORM)
    to = prepared + (row * HEADS + heads[:, None]) * DIM + dims[None, :]
    tl.store(to, q.to(prepared.dtype.element_ty), mask=there[:, None] & (dims < DIM)[None, :])


@triton.jit
def _store_keys(
    key, value, keys, values, key_scales, value_scales, slots, row, block, cos, sin, gain, bias, eps,
    key_row, key_head, value_row, value_head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, NORM: tl.constexpr, PAGED: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Prepare a block of a token's key heads; with pages write them there, and the values."""
    heads, dims = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    there = heads < KV_HEADS
    slot = row
    if PAGED:
        slot = tl.load(slots + row).to(tl.int64)
        there = there & (slot >= 0)
    k_at = key + row * key_row + heads[:, None] * key_head
    k = _prepared(k_at, there, row, cos, sin, gain, bias, eps, DIM, TURNED, INTERLEAVED, BLOCK_D, NORM)
    stored = there[:, None] & (dims < DIM)[None, :]
    at = slot * KV_HEADS + heads
    to = at[:, None] * DIM + dims[None, :]
    if PAGED:
        v_at = value + row * value_row + heads[:, None] * value_head + dims[None, :]
        v = tl.load(v_at, mask=stored, other=0.0).to(tl.float32)
        if QUANTIZED:
            k, k_scale = quantized(tl.where(stored, k, 0.0), keys)
            v, v_scale = quantized(v, values)
            tl.store(key_scales + at, k_scale, mask=there)
            tl.store(value_scales + at, v_scale, mask=there)
        tl.store(values + to, v.to(values.dtype.element_ty), mask=stored)
    tl.store(keys + to, k.to(keys.dtype.element_ty), mask=stored)


@held
@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def prepare_heads(
    query,  # [T, HEADS, DIM]
    key,  # [T, KV_HEADS, DIM]
    value,
    prepared,  # [T, HEADS, DIM] the queries to attend with
    keys,  # [slots, KV_HEADS, DIM] pages; unless PAGED [T, KV_HEADS, DIM] the keys to attend to
    values,  # pages, where PAGED
    key_scales,  # [slots, KV_HEADS] float32, where QUANTIZED
    value_scales,
    slots,  # [T], where PAGED; -1: a padding row
    cos,  # [T, TURNED]
    sin,
    query_gain,  # [DIM], with the three below where NORM
    query_bias,
    key_gain,
    key_bias,
    query_eps,
    key_eps,
    query_row,  # strides
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,  # the number of first dimensions that are rotated; 0: none
    INTERLEAVED: tl.constexpr,  # pairs are neighbours, not a half of TURNED apart
    BLOCK_Q: tl.constexpr,  # heads of a program
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    PAGED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    OVERLAP: tl.constexpr,  # as `triptych.model.system.held_kernels.overlap`
):
    """Grid: tokens, blocks of query heads then of key heads."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    QUERY_BLOCKS: tl.constexpr = (HEADS + BLOCK_Q - 1) // BLOCK_Q
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if block < QUERY_BLOCKS:
        _store_queries(
            query, prepared, row, block, cos, sin, query_gain, query_bias, query_eps, query_row, query_head,
            HEADS, DIM, TURNED, INTERLEAVED, BLOCK_Q, BLOCK_D, NORM,
        )  # fmt: skip
    else:
        _store_keys(
            key, value, keys, values, key_scales, value_scales, slots, row, block - QUERY_BLOCKS,
            cos, sin, key_gain, key_bias, key_eps, key_row, key_head, value_row, value_head,
            KV_HEADS, DIM, TURNED, INTERLEAVED, BLOCK_K, BLOCK_D, NORM, PAGED, QUANTIZED,
        )  # fmt: skip


def prepare(
    query: Tensor,  # [T, H, D], the last dimension dense, as of the two below
    key: Tensor,  # [T, K, D]
    value: Tensor,
    preparation: Preparation,
    pages: LayerCache | None,
    slots: Tensor | None,  # [T], with pages
) -> tuple[Tensor, Tensor]:
    """Return the queries to attend with, and the keys `[T, K, D]`; with pages those are written, and so are values.

    What comes back as keys with pages are the pages.
    """
    (num_rows, num_heads, dim), num_kv_heads = query.shape, key.shape[1]
    prepared = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    keys = pages.keys if pages is not None else torch.empty(key.shape, dtype=key.dtype, device=key.device)
    cos, sin = preparation.rotary or (None, None)
    query_norm, key_norm = preparation.query_norm, preparation.key_norm
    block_dim, block_q, block_k, blocks = _blocks(num_heads, num_kv_heads, dim)
    prepare_heads[(num_rows, blocks)](
        query,
        key,
        value,
        prepared,
        keys,
        pages.values if pages is not None else None,
        *((pages.scales if pages is not None else None) or (None, None)),
        slots if pages is not None else None,
        cos,
        sin,
        *_weights(query_norm),
        *_weights(key_norm),
        query_norm.eps if query_norm is not None else 0.0,
        key_norm.eps if key_norm is not None else 0.0,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        DIM=dim,
        TURNED=cos.shape[-1] if cos is not None else 0,
        INTERLEAVED=preparation.interleaved,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        BLOCK_D=block_dim,
        NORM=_kind(query_norm),
        PAGED=pages is not None,
        QUANTIZED=pages is not None and pages.scales is not None,
        **overlap(),
        enable_fp_fusion=False,  # as in `write_pages`
    )
    return prepared, keys


@cache
def _blocks(num_heads: int, num_kv_heads: int, dim: int) -> tuple[int, int, int, int]:
    """Return the columns, query heads and key heads of a program, and the number of programs of a token."""
    block_dim = next_power_of_2(dim)
    most = max(1, _ELEMENTS // block_dim)
    block_q, block_k = (min(next_power_of_2(count), most) for count in (num_heads, num_kv_heads))
    return block_dim, block_q, block_k, cdiv(num_heads, block_q) + cdiv(num_kv_heads, block_k)


def _weights(norm: HeadNorm | None) -> tuple[Tensor | None, Tensor | None]:
    return (norm.gain, norm.bias) if norm is not None else (None, None)


def _kind(norm: HeadNorm | None) -> int:
    if norm is None:
        return 0
    kind: int = (_LAYER if norm.centred else _RMS).value
    return kind
