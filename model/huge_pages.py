"""Memory that asks Linux for huge pages: what is read all over it needs few translations of addresses."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `torch.zeros` on the CPU, written once, so that memory which is not there is missed now."""
    size = math.prod(shape) * dtype.itemsize
    if not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel without any
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape).zero_()  # a tensor keeps its buffer
