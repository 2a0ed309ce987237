"""Triton's product of rows with the matrices of their experts. Import this module only if Triton is installed.

Rows come in the order of their experts. How many each expert has is read on the device alone: a launch depends on the
number of rows and of experts, so it can be captured once and replayed over other routes.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from triptych.model.linear.base import FEW, SEVERAL, Tiles
from triptych.model.system.held_kernels import cdiv, held


@triton.jit
def _expert_of(starts, num_experts, tile, BLOCK_M: tl.constexpr):
    """Return the expert of a tile: those of expert e are numbered from `starts[e] // BLOCK_M + e`."""
    low = 0
    high = num_experts
    while low + 1 < high:
        middle = (low + high) // 2
        begun = tl.load(starts + middle) // BLOCK_M + middle <= tile
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    return low


@held
@triton.jit(do_not_specialize_on_alignment=["out"])
def experts_product(
    x,  # [R, K]
    weight,  # [experts, N, K]
    bias,  # [experts, N] or None
    starts,  # [experts + 1] int32
    out,  # [R, N]
    num_experts,
    N,
    K,
    x_stride,
    EVEN: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FACTOR: tl.constexpr,  # the type of a product's factors: that of x, float32 in the interpreter
):
    """`out = x @ weight[expert].T + bias[expert]`. Grid: blocks of outputs, tiles of rows of one expert."""
    tile = tl.program_id(1)
    expert = _expert_of(starts, num_experts, tile, BLOCK_M)
    begin, end = tl.load(starts + expert), tl.load(starts + expert + 1)
    m = begin + (tile - begin // BLOCK_M - expert) * BLOCK_M + tl.arange(0, BLOCK_M)
    if begin + (tile - begin // BLOCK_M - expert) * BLOCK_M >= end:
        return
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    live, there = m < end, n < N
    row = tl.where(live, m, begin).to(tl.int64)  # what is beyond an edge reads the first one's, and is not stored
    output = expert.to(tl.int64) * N + tl.where(there, n, 0)
    x_at = x + row[:, None] * x_stride + k[None, :]
    w_at = weight + output[None, :] * K + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, K, BLOCK_K):
        if EVEN:
            a, b = tl.load(x_at + first), tl.load(w_at + first)
        else:
            a = tl.load(x_at + first, mask=(k < K - first)[None, :], other=0.0)
            b = tl.load(w_at + first, mask=(k < K - first)[:, None], other=0.0)
        total = tl.dot(a.to(FACTOR), b.to(FACTOR), total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + output).to(tl.float32)[None, :]
    at = out + row[:, None] * N + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=live[:, None] & there[None, :])


INTERPRETED = not isinstance(experts_product, triton.JITFunction)
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def choose_tiles(rows: int, experts: int, dtype: torch.dtype) -> Tiles:
    """Choose the tiles by the mean number of rows of an expert, by hand, within 99 KiB of shared memory."""
    each = rows / experts
    if dtype is torch.float32:  # multiplied without tensor cores
        return Tiles(FEW, 32, 32, 4, 2) if each <= FEW else Tiles(32, 32, 32, 4, 2)
    if each <= FEW:
        return Tiles(FEW, 32, 128, 4, 4)
    if each <= SEVERAL:
        return Tiles(SEVERAL, 64, 64, 4, 4)
    return Tiles(128, 64, 64, 8, 3)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor,
    tiles: Tiles | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rows `[R, N]` of rows `[R, K]`, which `starts` `[E + 1]` parts among the matrices `[E, N, K]`.

    Rows after the last expert's stay as they are in `out`.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    (rows, width), (experts, outputs, _) = x.shape, weight.shape
    tiles = tiles or choose_tiles(rows, experts, x.dtype)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if out is None else out
    experts_product[(cdiv(outputs, tiles.outputs), rows // tiles.rows + experts)](
        x,
        weight,
        bias,
        starts,
        out,
        experts,
        outputs,
        width,
        x.stride(0),
        EVEN=width % tiles.inputs == 0,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.outputs,
        BLOCK_K=tiles.inputs,
        FACTOR=tl.float32 if INTERPRETED else _TYPES[x.dtype],
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out
