"""A ring in shared memory: rank 0 writes the integers of each step once, and every other rank reads them there.

Integers travel as int32, half of the bytes that a step has on the host. Where a row lies is told over each rank's
socket, which keeps messages in order, wakes the rank and tells when a process has ended. The memory of a row is written
again when every rank has read it.

    counts of integers read, one for each rank | row | row | ... | row |
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RING_BYTES = 16 << 20  # holds some steps of 256 sequences with tables of 8,192 blocks; only written pages take memory
MOST = 2**31 - 1  # the largest integer of a row
_LINE = 64  # bytes of a cache line: each rank writes its count into one of its own
_PAGE = 4096
_WAIT_SECONDS = 2e-4  # between two looks at a full ring

Place = tuple[int, int]  # the number of integers before a row since the start, and the number of its own


class StepRing:
    """Rank 0's end."""

    def __init__(self, readers: int, num_bytes: int = RING_BYTES) -> None:
        self.descriptor = os.memfd_create("triptych-steps")
        os.ftruncate(self.descriptor, _header_bytes(readers) + num_bytes)
        self._counts, self._integers = _mapped(self.descriptor, readers)
        self._written = 0

    def write(self, row: Tensor, seconds: float, check: Callable[[], None] = lambda: None) -> Place | bytes:
        """Write a row of int64 and return its place, or its int32 bytes if it is longer than the ring.

        If the ring is full wait for the ranks, and call `check` meanwhile, which may raise. Raises `TimeoutError` if
        they have not read enough after `seconds`.
        """
        values, size = row.numpy(), len(self._integers)
        if len(values) > size:
            return values.astype(np.int32).tobytes()
        begin, read = self._written, int(self._counts.min())
        # A row is not cut at the ring's end. If all are read the next is the first again: its memory is in the cache.
        if begin % size and (read == begin or begin % size + len(values) > size):
            begin += size - begin % size
        least_read = min(begin + len(values) - size, self._written)  # what this row overwrites, at most all
        if read < least_read:
            self._wait_for_room(least_read, seconds, check)
        self._integers[begin % size : begin % size + len(values)] = values
        self._written = begin + len(values)
        return begin, len(values)

    def _wait_for_room(self, least_read: int, seconds: float, check: Callable[[], None]) -> None:
        deadline = time.monotonic() + seconds
        while int(self._counts.min()) < least_read:
            check()
            if time.monotonic() > deadline:
                raise TimeoutError("a rank reads no steps")
            time.sleep(_WAIT_SECONDS)

    def close(self) -> None:
        """Close the descriptor; the memory is freed when no rank maps it."""
        os.close(self.descriptor)


class RingReader:
    """Another rank's end; `reader` is its number, from 0."""

    def __init__(self, descriptor: int, reader: int, readers: int) -> None:
        self._counts, self._integers = _mapped(descriptor, readers)
        self._reader = reader

    def read(self, place: Place | bytes, *, pinned: bool = False) -> Tensor:
        """Return a row as int64, in `pinned` memory if a device copies from it."""
        if isinstance(place, bytes):
            values = np.frombuffer(place, dtype=np.int32)
        else:
            begin, size = place[0] % len(self._integers), place[1]
            values = self._integers[begin : begin + size]
        row = torch.empty(len(values), dtype=torch.int64, pin_memory=pinned)
        row.numpy()[:] = values
        if not isinstance(place, bytes):
            self._counts[self._reader] = sum(place)
        return row


def _header_bytes(readers: int) -> int:
    return -(-readers * _LINE // _PAGE) * _PAGE


def _mapped(descriptor: int, readers: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the ranks' counts and the integers of a ring, as views of its memory."""
    memory, header = mmap.mmap(descriptor, 0), _header_bytes(readers)
    counts = np.frombuffer(memory, dtype=np.int64, count=readers * _LINE // 8)[:: _LINE // 8]
    return counts, np.frombuffer(memory, dtype=np.int32, offset=header)
