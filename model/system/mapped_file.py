"""A file that is mapped into memory to be read, which all processes that map it share."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import warnings
import weakref
from collections.abc import Iterable
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
        self.file = os.dup(file)  # open as long as this object is there
        weakref.finalize(self, os.close, self.file)
        self._memory = mmap.mmap(file, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        with suppress(OSError, AttributeError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, that nobody must write here
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def tensor(self, offset: int, size: int) -> Tensor:
        """Return `[size]` bytes of the file. Writing to them ends the process."""
        return self._bytes[offset : offset + size]

    def read_ahead(self, sparse: Iterable[range] = ()) -> None:
        """Read what is not in memory, and enter it in the page tables; raises `OSError` if that fails.

        Of the bytes `sparse` few will be used: they are read, but enter this process's memory as they are used.
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
