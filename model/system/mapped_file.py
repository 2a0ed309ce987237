"""A file mapped into memory for reading; all processes that map it share its pages."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import warnings
import weakref
from collections.abc import Iterable
from contextlib import suppress

import numpy
import torch
from torch import Tensor

_MADV_POPULATE_READ = 22  # Linux 5.14; not in Python's mmap
_PAGE = mmap.PAGESIZE


class MappedFile:
    """The first `size` bytes of an open file, on huge pages where the file's cache consists of them.

    Tensors keep the mapping, and the mapping keeps the file's locks. It is shared: what is written into the file shows.
    """

    def __init__(self, file: int, size: int) -> None:
        """Map the file; raises `OSError`."""
        self.file = os.dup(file)  # open as long as this object exists
        weakref.finalize(self, os.close, self.file)
        self._memory = mmap.mmap(file, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        with suppress(OSError, AttributeError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that the buffer is read-only
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def tensor(self, offset: int, size: int) -> Tensor:
        """Return `[size]` bytes of the file. Writing to them ends the process."""
        return self._bytes[offset : offset + size]

    def read_ahead(self, sparse: Iterable[range] = ()) -> None:
        """Read what is not in memory, and enter it in the page tables; raises `OSError` if that fails.

        The bytes `sparse` are read, but enter this process's memory only when they are used.
        """
        done = 0
        for part in sorted(sparse, key=lambda part: part.start):
            first, last = -(-part.start // _PAGE) * _PAGE, part.stop // _PAGE * _PAGE
            if first >= last:
                continue
            self._populate(done, first)
            with suppress(OSError, AttributeError):
                self._memory.madvise(mmap.MADV_NOHUGEPAGE, first, last - first)
                self._memory.madvise(mmap.MADV_WILLNEED, first, last - first)
            done = last
        self._populate(done, len(self._bytes))

    def _populate(self, first: int, last: int) -> None:
        address, size = ctypes.c_void_p(self._bytes.data_ptr() + first), ctypes.c_size_t(last - first)
        if _libc().madvise(address, size, ctypes.c_int(_MADV_POPULATE_READ)) and ctypes.get_errno() != errno.EINVAL:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        # EINVAL: an older kernel, which reads pages when they are used

    @property
    def resident(self) -> int:
        """Return the bytes of the file that are in memory now, for this process or others."""
        return resident_bytes(self._bytes)


def resident_bytes(memory: Tensor) -> int:
    """Return the bytes of the pages with `memory` that are in memory now."""
    first = memory.data_ptr() // _PAGE * _PAGE
    pages = -(-(memory.data_ptr() + memory.nbytes - first) // _PAGE)
    found = (ctypes.c_ubyte * pages)()
    if pages and _libc().mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * _PAGE), found):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int((numpy.frombuffer(bytearray(found), dtype=numpy.uint8) & 1).sum()) * _PAGE


def _libc() -> ctypes.CDLL:
    """Return the C library; unlike Python's mmap, its calls let other threads run."""
    return ctypes.CDLL(None, use_errno=True)
