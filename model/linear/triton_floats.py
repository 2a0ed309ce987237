"""A Triton kernel for one row times a matrix of floats. Import this module only if Triton is installed."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triptych.model.system.held_kernels import cdiv, held, overlap

# Two outputs and 1,024 inputs at a time were the fastest of eight on an H200 for ten matrices of models with 0.6 to 8
# billion parameters: 0.7 to 0.95 of cuBLAS's time.
_OUTPUTS = 2
_INPUTS = 1024
_WARPS = 4


@held
@triton.jit
def one_row(
    x,  # [K]
    weight,  # [N, K]
    bias,  # [N] or None
    out,  # [N]
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,  # as `triptych.model.system.held_kernels.overlap`
):
    """`out = weight @ x + bias`, summed in float32. Grid: blocks of outputs.

    The first numbers of the matrix are read before the kernel that makes x has ended.
    """
    if OVERLAP:
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    there = n < N
    rows = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    numbers = tl.load(rows, mask=there[:, None] & (k < K)[None, :], other=0.0)
    if OVERLAP:
        gdc_wait()
    for begin in range(0, K, BLOCK_K):
        factors = tl.load(x + begin + k, mask=begin + k < K, other=0.0).to(tl.float32)
        later = begin + BLOCK_K
        following = tl.load(rows + later, mask=there[:, None] & (later + k < K)[None, :], other=0.0)
        total += numbers.to(tl.float32) * factors[None, :]
        numbers = following
    sums = tl.sum(total, axis=1)
    if bias is not None:
        sums += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out + n, sums.to(out.dtype.element_ty), mask=there)


def multiply_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + b` of one row x `[1, K]`, which is dense; W `[N, K]` has dense rows. Returns `[1, N]`."""
    outputs, inputs = weight.shape
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    one_row[(cdiv(outputs, _OUTPUTS),)](
        x, weight, bias, out, outputs, inputs, BLOCK_N=_OUTPUTS, BLOCK_K=_INPUTS, num_warps=_WARPS, **overlap()
    )
    return out
