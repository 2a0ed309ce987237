"""Triton kernels of projections with integer weights: multiply, and dequantise. Import only if Triton is installed.

Weights are read as they are packed and become floats in registers; what they are multiplied with stays as it is. Each
group of inputs is summed by itself, and its sum scaled and added in float32. Where there are few tiles the inputs are
divided over several programs; the last to finish adds up all sums, in the same order each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from triton import language as tl

from triptych.model.linear.base import FEW, SEVERAL
from triptych.model.system.devices import processors
from triptych.model.system.held_kernels import cdiv, held

_COUNTERS = 1 << 14  # tiles of a launch whose inputs are divided, at most
_MOST_PARTS = 8
_LEAST_SPANS = 4  # of a part

# A word of four bytes is eight integers. `0x43004300 | integer` is 128 + integer twice, in bfloat16, and
# `0x64006400 | integer` 1024 + integer, in float16; 8 more than that is subtracted.
_UNPACK = """{{
.reg .b32 w, a, b, c, one, less;
prmt.b32 w, $4, $4, 0x3120;
mov.b32 one, {one};
mov.b32 less, {less};
shr.u32 a, w, 4;
shr.u32 b, w, 8;
shr.u32 c, w, 12;
lop3.b32 w, w, 0x000f000f, {magic}, 0xea;
lop3.b32 a, a, 0x000f000f, {magic}, 0xea;
lop3.b32 b, b, 0x000f000f, {magic}, 0xea;
lop3.b32 c, c, 0x000f000f, {magic}, 0xea;
fma.rn.{kind}x2 $0, w, one, less;
fma.rn.{kind}x2 $1, b, one, less;
fma.rn.{kind}x2 $2, a, one, less;
fma.rn.{kind}x2 $3, c, one, less;
}}"""
UNPACK_BFLOAT16 = tl.constexpr(_UNPACK.format(kind="bf16", magic="0x43004300", one="0x3f803f80", less="0xc308c308"))
UNPACK_FLOAT16 = tl.constexpr(_UNPACK.format(kind="f16", magic="0x64006400", one="0x3c003c00", less="0xe408e408"))


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a launch of `grouped_product` is cut; `parts` divide the inputs."""

    rows: int
    outputs: int
    warps: int
    stages: int
    parts: int = 1


@triton.jit
def unpack(packed, DTYPE: tl.constexpr, IN_WORDS: tl.constexpr):
    """Return the integers in the low and in the high half of each byte, which are kept plus 8."""
    if IN_WORDS and tl.bfloat16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            UNPACK_BFLOAT16, "=&r,=&r,=&r,=&r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif IN_WORDS and tl.float16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            UNPACK_FLOAT16, "=&r,=&r,=&r,=&r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low = ((packed & 15).to(tl.int8) - 8).to(DTYPE)
        high = ((packed >> 4).to(tl.int8) - 8).to(DTYPE)
    return low, high


@triton.jit
def read_weights(at, DTYPE: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, IN_WORDS: tl.constexpr):
    """Return the weights of a span as they are kept, or the first half of them, and both halves as floats."""
    packed = tl.load(at)
    if BITS == 4:
        first, second = unpack(packed, DTYPE, IN_WORDS)
    else:
        first, second = packed.to(DTYPE), tl.load(at + HALF).to(DTYPE)
    return packed, first, second


@triton.jit
def ones_like(packed, DTYPE: tl.constexpr, IN_WORDS: tl.constexpr):
    """Ones in the layout of unpacked weights: another one would keep what both are multiplied with from being copied
    asynchronously."""
    if IN_WORDS and tl.bfloat16 == DTYPE:
        ones = tl.inline_asm_elementwise(
            "mov.b32 $0, 0x3f803f80; mov.b32 $1, 0x3f803f80;", "=r,=r,r", [packed], tl.bfloat16, is_pure=True, pack=4
        )
    elif IN_WORDS and tl.float16 == DTYPE:
        ones = tl.inline_asm_elementwise(
            "mov.b32 $0, 0x3c003c00; mov.b32 $1, 0x3c003c00;", "=r,=r,r", [packed], tl.float16, is_pure=True, pack=4
        )
    else:
        ones = tl.full(packed.shape, 1.0, DTYPE)
    return ones


@triton.jit
def scaled(products, sums, scale, offset, OFFSETS: tl.constexpr):
    """Sums over a group of rows times integers, and of the rows alone, to those of rows times weights."""
    if not OFFSETS:
        result = products * scale[None, :].to(tl.float32)
    elif offset.dtype == tl.int8:
        result = (products + sums * offset[None, :].to(tl.float32)) * scale[None, :].to(tl.float32)
    else:
        result = products * scale[None, :].to(tl.float32) + sums * offset[None, :].to(tl.float32)
    return result


@triton.jit
def read_factor(factors, group, output, N):
    """Return the scales, or offsets, of a group."""
    return tl.load(factors + group * N + output)


@held
@triton.jit(do_not_specialize=["M", "spans", "part_spans"], do_not_specialize_on_alignment=["out", "sums_of_parts"])
def grouped_product(
    x,  # [M, K]
    weight,  # [N, K / 2] of 4 bits, or [N, K] int8
    scales,  # [groups, N]
    offsets,  # [groups, N], int8: in scales; or None
    bias,  # [N] or None
    out,  # [M, N]
    sums_of_parts,  # [parts, M, N] float32, or None
    finished,  # [tiles] int32 zeros, or None: how many parts are done
    M,
    N,
    K,
    x_stride,
    weight_stride,
    spans,
    part_spans,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale: HALF, 2 HALF, or 0: all
    HALF: tl.constexpr,  # inputs of half a span; a byte of 4-bit weights is one of each half
    EVEN: tl.constexpr,  # K is a multiple of a span
    IN_WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`out = x @ weight.T + bias`. Grid: blocks of outputs, blocks of rows, parts of the inputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(2)
    k = tl.arange(0, HALF)
    live, there = m < M, n < N
    output = tl.where(there, n, 0)  # what is beyond the edge reads the first one's numbers, and is not stored
    x_at = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = weight + output.to(tl.int64)[None, :] * weight_stride + k[:, None]
    STEP: tl.constexpr = HALF if BITS == 4 else 2 * HALF
    EACH: tl.constexpr = 2 if GROUP == HALF else 1  # scales of a span
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    begin = part * part_spans
    end = tl.minimum(begin + part_spans, spans)
    group = tl.minimum(begin, spans - 1) * EACH if GROUP > 0 else 0  # the last part may have nothing to do
    OFFSETS: tl.constexpr = offsets is not None
    scale = read_factor(scales, group, output, N)
    offset = read_factor(offsets, group, output, N) if OFFSETS else scale
    second_scale, second_offset = scale, offset
    if EACH == 2:
        second_scale = read_factor(scales, group + 1, output, N)
        second_offset = read_factor(offsets, group + 1, output, N) if OFFSETS else second_scale
    for span in range(begin, end):
        if EVEN:
            a = tl.load(x_at + span * (2 * HALF), mask=live[:, None], other=0.0)
            b = tl.load(x_at + span * (2 * HALF) + HALF, mask=live[:, None], other=0.0)
        else:
            left = K - span * (2 * HALF)
            a = tl.load(x_at + span * (2 * HALF), mask=live[:, None] & (k < left)[None, :], other=0.0)
            b = tl.load(x_at + span * (2 * HALF) + HALF, mask=live[:, None] & (k < left - HALF)[None, :], other=0.0)
        packed, v, w = read_weights(w_at + span * STEP, dtype, BITS, HALF, IN_WORDS)
        if GROUP == 0:
            total = tl.dot(b, w, tl.dot(a, v, total, input_precision="ieee"), input_precision="ieee")
        else:
            group = tl.minimum(span + 1, end - 1) * EACH  # read one span ahead: nothing else hides the wait
            next_scale = read_factor(scales, group, output, N)
            next_offset = read_factor(offsets, group, output, N) if OFFSETS else next_scale
            products = tl.dot(a, v, input_precision="ieee")
            sums = products
            if OFFSETS:
                ones = ones_like(packed, dtype, IN_WORDS)
                sums = tl.dot(a, ones, input_precision="ieee")
            if EACH == 2:
                total += scaled(products, sums, scale, offset, OFFSETS)
                scale, offset = second_scale, second_offset
                second_scale = read_factor(scales, group + 1, output, N)
                second_offset = read_factor(offsets, group + 1, output, N) if OFFSETS else second_scale
                products = tl.dot(b, w, input_precision="ieee")
                sums = products
                if OFFSETS:
                    sums = tl.dot(b, ones, input_precision="ieee")
            else:
                products = tl.dot(b, w, products, input_precision="ieee")
                if OFFSETS:
                    sums = tl.dot(b, ones, sums, input_precision="ieee")
            total += scaled(products, sums, scale, offset, OFFSETS)
            scale, offset = next_scale, next_offset
    if GROUP == 0:
        total = total * scale[None, :].to(tl.float32)
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    stored = live[:, None] & there[None, :]
    if PARTS > 1:
        size = M.to(tl.int64) * N
        tl.store(sums_of_parts + part * size + at, total, mask=stored)
        tl.debug_barrier()  # all threads have stored before one of them counts the part
        done = tl.atomic_add(finished + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), 1, sem="acq_rel")
        if done < PARTS - 1:
            return
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for one in range(PARTS):
            total += tl.load(sums_of_parts + one * size + at, mask=stored, other=0.0, cache_modifier=".cg")
        tl.store(finished + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), 0)
    if bias is not None:
        total += tl.load(bias + output).to(tl.float32)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=stored)


@held
@triton.jit
def dequantize(
    weight,
    scales,
    offsets,
    out,  # [N, K]
    N,
    K,
    weight_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    IN_WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Weights as floats. Grid: blocks of outputs, spans. Arguments as those of `grouped_product`."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    span = tl.program_id(1)
    k = tl.arange(0, HALF)
    there = n < N
    output = tl.where(there, n, 0)
    STEP: tl.constexpr = HALF if BITS == 4 else 2 * HALF
    EACH: tl.constexpr = 2 if GROUP == HALF else 1
    at = weight + output.to(tl.int64)[:, None] * weight_stride + span * STEP + k[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    _, first, second = read_weights(at, dtype, BITS, HALF, IN_WORDS)
    for half in tl.static_range(2):
        group = (span * EACH + (half if EACH == 2 else 0)) if GROUP > 0 else 0
        scale = read_factor(scales, group, output, N).to(tl.float32)[:, None]
        values = (first if half == 0 else second).to(tl.float32)
        if offsets is not None:
            offset = read_factor(offsets, group, output, N)
            if offset.dtype == tl.int8:
                values = (values + offset.to(tl.float32)[:, None]) * scale
            else:
                values = values * scale + offset.to(tl.float32)[:, None]
        else:
            values = values * scale
        input = span * (2 * HALF) + half * HALF + k
        to = out + output.to(tl.int64)[:, None] * K + input[None, :]
        tl.store(to, values.to(dtype), mask=there[:, None] & (input < K)[None, :])


# Whether words are unpacked by instructions of the GPU, which the interpreter has not.
IN_WORDS = isinstance(grouped_product, triton.JITFunction)


def choose_tiles(rows: int, outputs: int, spans: int, device: torch.device) -> Tiles:
    """Choose the tiles for `rows` rows, by hand, within 99 KiB of shared memory.

    Up to `FEW` rows they do not depend on the number of rows, nor between those and `SEVERAL`.
    """
    wanted = 3 * processors(device)  # programs
    if rows > SEVERAL:
        return Tiles(SEVERAL, 64, 8, 3)
    if rows > FEW:
        return Tiles(SEVERAL, 64, 8, 3, _parts(outputs, 64, spans, wanted))
    if outputs >= 128 * processors(device):
        return Tiles(FEW, 128, 4, 4)
    return Tiles(FEW, 64, 4, 4, _parts(outputs, 64, spans, wanted))


def _parts(outputs: int, width: int, spans: int, wanted: int) -> int:
    most = min(wanted // cdiv(outputs, width), spans // _LEAST_SPANS, _MOST_PARTS)
    return 1 << (most.bit_length() - 1) if most > 1 else 1


def half_span(group: int) -> int:
    """Inputs of half a span, what a program multiplies at a time; `group` of them share a scale, 0: all."""
    return min(group or 64, 64)


def multiply(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group: int,
    tiles: Tiles | None = None,
) -> Tensor:
    """`x W^T + b`, `[M, N]` in the dtype of x; weights, scales and offsets as `IntegerLinear` keeps them."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (rows, width), outputs = x.shape, weight.shape[0]
    half = half_span(group)
    spans = cdiv(width, 2 * half)
    tiles = tiles or choose_tiles(rows, outputs, spans, x.device)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    grid = (cdiv(outputs, tiles.outputs), cdiv(rows, tiles.rows), tiles.parts)
    sums = finished = None
    if tiles.parts > 1:
        assert grid[0] * grid[1] <= _COUNTERS
        sums = torch.empty(tiles.parts, rows, outputs, dtype=torch.float32, device=x.device)
        finished = counters(x.device)
    grouped_product[grid](
        x,
        weight,
        scales,
        offsets,
        bias,
        out,
        sums,
        finished,
        rows,
        outputs,
        width,
        x.stride(0),
        weight.stride(0),
        spans,
        cdiv(spans, tiles.parts),
        BITS=bits,
        GROUP=group,
        HALF=half,
        EVEN=width % (2 * half) == 0,
        IN_WORDS=IN_WORDS,
        PARTS=tiles.parts,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.outputs,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def dequantized(
    weight: Tensor, scales: Tensor, offsets: Tensor | None, bits: int, group: int, width: int, dtype: torch.dtype
) -> Tensor:
    """W as floats, `[N, K]` of `width` inputs."""
    outputs, half = weight.shape[0], half_span(group)
    out = torch.empty(outputs, width, dtype=dtype, device=weight.device)
    dequantize[(cdiv(outputs, 32), cdiv(width, 2 * half))](
        weight,
        scales,
        offsets,
        out,
        outputs,
        width,
        weight.stride(0),
        BITS=bits,
        GROUP=group,
        HALF=half,
        IN_WORDS=IN_WORDS,
        BLOCK_N=32,
        num_warps=4,
    )
    return out


@cache
def counters(device: torch.device) -> Tensor:
    """Zeros that launches count finished parts in, and leave as zeros; those of a device follow one another."""
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
