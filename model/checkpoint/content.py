"""Identifies weight files by their content: by a digest of all bytes, and by cheap signs that they are still the same.

The digest takes a second for each gigabyte and core. The signs are what a file system says of a file (size, times of
change, inode) and a few pages of it; they take no time, and change with every write. Stdlib only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

_PIECE = 64 << 20  # bytes that are hashed as one, several at a time
_READ = 1 << 20
_SAMPLES, _SAMPLE = 32, 4096  # places in a file, and bytes at each
_SETTLED_SECONDS = 2.0  # a file that is written again within its clock's resolution may keep its times


@dataclass(frozen=True, slots=True)
class Signs:
    """The cheap signs of some files."""

    digest: str
    settled: bool  # written long enough ago that another write would show


def signs_of(paths: Sequence[Path]) -> Signs:
    """Return the signs of files in this order; raises `OSError`."""
    state, changed = sha256(), 0.0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            times = (found.st_mtime_ns, found.st_ctime_ns)
            state.update(json.dumps([str(path.resolve()), found.st_size, *times, found.st_ino]).encode())
            for offset in _sample_offsets(found.st_size):
                state.update(os.pread(file.fileno(), _SAMPLE, offset))
        changed = max(changed, *(when / 1e9 for when in times))
    return Signs(state.hexdigest(), time.time() - changed > _SETTLED_SECONDS)


def content_digest(paths: Sequence[Path], threads: int) -> str:
    """Return a digest of all bytes of files in this order: SHA-256 of the digests of their pieces."""
    state = sha256()

    def piece_digest(piece: tuple[Path, int]) -> tuple[Path, int, bytes]:
        return _piece_digest(*piece)

    def add(found: Iterable[tuple[Path, int, bytes]]) -> str:
        for path, offset, piece in found:
            state.update(f"{paths.index(path)} {offset} ".encode() + piece)
        return state.hexdigest()

    if threads == 1:
        return add(map(piece_digest, _pieces(paths)))
    with ThreadPoolExecutor(threads, "hash") as pool:
        return add(pool.map(piece_digest, _pieces(paths)))


def _pieces(paths: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    for path in paths:
        yield from ((path, offset) for offset in range(0, path.stat().st_size, _PIECE))


def _piece_digest(path: Path, offset: int) -> tuple[Path, int, bytes]:
    state, buffer, left = sha256(), memoryview(bytearray(_READ)), _PIECE
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while left and (count := file.readinto(buffer[: min(left, _READ)])):
            state.update(buffer[:count])
            left -= count
    return path, offset, state.digest()


def _sample_offsets(size: int) -> list[int]:
    """Return places that are spread evenly from the first page to the last."""
    last = max(0, size - _SAMPLE)
    return sorted({last * number // (_SAMPLES - 1) for number in range(_SAMPLES)})
