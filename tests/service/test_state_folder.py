"""The folder of what survives a restart: one service at a time, work in order, committed before it is answered."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from triptych.model.errors import ConfigError
from triptych.service.batches.store import Store
from triptych.service.core.state_folder import Database, StateFolder

STEPS = ("CREATE TABLE words (word TEXT PRIMARY KEY)",)


def add(word: str) -> Callable[[sqlite3.Connection], None]:
    return lambda db: db.execute("INSERT INTO words VALUES (?)", (word,)) and None


def words(db: sqlite3.Connection) -> list[str]:
    return [row[0] for row in db.execute("SELECT word FROM words ORDER BY word")]


def test_what_was_answered_is_there_after_a_restart_and_failed_work_alone_is_undone(tmp_path: Path) -> None:
    folder = StateFolder(str(tmp_path / "state"))
    folder.db.upgrade("words", STEPS)
    futures = [folder.db.submit(add(word)) for word in ("a", "b", "a", "c")]
    assert [future.exception() is None for future in futures] == [True, True, False, True]
    copy = sqlite3.connect(folder.path / "triptych.sqlite")  # what another process would find after a kill
    assert words(copy) == ["a", "b", "c"]
    copy.close()
    folder.close()
    again = StateFolder(str(tmp_path / "state"))
    again.db.upgrade("words", (*STEPS, "ALTER TABLE words ADD COLUMN size INTEGER; CREATE INDEX sizes ON words (size)"))
    assert again.db.submit(words).result() == ["a", "b", "c"]
    again.close()
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def test_only_its_owner_reads_what_is_in_a_folder_that_others_may_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "batches.sqlite").touch(0o644)  # an earlier version made it so
    folder, store = StateFolder(str(tmp_path)), Store(tmp_path, 1 << 30)
    asyncio.run(store.run(lambda tables: tables.active()))
    modes = {path.name: path.stat().st_mode & 0o077 for path in tmp_path.iterdir()}
    assert {"triptych.sqlite", "batches.sqlite", "files"} <= modes.keys() and not any(modes.values()), modes
    store.close()
    folder.close()


def test_a_newer_schema_and_a_broken_file_are_refused_by_name(tmp_path: Path) -> None:
    folder = StateFolder(str(tmp_path))
    folder.db.upgrade("words", (*STEPS, "CREATE TABLE more (x)"))
    with pytest.raises(ConfigError, match="newer version"):
        folder.db.upgrade("words", STEPS)
    folder.close()
    for file in tmp_path.glob("triptych.sqlite*"):
        file.write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match=r"state_dir.*cannot be opened"):
        StateFolder(str(tmp_path))


def test_one_service_has_a_folder_and_replicas_share_it(tmp_path: Path) -> None:
    first = StateFolder(str(tmp_path))
    for shared in (False, True):
        with pytest.raises(ConfigError, match="another service uses this folder"):
            StateFolder(str(tmp_path), shared=shared)
    first.close()
    replicas = [StateFolder(str(tmp_path), shared=True) for _ in range(2)]
    for at, one in enumerate(replicas):
        one.db.upgrade("words", STEPS)
        one.db.submit(add(str(at))).result()
    assert replicas[0].db.submit(words).result() == ["0", "1"]
    with pytest.raises(ConfigError, match="another service"):
        StateFolder(str(tmp_path))
    for one in replicas:
        one.close()


def test_the_room_of_what_is_removed_goes_back_to_the_file_system(tmp_path: Path) -> None:
    database = Database(tmp_path / "words.sqlite")
    database.upgrade("words", STEPS)
    database.submit(lambda db: db.execute("INSERT INTO words VALUES (hex(zeroblob(20000000)))") and None).result()
    database.submit(lambda db: db.execute("DELETE FROM words") and None).result()
    used = [sum(path.stat().st_size for path in tmp_path.iterdir())]
    for _ in range(10):
        asyncio.run(database.shrink())
        used.append((tmp_path / "words.sqlite").stat().st_size)
    assert used[0] > 40_000_000 and used[-1] < 100_000, used
    database.close()
