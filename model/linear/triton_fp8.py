"""Triton kernels of fp8 projections: quantise activations, multiply. Import this module only if Triton is installed.

Products are summed over 128 or 256 inputs at a time, each such sum then in float32: the tensor cores of Hopper keep
14 bits of a longer sum. Nothing of a launch depends on a value on the device.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from triptych.model.linear.base import FEW, SEVERAL, Tiles
from triptych.model.system.float8_kernels import to_float8
from triptych.model.system.held_kernels import cdiv, held, next_power_of_2

_GROUPS = 16  # groups that a program quantises
_MOST = tl.constexpr(448.0)  # of float8_e4m3fn


@held
@triton.jit
def quantize(
    x,  # [M, K]
    numbers,  # [M, K] float8
    scales,  # [M, groups] float32
    K,
    groups,
    row_stride,
    GROUP: tl.constexpr,  # inputs that share a scale; 0: all
    BLOCK_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,  # of a group, a power of two
):
    """Grid: rows, blocks of groups."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    within = tl.arange(0, WIDTH)
    if GROUP > 0:
        at = group[:, None] * GROUP + within[None, :]
        there = (within < GROUP)[None, :] & (at < K)
    else:
        at = group[:, None] * K + within[None, :]
        there = (within < K)[None, :] & (group < groups)[:, None]
    values = tl.load(x + row * row_stride + at, mask=there, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(values), axis=1)
    levels = tl.full(most.shape, _MOST, tl.float32)
    rounded = to_float8(values * tl.div_rn(levels, tl.maximum(most, 1e-30))[:, None])
    tl.store(numbers + row * K + at, rounded.to(numbers.dtype.element_ty), mask=there)
    tl.store(scales + row * groups + group, tl.div_rn(most, levels), mask=group < groups)


@held
@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["out"])
def scaled_product(
    x,  # [M, K] float8
    x_scales,  # [M, groups] float32
    weight,  # [N, K] float8
    weight_scales,  # [ceil(N / SCALE_OUTPUTS), groups] float32
    bias,  # [N] or None
    out,  # [M, N]
    M,
    N,
    K,
    groups,
    SCALE_OUTPUTS: tl.constexpr,  # outputs that share a scale
    SCALE_INPUTS: tl.constexpr,  # inputs that share a scale, a multiple of BLOCK_K; 0: all
    EVEN: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`out = x @ weight.T + bias` of scaled numbers. Grid: blocks of outputs, blocks of rows."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    live, there = m < M, n < N
    row = tl.where(live, m, 0).to(tl.int64)  # what is beyond an edge reads the first one's numbers, and is not stored
    output = tl.where(there, n, 0).to(tl.int64)
    x_at = x + row[:, None] * K + k[None, :]
    w_at = weight + output[None, :] * K + k[:, None]
    x_scale_at = x_scales + row * groups
    w_scale_at = weight_scales + output // SCALE_OUTPUTS * groups
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, K, BLOCK_K):
        if EVEN:
            a, b = tl.load(x_at + begin), tl.load(w_at + begin)
        else:
            a = tl.load(x_at + begin, mask=(k < K - begin)[None, :], other=0.0)
            b = tl.load(w_at + begin, mask=(k < K - begin)[:, None], other=0.0)
        part = tl.dot(a, b)
        if SCALE_INPUTS > 0:
            group = begin // SCALE_INPUTS
            part = part * (tl.load(x_scale_at + group)[:, None] * tl.load(w_scale_at + group)[None, :])
        total += part
    if SCALE_INPUTS == 0:
        total = total * (tl.load(x_scale_at)[:, None] * tl.load(w_scale_at)[None, :])
    if bias is not None:
        total += tl.load(bias + output).to(tl.float32)[None, :]
    at = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=live[:, None] & there[None, :])


def choose_tiles(rows: int, group: int) -> Tiles:
    """Choose the tiles for `rows` rows, by hand, within 99 KiB of shared memory; `group` inputs share a scale, 0: all.

    Up to `FEW` rows they do not depend on the number of rows.
    """
    if rows <= FEW:
        depth = min(group or 256, 256)
        return Tiles(FEW, 16, depth, 2, 6 if depth < 256 else 5)
    depth = min(group or 128, 128)
    if rows <= SEVERAL:
        return Tiles(SEVERAL, 64, depth, 4, 4)
    return Tiles(128, 64, depth, 8, 4) if group else Tiles(128, 128, depth, 8, 3)  # two sums in registers, or one


def quantize_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Rows `[M, K]` as float8 `[M, K]` with a float32 scale for each `group` inputs, `[M, groups]`; 0: one for all."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, width = x.shape
    groups = -(-width // group) if group else 1
    numbers = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    block = min(next_power_of_2(groups), _GROUPS)
    quantize[(rows, cdiv(groups, block))](
        x,
        numbers,
        scales,
        width,
        groups,
        x.stride(0),
        GROUP=group,
        BLOCK_GROUPS=block,
        WIDTH=next_power_of_2(group or width),
        num_warps=4 if (group or width) * block <= 4096 else 8,
        enable_fp_fusion=False,  # a product and the sum that rounds it are two operations
    )
    return numbers, scales


def multiply(
    numbers: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    block: tuple[int, int],
    dtype: torch.dtype,
    tiles: Tiles | None = None,
) -> Tensor:
    """`x W^T + b` `[M, N]` of what `quantize_rows` made; `block` outputs and inputs of W share a scale (0: all)."""
    rows, width = numbers.shape
    outputs = weight.shape[0]
    tiles = tiles or choose_tiles(rows, block[1])
    out = torch.empty(rows, outputs, dtype=dtype, device=numbers.device)
    scaled_product[(cdiv(outputs, tiles.outputs), cdiv(rows, tiles.rows))](
        numbers,
        scales,
        weight,
        weight_scales,
        bias,
        out,
        rows,
        outputs,
        width,
        scales.shape[1],
        SCALE_OUTPUTS=block[0] or outputs,
        SCALE_INPUTS=block[1],
        EVEN=width % tiles.inputs == 0,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.outputs,
        BLOCK_K=tiles.inputs,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out
