"""A folder of packed weights, shared by the processes of one user.

    LAYOUT-CONTENT.weights   packed weights, named by the digests of their layout and of the checkpoint's bytes
    SIGNS.content            the content digest of files with these signs (path, size, times ...), which saves hashing
    lock                     held by the process that packs
    *.new                    files being written; the next process that packs removes those of a crash

Only the owner may write there, because mapped bytes are not all checked. A mapped file has a shared lock, so it is not
removed to make room. Stdlib only.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from triptych.model.checkpoint.content import Signs
from triptych.model.checkpoint.packed_file import ArraySpec, PackedFileError, PackedFileWriter, Table, read_table
from triptych.model.errors import ConfigError
from triptych.model.system.cache_folders import untrusted

_LOCK_SECONDS = 900.0  # to wait for another process that packs; then this one packs for itself
_POLL_SECONDS = 0.1
_DIGEST = 32  # characters of each digest in a file's name
_CONTENT = re.compile(r"[0-9a-f]{64}")
_RECORD_BYTES = 64
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a named pipe would wait for its writer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedFile:
    """An open and locked file of packed weights; a `with` closes it, and a mapping keeps the lock."""

    name: str
    file: int
    table: Table

    def __enter__(self) -> PackedFile:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self.file)


class WeightsCache:
    """The folder, bounded to `max_bytes`; raises `ConfigError` if others can write there."""

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
        except FileExistsError:
            raise ConfigError(f"weights_cache {folder}: it is no folder, and no link to one") from None
        except OSError as error:
            raise ConfigError(f"weights_cache {folder}: it cannot be made or read: {error.strerror}") from None
        if reason := untrusted(found):
            raise ConfigError(f"weights_cache {folder}: it {reason}: another user could put weights there")

    def content(self, signs: Signs) -> str | None:
        """Return the digest of files with these signs, if it is known."""
        return _content_in(self.folder / f"{signs.digest}.content")

    def remember(self, signs: Signs, content: str) -> None:
        """Store the digest of files with these signs, unless the files are younger than two seconds."""
        if not signs.settled:
            return
        path = self.folder / f"{signs.digest}.content"
        new = path.with_suffix(f".{os.getpid()}.new")
        with suppress(OSError):  # then the digest is computed again
            new.write_text(content)
            new.replace(path)

    def has(self, layout: str) -> bool:
        """Whether there are weights of this layout."""
        return any(self.folder.glob(f"{layout[:_DIGEST]}-*.weights"))

    def open(self, layout: str, content: str) -> PackedFile | None:
        """Open and lock packed weights; None if they are missing, or damaged, which removes them."""
        path = self._path(layout, content)
        try:
            file = os.open(path, _READ)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("the packed weights %s cannot be read: %s", path.name, error.strerror)
            return None
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_SH)
            if reason := untrusted(os.fstat(file), stat.S_ISREG):
                raise PackedFileError(reason)
            table = read_table(file)
            if table.identity != _identity(layout, content):
                raise PackedFileError("is of something else than its name says")
        except (OSError, PackedFileError) as error:
            os.close(file)
            self.discard(path.name, str(error))
            return None
        with suppress(OSError):  # a read-only file system
            os.utime(path)  # the last use
        return PackedFile(path.name, file, table)

    def discard(self, name: str, reason: str) -> None:
        """Remove a file that cannot be used."""
        logger.warning("packed weights are removed: %s %s", name, reason)
        with suppress(OSError):
            (self.folder / name).unlink()

    def discard_unfinished(self, process: int) -> None:
        """Remove the file that an ended process was writing."""
        for left in self.folder.glob(f"*.{process}.new"):
            left.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Wait until no other process packs; yield whether this one can write, which a read-only folder prevents."""
        try:
            file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            logger.warning("weights_cache %s cannot be written: %s", self.folder, error.strerror)
            yield False
            return
        try:
            locked = _wait_for(file)
            if locked:
                for left in self.folder.glob("*.new"):
                    left.unlink(missing_ok=True)
            yield locked
        finally:
            os.close(file)

    @contextmanager
    def new_file(self, layout: str, content: str, arrays: Mapping[str, ArraySpec]) -> Iterator[NewFile]:
        """Write a file under the lock; it gets its name when the block ends. Raises `OSError` if there is no room."""
        path = self.folder / f"{layout[:_DIGEST]}.{os.getpid()}.new"
        table = Table.of(_identity(layout, content), arrays)
        self._make_room(table.size)
        self._forget({content[:_DIGEST]} | {path.stem.partition("-")[2] for path, _ in self._files()})
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_SH)  # it is about to be mapped
            yield NewFile(file, PackedFileWriter(file, table))
            path.replace(self._path(layout, content))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)

    def in_use(self, other_than: str | None = None) -> int:
        """Return the bytes of the files that processes have mapped, without the file of this name."""
        files = [(path, found) for path, found in self._files() if path.name != other_than]
        return sum(found.st_size for path, found in files if _is_locked(path))

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files to make room for `size` bytes; raises `OSError` if that fails."""
        kept = self._files()
        if self.max_bytes is not None:
            if size > self.max_bytes:
                raise OSError(errno.EFBIG, f"they take {size / 1e9:.2f} GB, more than weights_cache_size")
            left = sum(found.st_size for _, found in kept) + size - self.max_bytes
            for path, found in sorted(kept, key=lambda one: one[1].st_mtime):
                if left > 0 and not _is_locked(path):
                    logger.info("removing the packed weights %s to make room", path.name)
                    path.unlink(missing_ok=True)
                    left -= found.st_size
            if left > 0:
                raise OSError(errno.EFBIG, "the files that are in use leave no room within weights_cache_size")

    def _forget(self, contents: Collection[str]) -> None:
        """Remove the records of contents that are not among these."""
        for record in self.folder.glob("*.content"):
            if (_content_in(record) or "")[:_DIGEST] not in contents:
                with suppress(OSError):
                    record.unlink()

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        for path in self.folder.glob("*-*.weights"):
            with suppress(OSError):
                found.append((path, path.stat()))
        return found

    def _path(self, layout: str, content: str) -> Path:
        return self.folder / f"{layout[:_DIGEST]}-{content[:_DIGEST]}.weights"


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that is being written, and can already be mapped."""

    file: int
    writer: PackedFileWriter


def _identity(layout: str, content: str) -> dict[str, str]:
    return {"layout": layout, "content": content}


def _content_in(record: Path) -> str | None:
    """Return the digest in a record; None: it cannot be read, or is no record."""
    try:
        file = os.open(record, _READ)
        try:
            found = os.read(file, _RECORD_BYTES + 1).decode("ascii", "replace")
        finally:
            os.close(file)
    except OSError:
        return None
    return found if _CONTENT.fullmatch(found) else None


def _wait_for(file: int) -> bool:
    """Take the lock; return False if another process holds it for too long."""
    until, told = time.monotonic() + _LOCK_SECONDS, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not told:
                logger.info("waiting for another process that packs weights")
            told = True
        except OSError as error:  # a file system without locks
            logger.warning("weights_cache cannot be locked: %s", error.strerror)
            return False
        if time.monotonic() > until:
            logger.warning("another process has packed weights for %.0f s: not waiting any longer", _LOCK_SECONDS)
            return False
        time.sleep(_POLL_SECONDS)


def _is_locked(path: Path) -> bool:
    """Whether a process has mapped the file."""
    try:
        file = os.open(path, _READ)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(file)
    return False
