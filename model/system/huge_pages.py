"""Host memory on Linux huge pages, which reduces TLB misses."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy
import torch
from torch import Tensor

_MIN_SIZE = 4 << 20  # bytes; a smaller buffer might contain no whole aligned huge page


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros as `torch.zeros` does on the CPU; a large buffer takes memory when it is written, see `commit`."""
    size = math.prod(shape) * dtype.itemsize
    return reserve(size).view(dtype).view(*shape) if size else torch.zeros(shape, dtype=dtype)


def reserve(size: int) -> Tensor:
    """Return `[size]` zero bytes that take no physical memory until they are written."""
    if size < _MIN_SIZE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.from_numpy(numpy.zeros(size, dtype=numpy.uint8))  # torch.zeros would write them
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # the tensor keeps the buffer alive


def commit(zeros: Tensor) -> None:
    """Write zeros over zeros, so that a lack of memory shows now; without the interpreter's lock."""
    ctypes.memset(zeros.data_ptr(), 0, zeros.nbytes)
