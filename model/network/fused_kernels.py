"""Triton kernels of the small steps between products. Import this module only if Triton is installed.

Each function computes what the one of this name in `triptych.model.network.fused_ops` does, in one launch, and rounds
where that one rounds. It returns NotImplemented for what it has no kernel for. Widths are compiled in, numbers of rows
and floats are not; a row's numbers do not depend on how many rows there are.
"""

from __future__ import annotations

from types import NotImplementedType

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triptych.model.attention.base import Preparation
from triptych.model.config.layer import Activation
from triptych.model.system.held_kernels import cdiv, held, next_power_of_2, overlap

Pair = tuple[Tensor, Tensor]

_BLOCK = 1024  # columns of a program, where columns do not depend on each other
_WIDEST = 32768  # a row that one program normalises: it stays in registers
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
# Gates have these rarely.
_ACTIVATIONS = set(Activation) - {Activation.TANH, Activation.MISH, Activation.LAPLACE, Activation.SQRT_SOFTPLUS}
_CLAMPED = "clamped"  # the value of ACTIVATION for `triptych.model.config.layer.GateClamp`


@triton.jit
def _read(row, at, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns `at` of a row as float32; 0 beyond its end. Without a mask where blocks fill rows."""
    if WIDTH % BLOCK == 0:
        return tl.load(row + at).to(tl.float32)
    else:
        return tl.load(row + at, mask=at < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _write(row, at, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    if WIDTH % BLOCK == 0:
        tl.store(row + at, values.to(row.dtype.element_ty))
    else:
        tl.store(row + at, values.to(row.dtype.element_ty), mask=at < WIDTH)


@triton.jit
def _rounded(values, like):
    """Float32 values as the pointer's type has them."""
    return values.to(like.dtype.element_ty).to(tl.float32)


@held
@triton.jit
def sum_and_norm(
    x,  # [T, WIDTH]
    y,  # [T, WIDTH]
    output_gain,  # [WIDTH] of an RMS norm of y, or None
    gain,  # [WIDTH] or None
    bias,  # [WIDTH] or None
    total,  # [T, WIDTH] x + y
    normed,  # [T, WIDTH] its norm
    output_eps,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least WIDTH
    CENTRED: tl.constexpr,  # the norm takes the mean off
    OVERLAP: tl.constexpr,  # as `triptych.model.system.held_kernels.overlap`
):
    """Grid: rows."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    begin = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, BLOCK)
    added = _read(y + begin, at, WIDTH, BLOCK)
    if output_gain is not None:
        added *= tl.rsqrt(tl.sum(added * added) / WIDTH + output_eps)
        added = _rounded(added * _read(output_gain, at, WIDTH, BLOCK), y)
    values = _rounded(_read(x + begin, at, WIDTH, BLOCK) + added, total)
    _write(total + begin, at, values, WIDTH, BLOCK)
    if CENTRED:
        values = tl.where(at < WIDTH, values - tl.sum(values) / WIDTH, 0.0)
    values *= tl.rsqrt(tl.sum(values * values) / WIDTH + eps)
    if gain is not None:
        values *= _read(gain, at, WIDTH, BLOCK)
    if bias is not None:
        values += _read(bias, at, WIDTH, BLOCK)
    _write(normed + begin, at, values, WIDTH, BLOCK)


@triton.jit
def _activated(x, like, ACTIVATION: tl.constexpr):
    """An activation of `triptych.model.network.activations` by its name; operations of torch round to the type of
    `like`.
    """
    if ACTIVATION == "silu":
        result = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu" or ACTIVATION == "clipped_gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
        if ACTIVATION == "clipped_gelu":
            result = tl.where(result > 10.0, 10.0, result)
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh z) / 2 is the sigmoid of 2 z
        result = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "relu" or ACTIVATION == "relu_squared":
        result = tl.where(x < 0.0, 0.0, x)
        if ACTIVATION == "relu_squared":
            result = result * result
    elif ACTIVATION == "relu6":
        result = tl.where(x < 0.0, 0.0, tl.where(x > 6.0, 6.0, x))
    elif ACTIVATION == "leaky_relu":
        result = tl.where(x < 0.0, 0.01 * x, x)
    elif ACTIVATION == "sigmoid":
        result = tl.sigmoid(x)
    elif ACTIVATION == "quick_gelu":
        result = x * _rounded(tl.sigmoid(_rounded(1.702 * x, like)), like)
    elif ACTIVATION == "hard_swish":
        result = x * tl.where(x < -3.0, 0.0, tl.where(x > 3.0, 6.0, x + 3.0)) / 6.0
    else:
        tl.static_assert(ACTIVATION == "identity")
        result = x
    return result


@held
@triton.jit
def gate_rows(
    gate,  # [T, >= WIDTH]
    up,  # [T, >= UP_BEGIN + WIDTH]
    out,  # [T, WIDTH]
    gate_row,  # strides
    up_row,
    limit,  # of a clamp, with the one below
    gain,
    WIDTH: tl.constexpr,
    UP_BEGIN: tl.constexpr,  # the first column of up
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`out = act(gate) * up`. Grid: blocks of columns of all rows."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    at = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    g = _read(gate + row * gate_row, at, WIDTH, BLOCK)
    u = _read(up + row * up_row + UP_BEGIN, at, WIDTH, BLOCK)
    if ACTIVATION == "clamped":
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        u = _rounded(_rounded(u + 1.0, out) * g, out)
        g = _rounded(tl.sigmoid(_rounded(gain * g, out)), out)
    else:
        g = _rounded(_activated(g, out, ACTIVATION), out)
    _write(out + row * WIDTH, at, g * u, WIDTH, BLOCK)


@held
@triton.jit
def add_weighted_rows(
    rows,  # [R, WIDTH]
    places,  # [T, COUNT]
    weights,  # [T, COUNT] float32
    out,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: blocks of columns of all tokens."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    at = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(COUNT):
        place = tl.load(places + token * COUNT + rank).to(tl.int64)
        total += _read(rows + place * WIDTH, at, WIDTH, BLOCK) * tl.load(weights + token * COUNT + rank)
    _write(out + token * WIDTH, at, total, WIDTH, BLOCK)


@held
@triton.jit(do_not_specialize_on_alignment=["positions"])
def turn_positions(
    positions,  # [T], where EACH [T, HALF]
    frequencies,  # [HALF], where OWN [T, HALF]
    cos,  # [T, 2 HALF]
    sin,
    factor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least 2 HALF
    INTERLEAVED: tl.constexpr,
    OWN: tl.constexpr,
    EACH: tl.constexpr,  # pairs of a row turn by positions of their own
):
    """Grid: rows."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < 2 * HALF
    pair = at // 2 if INTERLEAVED else tl.where(at < HALF, at, at - HALF)
    position = tl.load(positions + row * HALF + pair, mask=inside, other=0) if EACH else tl.load(positions + row)
    angle = position.to(tl.float32) * tl.load(frequencies + (row * HALF if OWN else 0) + pair, mask=inside, other=0.0)
    to = row * (2 * HALF) + at
    tl.store(cos + to, (tl.cos(angle) * factor).to(cos.dtype.element_ty), mask=inside)
    tl.store(sin + to, (tl.sin(angle) * factor).to(sin.dtype.element_ty), mask=inside)


def add_rms(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Pair | NotImplementedType:
    return _sum_and_norm(x, y, weight, None, eps)


def add_layer(
    x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Pair | NotImplementedType:
    return _sum_and_norm(x, y, weight, bias, eps, centred=True)


def add_offset_rms(x: Tensor, y: Tensor, gain: Tensor, eps: float) -> Pair | NotImplementedType:
    return _sum_and_norm(x, y, gain, None, eps)


def norm_add_norm(
    x: Tensor, y: Tensor, output_gain: Tensor, output_eps: float, gain: Tensor, eps: float
) -> Pair | NotImplementedType:
    return _sum_and_norm(x, y, gain, None, eps, output_gain, output_eps)


def _sum_and_norm(
    x: Tensor,
    y: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    eps: float,
    output_gain: Tensor | None = None,
    output_eps: float = 0.0,
    *,
    centred: bool = False,
) -> Pair | NotImplementedType:
    shape, dtype, device = x.shape, x.dtype, x.device
    if len(shape) != 2 or y.dtype is not dtype or dtype not in _DTYPES or shape[1] > _WIDEST:
        return NotImplemented
    rows, width = shape
    total = torch.empty(shape, dtype=dtype, device=device)
    normed = torch.empty(shape, dtype=dtype, device=device)
    block = next_power_of_2(width)
    sum_and_norm[(rows,)](
        x.contiguous(),
        y.contiguous(),
        output_gain,
        gain,
        bias,
        total,
        normed,
        float(output_eps),
        float(eps),
        WIDTH=width,
        BLOCK=block,
        CENTRED=centred,
        **overlap(),
        num_warps=min(max(block // 512, 1), 16),
        enable_fp_fusion=False,  # a product and the sum that rounds it are two operations
    )
    return total, normed


def gated(hidden: Tensor, activation: Activation) -> Tensor | NotImplementedType:
    if activation not in _ACTIVATIONS:
        return NotImplemented
    return _gate(hidden, hidden, hidden.shape[-1] // 2, activation.value)


def clamped(hidden: Tensor, limit: float, gain: float) -> Tensor | NotImplementedType:
    return _gate(hidden, hidden, hidden.shape[-1] // 2, _CLAMPED, limit, gain)


def sigmoid_gated(rows: Tensor, gate: Tensor) -> Tensor | NotImplementedType:
    if rows.shape != gate.shape:
        return NotImplemented
    return _gate(gate, rows, 0, Activation.SIGMOID.value)


def _gate(
    gate: Tensor, up: Tensor, begin: int, activation: str, limit: float = 0.0, gain: float = 0.0
) -> Tensor | NotImplementedType:
    """`act(gate) * up` of rows `[T, n]`; up begins at the column `begin`, and the gate ends there unless it is 0."""
    rows, width, dtype = gate.shape[0], begin or gate.shape[-1], gate.dtype
    if gate.dim() != 2 or up.dtype is not dtype or dtype not in _DTYPES:
        return NotImplemented
    out = torch.empty((rows, width), dtype=dtype, device=gate.device)
    gate, up = (one if one.stride(1) == 1 else one.contiguous() for one in (gate, up))
    block = min(next_power_of_2(width), _BLOCK)
    gate_rows[(rows * cdiv(width, block),)](
        gate,
        up,
        out,
        gate.stride(0),
        up.stride(0),
        float(limit),
        float(gain),
        WIDTH=width,
        UP_BEGIN=begin,
        BLOCK=block,
        ACTIVATION=activation,
        **overlap(),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def weighted_sums(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor | NotImplementedType:
    (tokens, count), width = places.shape, rows.shape[1]
    if rows.dtype not in _DTYPES or weights.dtype is not torch.float32:
        return NotImplemented
    out = torch.empty((tokens, width), dtype=rows.dtype, device=rows.device)
    block = min(next_power_of_2(width), _BLOCK)
    add_weighted_rows[(tokens * cdiv(width, block),)](
        rows.contiguous(),
        places.contiguous(),
        weights.contiguous(),
        out,
        WIDTH=width,
        COUNT=count,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def turns(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype, interleaved: bool
) -> Pair | NotImplementedType:
    tokens, half = len(positions), frequencies.shape[-1]
    if dtype not in _DTYPES or frequencies.dtype is not torch.float32:
        return NotImplemented
    cos, sin = (torch.empty((tokens, 1, 2 * half), dtype=dtype, device=positions.device) for _ in range(2))
    turn_positions[(tokens,)](
        positions.contiguous(),
        frequencies.contiguous(),
        cos,
        sin,
        float(factor),
        HALF=half,
        BLOCK=next_power_of_2(2 * half),
        INTERLEAVED=interleaved,
        OWN=frequencies.dim() == 2,
        EACH=positions.dim() == 2,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return cos, sin


def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Pair | NotImplementedType:
    from triptych.model.attention.triton_heads import prepare

    if q.dtype not in _DTYPES or q.shape[-1] != k.shape[-1] or q.stride(-1) != 1 or k.stride(-1) != 1:
        return NotImplemented
    return prepare(q, k, k, Preparation(None, None, (cos, sin), interleaved), None, None)
