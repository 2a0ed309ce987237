"""Products of few rows in Triton, to see what cuBLAS leaves of the bandwidth. Imported only where Triton is."""

import triton
from triton import language as tl


@triton.jit
def one_row(x, weight, out, columns, width, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """`out [N] = weight [N, K] @ x [K]`; a program has BLOCK_N outputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = weight + n.to(tl.int64)[:, None] * width
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for begin in range(0, width, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        row = tl.load(x + k, mask=k < width, other=0.0).to(tl.float32)
        w = tl.load(at + k[None, :], mask=(n < columns)[:, None] & (k < width)[None, :], other=0.0)
        total += w.to(tl.float32) * row[None, :]
    tl.store(out + n, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=n < columns)


@triton.jit
def few_rows(x, weight, out, rows, columns, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """`out [M, N] = x [M, K] @ weight [N, K].T` for M up to BLOCK_M; a program has BLOCK_N outputs of every row."""
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = weight + n.to(tl.int64)[None, :] * width
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, width, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        a = tl.load(x + m[:, None] * width + k[None, :], mask=(m < rows)[:, None] & (k < width)[None, :], other=0.0)
        w = tl.load(at + k[:, None], mask=(n < columns)[None, :] & (k < width)[:, None], other=0.0)
        total = tl.dot(a, w, total)
    to = out + m[:, None] * columns + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])
