"""A file of arrays that are mapped into memory as they are.

    magic, version | size of the table | SHA-256 of all that follows in the header
    SHA-256 of samples of the arrays | table: a JSON object
    arrays, each from a multiple of `ALIGNMENT` on

The table says what the file is of, and where each array is: name, dtype, shape, offset. A file has its own name only
once it is complete. Whenever it is opened, the header's digest, the file's size, and the first and last page of every
array are checked, which finds files that were cut or changed places; not every byte, which would take as long as
reading the checkpoint. Stdlib only.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

ALIGNMENT = 4096
_MAGIC = b"triptych weights 1\n".ljust(24, b"\0")
_HEADER = struct.Struct("<24sQ32s32s")
_MAX_TABLE = 64 << 20
_SAMPLE = 4096
# Linux caches a file in pages as large as the pieces that it is written in, up to huge pages of 2 MiB, where the file
# system can (ext4 since 6.16, XFS).
_PIECE = 2 << 20


class PackedFileError(Exception):
    """A file is damaged, or not of this format. The message says why, to follow the file's name."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array by its dtype, as torch calls it, and its shape."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """An array's place in the file."""

    offset: int
    spec: ArraySpec

    @property
    def end(self) -> int:
        return self.offset + self.spec.nbytes


@dataclass(frozen=True, slots=True)
class Table:
    """The table of a packed file: where each array lies by name, and what the file was made of."""

    identity: Mapping[str, str]
    places: Mapping[str, Place]

    @classmethod
    def of(cls, identity: Mapping[str, str], arrays: Mapping[str, ArraySpec]) -> Table:
        """Lay the arrays out one after the other."""
        width = len(_encoded(identity, {name: Place(1 << 62, spec) for name, spec in arrays.items()}))
        end, places = _aligned(_HEADER.size + width), {}
        for name, spec in arrays.items():
            places[name] = Place(end, spec)
            end = _aligned(end + spec.nbytes)
        return cls(dict(identity), places)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return max((_aligned(place.end) for place in self.places.values()), default=_HEADER.size + ALIGNMENT)


def read_table(file: int) -> Table:
    """Read and check an open file's header and samples; raises `PackedFileError`, `OSError`."""
    header = os.pread(file, _HEADER.size, 0)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise PackedFileError("is not a file of packed weights of this version")
    _, length, digest, samples = _HEADER.unpack(header)
    if length > _MAX_TABLE:
        raise PackedFileError("has a damaged header")
    text = os.pread(file, length, _HEADER.size)
    if sha256(samples + text).digest() != digest:
        raise PackedFileError("has a damaged header")
    content = json.loads(text)  # as this module wrote it, by its digest
    places = {
        name: Place(offset, ArraySpec(dtype, tuple(shape), nbytes))
        for name, (dtype, shape, offset, nbytes) in content.pop("arrays").items()
    }
    table = Table(content, places)
    if os.fstat(file).st_size != table.size:
        raise PackedFileError(f"has {os.fstat(file).st_size} bytes where {table.size} were written")
    if _samples(file, places.values()) != samples:
        raise PackedFileError("has arrays that differ from what was written")
    return table


class PackedFileWriter:
    """Writes the arrays of a table in its order, then the header."""

    def __init__(self, file: int, table: Table, *, lasting: bool = True) -> None:
        """Take room in an open file; raises `OSError` where there is none. `lasting`: wait until the disk has it."""
        self.table = table
        self._file = file
        self._lasting = lasting
        free = os.fstatvfs(file)
        if free.f_blocks and free.f_bavail * free.f_frsize < table.size:  # 0: in memory, without a bound
            room = free.f_bavail * free.f_frsize / 1e9
            raise OSError(errno.ENOSPC, f"{table.size / 1e9:.2f} GB are needed where {room:.2f} GB are free")
        os.ftruncate(file, table.size)
        self._buffer = memoryview(bytearray(_PIECE))
        self._begin = self._end = 0  # what of the file the buffer holds; it begins at a multiple of a piece

    def write(self, arrays: Iterable[tuple[str, memoryview]], written: Callable[[str], None]) -> None:
        """Write all arrays; `written` is called with each one's name once it can be read from the file."""
        waiting: list[str] = []
        for name, data in arrays:
            place = self.table.places[name]
            assert place.spec.nbytes == data.nbytes, f"{name} has {data.nbytes} bytes, {place.spec.nbytes} were planned"
            self._put(memoryview(bytes(place.offset - self._end)))
            self._put(data)
            waiting.append(name)
            while waiting and self.table.places[waiting[0]].end <= self._begin:
                written(waiting.pop(0))
        self._flush()
        self._finish()
        for name in waiting:
            written(name)

    def _put(self, data: memoryview) -> None:
        while data:
            at = self._end - self._begin
            count = min(_PIECE - at, len(data))
            self._buffer[at : at + count] = data[:count]
            self._end += count
            data = data[count:]
            if at + count == _PIECE:
                self._flush()

    def _flush(self) -> None:
        _write_all(self._file, self._buffer[: self._end - self._begin], self._begin)
        self._begin = self._end

    def _finish(self) -> None:
        text = _encoded(self.table.identity, self.table.places)
        samples = _samples(self._file, self.table.places.values())
        digest = sha256(samples + text).digest()
        _write_all(self._file, memoryview(_HEADER.pack(_MAGIC, len(text), digest, samples) + text), 0)
        if self._lasting:
            os.fsync(self._file)


def _encoded(identity: Mapping[str, str], places: Mapping[str, Place]) -> bytes:
    arrays: dict[str, Sequence[Any]] = {
        name: (place.spec.dtype, place.spec.shape, place.offset, place.spec.nbytes) for name, place in places.items()
    }
    return json.dumps({**identity, "arrays": arrays}).encode()


def _samples(file: int, places: Iterable[Place]) -> bytes:
    """Return a digest of the first and last page of every array."""
    state = sha256()
    for place in places:
        size = min(_SAMPLE, place.spec.nbytes)
        state.update(os.pread(file, size, place.offset))
        state.update(os.pread(file, size, place.end - size))
    return state.digest()


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def _aligned(offset: int) -> int:
    return offset + -offset % ALIGNMENT
