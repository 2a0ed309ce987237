"""Files and batches in a folder: a SQLite database, and the content of each file.

A result of a batch is in the database from the transaction that counts it until the output files are complete. So a
process can end at any point: what was committed is kept, and everything else is computed again. A file on disk counts
only once the database has its row; `sweep` removes others.

Several processes of one machine may use the folder. The one that runs batches has the lease, and every transaction of
its work checks it, so a process that was stopped for long and goes on changes nothing.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from triptych.service.batches.records import (
    ACTIVE,
    RETENTION_SECONDS,
    Batch,
    Result,
    StoredFile,
    Usage,
    dumped,
    loaded,
    now,
)
from triptych.service.core.state_folder import Database

T = TypeVar("T")

LEAST_BYTES = 4_096  # that any file counts for: the smallest unit of most disks
LEASE_SECONDS = 5.0  # without a sign of its holder, after which another process takes the lease
_SOME_RESULTS = 64
_ORPHAN_SECONDS = 3_600  # age of a file without a row that is removed: younger ones may be uploads


_SCHEMA = (
    """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL);
CREATE INDEX files_of ON files (owner, number);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, status TEXT NOT NULL,
    input_file_id TEXT NOT NULL, ended_at INTEGER, value TEXT NOT NULL);
CREATE INDEX batches_of ON batches (owner, number);
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE results (batch TEXT NOT NULL, line INTEGER NOT NULL, ok INTEGER NOT NULL, data BLOB NOT NULL);
CREATE UNIQUE INDEX one_result ON results (batch, line);
CREATE TABLE lease (id INTEGER PRIMARY KEY CHECK (id = 1), holder TEXT NOT NULL, beats INTEGER NOT NULL);
INSERT INTO lease VALUES (1, '', 0);
""",
)


class LeaseLostError(Exception):
    """Another process runs the batches now."""


class NoSpaceError(Exception):
    """The state would exceed its limit of bytes."""


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"


def _file_id(upload: Path) -> str:
    """Return the id of the file that an upload becomes."""
    return f"file-{upload.stem}"


class Store:
    """The files and batches of a folder."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Make what is missing in the folder. Raises `ConfigError`, `OSError`."""
        self.files = folder / "files"
        self.files.mkdir(mode=0o700, exist_ok=True)
        self._max_bytes = max_bytes
        self._holder = secrets.token_hex(8)  # names this process in the lease
        self._lease = _SeenLease()
        self._database = Database(folder / "batches.sqlite")  # apart: results are large
        self._database.upgrade("batches", _SCHEMA)

    async def run(self, act: Callable[[Tables], T]) -> T:
        """Return what `act` makes of the tables once it is committed; what raises is undone."""
        return await self._database.run(
            lambda connection: act(Tables(connection, self.files, self._max_bytes, self._holder, self._lease))
        )

    def path_of(self, file_id: str) -> Path:
        return self.files / file_id

    def new_upload(self) -> Path:
        """Return a path for a file's content, which `add_file` takes."""
        return self.files / f"{new_id('')}.part"

    async def shrink(self) -> None:
        """Give some of the room of removed results back to the file system."""
        await self._database.shrink()

    def discard(self, upload: Path) -> None:
        """Remove the content of a file that the database does not have: its transaction was undone."""
        upload.unlink(missing_ok=True)
        self.path_of(_file_id(upload)).unlink(missing_ok=True)

    def close(self) -> None:
        self._database.close()


@dataclass(slots=True)
class _SeenLease:
    """The newest sign of the lease's holder, and when it was seen first."""

    beats: int = -1
    since: float = 0.0


class Tables:
    """The tables within one transaction."""

    def __init__(
        self, connection: sqlite3.Connection, files: Path, max_bytes: int, holder: str, lease: _SeenLease
    ) -> None:
        self._database = connection
        self._files = files
        self._max_bytes = max_bytes
        self._holder = holder
        self._lease = lease

    # Files

    def add_file(self, content: Path, owner: str, filename: str, purpose: str, seconds: int) -> StoredFile:
        """Keep a complete and synced file. Raises `NoSpaceError`."""
        if self._bytes_used() + max(content.stat().st_size, LEAST_BYTES) > self._max_bytes:
            raise NoSpaceError
        return self._keep(content, owner, filename, purpose, seconds)

    def _keep(self, content: Path, owner: str, filename: str, purpose: str, seconds: int) -> StoredFile:
        time_ = now()
        found = StoredFile(_file_id(content), owner, content.stat().st_size, time_, time_ + seconds, filename, purpose)
        content.rename(self._files / found.id)
        _sync_folder(self._files)
        self._insert(found)
        return found

    def _insert(self, file: StoredFile) -> None:
        values = asdict(file)
        names = ", ".join(values)
        self._database.execute(f"INSERT INTO files ({names}) VALUES ({_marks(values)})", tuple(values.values()))

    def file(self, owner: str, file_id: str) -> StoredFile | None:
        """Return a file that its owner may read now."""
        found = self._rows(
            f"SELECT {_FILE} FROM files WHERE id = ? AND owner = ? AND expires_at > ?", file_id, owner, now()
        )
        return StoredFile(*found[0]) if found else None

    def files(
        self, owner: str, purpose: str | None, after: str | None, limit: int, *, ascending: bool
    ) -> list[StoredFile]:
        """Return a page of an owner's files by the time they were made."""
        terms, values = ["owner = ?", "expires_at > ?"], [owner, now()]
        if purpose is not None:
            terms.append("purpose = ?")
            values.append(purpose)
        return [StoredFile(*row) for row in self._page("files", _FILE, terms, values, after, limit, ascending)]

    def delete_file(self, owner: str, file_id: str) -> bool | None:
        """Delete a file's row; False if an unfinished batch reads it, None if the owner has no such file."""
        if self.file(owner, file_id) is None:
            return None
        if self._is_input(file_id):
            return False
        self._database.execute("DELETE FROM files WHERE id = ?", (file_id,))
        return True

    def _is_input(self, file_id: str) -> bool:
        marks = _marks(ACTIVE)
        return bool(
            self._rows(f"SELECT 1 FROM batches WHERE input_file_id = ? AND status IN ({marks})", file_id, *ACTIVE)
        )

    def _bytes_used(self) -> int:
        files = self._rows("SELECT COALESCE(SUM(MAX(bytes, ?)), 0) FROM files", LEAST_BYTES)[0][0]
        return int(files) + self._database_bytes()

    def _database_bytes(self) -> int:
        """Return the bytes of pages in use: those of removed results are used again."""
        pages, free, size = (
            self._rows(f"PRAGMA {name}")[0][0] for name in ("page_count", "freelist_count", "page_size")
        )
        return (int(pages) - int(free)) * int(size)

    @property
    def has_room(self) -> bool:
        """Whether the state is below its limit."""
        return self._bytes_used() < self._max_bytes

    @property
    def bytes_used(self) -> int:
        return self._bytes_used()

    # Batches

    def add_batch(self, batch: Batch, most_active: int) -> bool:
        """Keep a new batch; False if the owner has `most_active` unfinished ones."""
        marks = _marks(ACTIVE)
        active = self._rows(
            f"SELECT COUNT(*) FROM batches WHERE owner = ? AND status IN ({marks})", batch.owner, *ACTIVE
        )
        if active[0][0] >= most_active:
            return False
        self._database.execute(
            "INSERT INTO batches (id, owner, status, input_file_id, value) VALUES (?, ?, ?, ?, ?)",
            (batch.id, batch.owner, batch.status, batch.input_file_id, dumped(batch)),
        )
        return True

    def batch(self, owner: str, batch_id: str) -> Batch | None:
        found = self._rows("SELECT value FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
        return loaded(found[0][0]) if found else None

    def batches(self, owner: str, after: str | None, limit: int) -> list[Batch]:
        """Return a page of an owner's batches, the newest first."""
        rows = self._page("batches", "value", ["owner = ?"], [owner], after, limit, False)
        return [loaded(row[0]) for row in rows]

    def active(self) -> list[Batch]:
        """Return the unfinished batches of all owners, the oldest first."""
        rows = self._rows(f"SELECT value FROM batches WHERE status IN ({_marks(ACTIVE)}) ORDER BY number", *ACTIVE)
        return [loaded(row[0]) for row in rows]

    def cancel(self, owner: str, batch_id: str) -> Batch | None:
        """Have an unfinished batch cancelled; returns it as it is then."""
        batch = self.batch(owner, batch_id)
        if batch is not None and batch.status in ("validating", "in_progress"):
            batch.enter("cancelling")
            self._save(batch)
        return batch

    def unfinished(self, batch_id: str) -> Batch | None:
        """Return a batch as it is now; None if it has ended."""
        marks = _marks(ACTIVE)
        found = self._rows(f"SELECT value FROM batches WHERE id = ? AND status IN ({marks})", batch_id, *ACTIVE)
        return loaded(found[0][0]) if found else None

    def change(self, batch_id: str, act: Callable[[Batch], None]) -> Batch:
        """Change a batch as the holder of the lease. Raises `LeaseLostError`."""
        self._check_lease()
        batch = loaded(self._rows("SELECT value FROM batches WHERE id = ?", batch_id)[0][0])
        act(batch)
        self._save(batch)
        return batch

    def _save(self, batch: Batch) -> None:
        ended = None if batch.is_active else now()
        self._database.execute(
            "UPDATE batches SET status = ?, value = ?, ended_at = ? WHERE id = ?",
            (batch.status, dumped(batch), ended, batch.id),
        )

    # Results

    def lines_done(self, batch_id: str) -> set[int]:
        """Return the numbers of the lines that have a result."""
        return {row[0] for row in self._rows("SELECT line FROM results WHERE batch = ?", batch_id)}

    def add_results(self, batch_id: str, results: Iterable[Result]) -> Batch:
        """Keep results and count them, together; returns the batch as it is then. Raises `LeaseLostError`."""

        def count(batch: Batch) -> None:
            for result in results:
                done = self._database.execute(
                    "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)",
                    (batch_id, result.line, result.ok, result.data),
                )
                if not done.rowcount:
                    continue
                batch.completed += result.ok
                batch.failed += not result.ok
                for item in fields(Usage):
                    more = getattr(result.usage, item.name)
                    setattr(batch.usage, item.name, getattr(batch.usage, item.name) + more)

        return self.change(batch_id, count)

    def results(self, batch_id: str, after: int) -> list[tuple[int, int, bytes]]:
        """Return the next results of a batch by line: the line, whether it completed, and the line of its file."""
        return self._rows(
            "SELECT line, ok, data FROM results WHERE batch = ? AND line > ? ORDER BY line LIMIT ?",
            *(batch_id, after, _SOME_RESULTS),
        )

    def finish(self, batch_id: str, status: str, output: Path | None, errors: Path | None, unrun: int) -> Batch:
        """End a batch with its complete output files. Raises `LeaseLostError`."""

        def end(batch: Batch) -> None:
            batch.failed += unrun
            batch.enter(status)
            self._database.execute("DELETE FROM results WHERE batch = ?", (batch_id,))
            made: dict[str, str | None] = {}
            for path, kind in ((output, "output"), (errors, "error")):
                name = f"{batch_id}_{kind}.jsonl"
                made[kind] = (
                    None
                    if path is None
                    else self._keep(path, batch.owner, name, "batch_output", batch.output_seconds).id
                )
            batch.output_file_id, batch.error_file_id = made["output"], made["error"]

        return self.change(batch_id, end)

    # The lease, and cleaning

    def take_lease(self) -> bool:
        """Return whether this process may run batches now: it has the lease, or its holder gave no sign for long."""
        holder, beats = self._rows("SELECT holder, beats FROM lease")[0]
        lease, time_ = self._lease, time.monotonic()
        if beats != lease.beats:
            lease.beats, lease.since = beats, time_
        if holder not in ("", self._holder) and time_ - lease.since < LEASE_SECONDS:
            return False
        self._database.execute("UPDATE lease SET holder = ?, beats = beats + 1", (self._holder,))
        return True

    def drop_lease(self) -> None:
        """Let another process run the batches at once."""
        self._database.execute("UPDATE lease SET holder = '' WHERE holder = ?", (self._holder,))

    def expire(self) -> tuple[set[str], set[str]]:
        """Remove what has expired; return the files that are gone and those that stay. Raises `LeaseLostError`."""
        self._check_lease()
        marks = _marks(ACTIVE)
        gone = self._rows(
            "SELECT id FROM files WHERE expires_at <= ? AND id NOT IN "
            f"(SELECT input_file_id FROM batches WHERE status IN ({marks}))",
            *(now(), *ACTIVE),
        )
        self._database.executemany("DELETE FROM files WHERE id = ?", gone)
        self._database.execute("DELETE FROM batches WHERE ended_at < ?", (now() - RETENTION_SECONDS,))
        return {row[0] for row in gone}, {row[0] for row in self._rows("SELECT id FROM files")}

    # Parts of the above

    def _page(
        self,
        table: str,
        columns: str,
        terms: list[str],
        values: list[Any],
        after: str | None,
        limit: int,
        ascending: bool,
    ) -> list[tuple[Any, ...]]:
        """Return a page of rows in the order in which they were made; none after an id that is not the owner's."""
        if after is not None:
            terms = [
                *terms,
                f"number {'>' if ascending else '<'} (SELECT number FROM {table} WHERE id = ? AND owner = ?)",
            ]
            values = [*values, after, values[0]]
        order = "ASC" if ascending else "DESC"
        return self._rows(
            f"SELECT {columns} FROM {table} WHERE {' AND '.join(terms)} ORDER BY number {order} LIMIT ?", *values, limit
        )

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._database.execute(query, values).fetchall()

    def _check_lease(self) -> None:
        if self._rows("SELECT holder FROM lease") != [(self._holder,)]:
            raise LeaseLostError


_FILE = ", ".join(item.name for item in fields(StoredFile))


def _marks(values: Iterable[object]) -> str:
    return ", ".join("?" for _ in values)


def sweep(files: Path, gone: set[str], known: set[str]) -> None:
    """Remove the content of files that are gone, and old files without a row."""
    for path in files.iterdir():
        if path.name in gone or (path.name not in known and _age(path) > _ORPHAN_SECONDS):
            path.unlink(missing_ok=True)


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _sync_folder(folder: Path) -> None:
    """Make the names of a folder's files survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
