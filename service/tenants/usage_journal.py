"""A journal of usage that is not in the database yet: a file to which a line is appended for each ended request.

A write to a file outlives the process, so a kill loses nothing; only a power cut can lose what was not copied into the
database yet. Each journal is locked by the process that writes it, and `leftovers` reads those that lost theirs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

_SUFFIX = ".jsonl"
_MODE = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC


def new_name() -> str:
    """Return a name that no other journal has."""
    return secrets.token_hex(12)


class Journal:
    """A new journal in `folder`."""

    def __init__(self, folder: Path) -> None:
        """Raises `OSError`."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.file = folder / f"{new_name()}{_SUFFIX}"
        self._is_cut = False  # the last line, by a full disk
        self._descriptor = os.open(self.file, _MODE | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def name(self) -> str:
        return self.file.stem

    def append(self, row: Any) -> None:
        """Write a line; raises `OSError`."""
        line = b"\n" * self._is_cut + msgspec.json.encode(row) + b"\n"
        written = os.write(self._descriptor, line)
        self._is_cut = written < len(line)
        if self._is_cut:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def drop(self) -> None:
        """Delete the journal: all of it is in the database."""
        self.file.unlink(missing_ok=True)
        os.close(self._descriptor)


def leftovers(folder: Path, row: type[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name and the rows of each journal whose process has ended, and delete it afterwards."""
    for file in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            descriptor = os.open(file, _MODE)
        except OSError:
            continue  # another replica has just copied it
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file.stem, list(_rows(file.read_bytes(), row))
            file.unlink(missing_ok=True)
        except OSError:
            continue  # its process runs
        finally:
            os.close(descriptor)


def _rows(content: bytes, row: type[Any]) -> Iterator[Any]:
    """Yield the rows; the last line may be cut."""
    for line in content.splitlines():
        try:
            yield msgspec.json.decode(line, type=row)
        except msgspec.DecodeError:
            continue
