"""A file that is mapped into memory to be read, which all processes that map it share."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import warnings
from contextlib import suppress

import torch
from torch import Tensor

_MADV_POPULATE_READ = 22  # Linux 5.14; not in Python's mmap
_PAGE = mmap.PAGESIZE


class MappedFile:
    """The first `size` bytes of an open file, on huge pages where the file's cache consists of them.

    Tensors keep the mapping, and the mapping keeps the file's locks. It is shared: what is written into the file shows.
    """

    def __init__(self, file: int, size: int) -> None:
        """Raise `OSError` where the file cannot be mapped."""
        self._memory = mmap.mmap(file, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        with suppress(OSError, AttributeError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, that nobody must write here
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def tensor(self, offset: int, size: int) -> Tensor:
        """Return `[size]` bytes of the file. Writing to them ends the process."""
        return self._bytes[offset : offset + size]

    def read_ahead(self) -> None:
        """Read what is not in memory, and enter all of it in the page tables; raises `OSError` if that fails."""
        size, advice = ctypes.c_size_t(len(self._bytes)), ctypes.c_int(_MADV_POPULATE_READ)
        if _libc().madvise(self._address, size, advice) and ctypes.get_errno() != errno.EINVAL:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        # EINVAL: an older kernel, where pages are read as they are needed

    @property
    def _address(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._bytes.data_ptr())

    @property
    def resident(self) -> int:
        """Bytes that are in memory now, for this process or others."""
        pages = -(-len(self._bytes) // _PAGE)
        found = (ctypes.c_ubyte * pages)()
        if _libc().mincore(self._address, ctypes.c_size_t(len(self._bytes)), found):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return int(torch.frombuffer(found, dtype=torch.uint8).bitwise_and(1).sum()) * _PAGE


def _libc() -> ctypes.CDLL:
    """The C library; unlike those of Python's mmap, its calls let other threads run."""
    return ctypes.CDLL(None, use_errno=True)
