"""The folder in which the service keeps what must survive a restart (`--state-dir`), with one SQLite database.

`StateFolder` locks the folder: one service may use it, by itself or by its replicas on one machine. `Database`
has one connection and one thread, which executes all work on it in order. What was queued together is committed
together, and a result is given out only after the commit: it survives a kill and a power cut.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from triptych.model.errors import ConfigError

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], Any]

_FILE = "triptych.sqlite"
_BUSY_SECONDS = 10.0  # to wait for the writes of another replica
_MOST_TOGETHER = 256  # pieces of work in one transaction
_SHRINK_PAGES = 2_500  # that are given back at a time, 10 MB
_LOG_BYTES = 16 << 20  # of the write-ahead log that stay when it is empty


class _Piece(NamedTuple):
    """Work for the thread, and the future of its result."""

    work: Work
    future: Future[Any]
    is_alone: bool = False  # outside of transactions


class Database:
    """An SQLite database that one thread of this process reads and writes; one in memory needs no thread."""

    def __init__(self, file: Path | None) -> None:
        """Open `file`, which its owner alone may read, or a database in memory. Raises `ConfigError`."""
        self._queue: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._file = file
        try:
            if file is not None:
                _make_private(file)
            self._opened: sqlite3.Connection | None = self._open()
        except OSError as error:
            raise ConfigError(f"state_dir: {file}: {error.strerror}") from None
        except sqlite3.Error as error:
            raise ConfigError(f"state_dir: {file} cannot be opened as an SQLite database: {error}") from None
        self._thread: threading.Thread | None = None

    @property
    def _connection(self) -> sqlite3.Connection:
        """The connection, opened again after `close`."""
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> sqlite3.Connection:
        name = ":memory:" if self._file is None else str(self._file)
        connection = sqlite3.connect(
            name, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # of a new file
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA journal_size_limit={_LOG_BYTES}")
        connection.execute("PRAGMA synchronous=FULL")  # a commit is on the disk
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("CREATE TABLE IF NOT EXISTS schemas (part TEXT PRIMARY KEY, version INTEGER NOT NULL)")
        return connection

    def upgrade(self, part: str, steps: Sequence[str]) -> None:
        """Bring the tables of a `part` of the service up to date: run those of the `steps` that were not run yet.

        A step is a script of SQL, which is never changed later. Call it before the first `run`. Raises `ConfigError`.
        """
        execute = self._connection.execute
        try:
            execute("BEGIN IMMEDIATE")  # another replica may be doing the same
            row = execute("SELECT version FROM schemas WHERE part = ?", (part,)).fetchone()
            version = 0 if row is None else int(row[0])
            if version > len(steps):
                raise ConfigError(
                    f"state_dir: {self._file} was written by a newer version of triptych ({part} {version}, known: "
                    f"{len(steps)}); use that version, or another folder"
                )
            for step in steps[version:]:
                for statement in filter(str.strip, step.split(";")):
                    execute(statement)
            execute("INSERT OR REPLACE INTO schemas VALUES (?, ?)", (part, len(steps)))
            execute("COMMIT")
        except sqlite3.Error as error:
            raise ConfigError(f"state_dir: {self._file}: {error}") from None
        finally:
            if self._connection.in_transaction:
                execute("ROLLBACK")

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Let the thread execute `work`; the future has its result once it is committed, or what it raised.

        Work that raises is undone, and only it.
        """
        future: Future[T] = Future()
        if self._file is None:
            self._commit([_Piece(work, future)])
        else:
            self._put(_Piece(work, future))
        return future

    def _put(self, piece: _Piece) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="triptych-state", daemon=True)
            self._thread.start()
        piece.future.set_running_or_notify_cancel()  # so that a caller who stops waiting does not cancel the work
        self._queue.put(piece)

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of `work` once it is committed. It goes on if the caller is cancelled."""
        return await asyncio.wrap_future(self.submit(work))

    async def shrink(self) -> None:
        """Give some of the pages that nothing uses to the file system; a file of an earlier version keeps its size."""
        if self._file is None:
            return
        piece = _Piece(_give_back, Future(), is_alone=True)
        self._put(piece)
        await asyncio.wrap_future(piece.future)

    def close(self) -> None:
        """Finish all work and close the database; later work opens it again."""
        if self._file is None or self._opened is None:
            return
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        self._opened.close()
        self._thread = self._opened = None

    def _work(self) -> None:
        ends = False
        while not ends:
            together = [self._queue.get()]
            while len(together) < _MOST_TOGETHER and not self._queue.empty():
                together.append(self._queue.get_nowait())
            ends = None in together
            pieces = [one for one in together if one is not None]
            if shared := [one for one in pieces if not one.is_alone]:
                self._commit(shared)
            for piece in pieces:
                if piece.is_alone:
                    self._do_alone(piece)

    def _do_alone(self, piece: _Piece) -> None:
        try:
            piece.future.set_result(piece.work(self._connection))
        except Exception as error:
            piece.future.set_exception(error)

    def _commit(self, together: Sequence[_Piece]) -> None:
        """Execute pieces of work in one transaction, and then give out their results."""
        results: list[tuple[Future[Any], Any]] = []
        execute = self._connection.execute
        try:
            execute("BEGIN IMMEDIATE")
            for work, future, _ in together:
                execute("SAVEPOINT piece")
                try:
                    results.append((future, work(self._connection)))
                except Exception as error:
                    execute("ROLLBACK TO piece")
                    future.set_exception(error)
                execute("RELEASE piece")
            execute("COMMIT")
        except Exception as error:  # a full disk, or a writer of another process that does not end
            if self._connection.in_transaction:
                execute("ROLLBACK")
            for _, future, _ in together:
                if not future.done():
                    future.set_exception(error)
            return
        for future, result in results:
            future.set_result(result)


def _give_back(connection: sqlite3.Connection) -> None:
    if connection.execute("PRAGMA freelist_count").fetchone()[0]:
        connection.executescript(f"PRAGMA incremental_vacuum({_SHRINK_PAGES})")  # `execute` stops after one page
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # which cuts the file


def _make_private(file: Path) -> None:
    """Let only its owner read a database, which is made if it is missing; SQLite gives its further files the same mode.

    An existing file is not opened: closing it would release the locks that this process has on it.
    """
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    if file.stat().st_uid == os.geteuid():
        file.chmod(0o600)


class StateFolder:
    """The locked folder `path` with its database, `db`."""

    def __init__(self, path: str, *, shared: bool = False) -> None:
        """Make and lock the folder, for all replicas together if `shared`. Raises `ConfigError`."""
        self.path = Path(path)
        self._lock = _locked(self.path, "lock", fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        self.db = Database(self.path / _FILE)

    @classmethod
    def of(cls, path: str, *, shared: bool = False) -> StateFolder | None:
        """Return the folder of the setting `state_dir`; None if it is empty."""
        return cls(path, shared=shared) if path else None

    def close(self) -> None:
        """Finish all writes, and unlock the folder."""
        self.db.close()
        os.close(self._lock)


@contextmanager
def of_one_service(path: str) -> Iterator[None]:
    """Let only the replicas of this service use the state folder `path` in the block; do nothing without one.

    The locks of replicas do not say whose they are: another service, of other models and keys, would run the batches.
    Raises `ConfigError`.
    """
    lock = _locked(Path(path), "service", fcntl.LOCK_EX) if path else None
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _locked(folder: Path, name: str, kind: int) -> int:
    """Make a folder, and return a descriptor that holds a lock in it. Raises `ConfigError`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"state_dir {folder}: {error.strerror}") from None
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(f"state_dir {folder}: another service uses this folder; give each its own") from None
    return lock
