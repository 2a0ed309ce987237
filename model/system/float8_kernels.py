"""float8_e4m3fn inside Triton kernels. Import this module only if Triton is installed."""

import triton
from triton import language as tl

_WHOLE_STEPS = tl.constexpr(24576.0)  # 1.5 * 2**14: what is added to it is rounded to steps of 2**-9


@triton.jit
def to_float8(x):
    """Round float32 values to the nearest that float8_e4m3fn has, ties to even; beyond 464 it has none. NaN stays.

    As float32, so that the cast that follows is exact everywhere: the interpreter's loses carries.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576).to(tl.float32, bitcast=True)  # 3 bits of fraction
    small = (x + _WHOLE_STEPS) - _WHOLE_STEPS  # below 2**-6
    rounded = tl.where(x == x, rounded, x)  # the carry of a GPU's NaN, 0x7fffffff, would make it a negative zero
    return tl.where(tl.abs(x) < 0.015625, small, rounded)
