"""Host memory on Linux huge pages, which reduces TLB misses."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy
import torch
from torch import Tensor

from model.system.background_work import gives_way, wait_for

_MIN_SIZE = 4 << 20  # bytes; a smaller buffer might contain no whole aligned huge page


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros as `torch.zeros` does on the CPU, written once, so that a lack of memory shows now."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype)
    memory = reserve(size)
    if not gives_way() or size < _MIN_SIZE:
        memory.zero_()
    return memory.view(dtype).view(*shape)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what `torch.empty` does, or zeros; work that gives way takes the memory as `reserve` does."""
    if device.type != "cpu" or not gives_way():
        return torch.empty(*shape, dtype=dtype, device=device)
    return reserve(math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)


def reserve(size: int) -> Tensor:
    """Return `[size]` zero bytes that take no physical memory until they are written.

    Work that gives way takes the memory at once, in a thread that only runs on an idle processor: where a virtual
    machine gets it from its host page by page, that takes milliseconds a huge page.
    """
    if size < _MIN_SIZE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.from_numpy(numpy.zeros(size, dtype=numpy.uint8))  # torch.zeros would write them
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    reserved = torch.frombuffer(memory, dtype=torch.uint8)  # the tensor keeps the buffer alive
    if gives_way():
        wait_for(lambda: _write(reserved))
    return reserved


def _write(memory: Tensor) -> None:
    """Write zeros in C, outside of the interpreter's lock, while nothing else wants the processor."""
    with suppress(OSError):
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    ctypes.memset(memory.data_ptr(), 0, memory.nbytes)
