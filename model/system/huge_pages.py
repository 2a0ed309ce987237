"""Memory that asks Linux for huge pages: what is read all over it needs few translations of addresses."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy
import torch
from torch import Tensor

_WORTH = 4 << 20  # bytes from which on there are huge pages in it, however it is aligned


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `torch.zeros` on the CPU, written once, so that memory which is not there is missed now."""
    size = math.prod(shape) * dtype.itemsize
    return reserve(size).view(dtype).view(*shape).zero_() if size else torch.zeros(shape, dtype=dtype)


def reserve(size: int) -> Tensor:
    """`[size]` bytes that are zero and take no memory until they are written."""
    if size < _WORTH or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.from_numpy(numpy.zeros(size, dtype=numpy.uint8))  # which torch's own would write
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel without any
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # a tensor keeps its buffer
