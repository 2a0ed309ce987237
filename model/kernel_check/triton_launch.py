"""The smallest Triton kernel: whether anything can be compiled and launched. Import this module only with Triton."""

from __future__ import annotations

import torch
import triton
from triton import language as tl


@triton.jit
def double(x, out, BLOCK: tl.constexpr):
    """`out = 2 x` of the first BLOCK elements."""
    at = tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at))


def try_launch(device: torch.device) -> bool:
    """Launch it once; return whether the result is right."""
    x = torch.arange(16, device=device)
    out = torch.zeros_like(x)
    with torch.cuda.device_of(x):
        double[(1,)](x, out, BLOCK=16)
    return torch.equal(out, 2 * x)
