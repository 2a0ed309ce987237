"""What the holders of keys have used, by hour, name, model and kind of request.

A request that an engine accepted counts when it ends: with the tokens that its reply's `usage` has, or with those that
there were until then if it broke off. Sums are added to the database every two seconds; until then they are in a
journal (`triptych.service.tenants.usage_journal`). Without a state folder all of it is in memory.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from triptych.service.core.request_context import RequestContext
from triptych.service.core.state_folder import Database, StateFolder
from triptych.service.tenants.usage_journal import Journal, leftovers, new_name

HOUR: Final = 3600
_FLUSH_SECONDS = 2.0
_KEEP_HOURS = 400 * 24
_FOLDER = "usage"
MOST_GROUPS: Final = 20_000  # of a reply; they take the event loop some 0.1 s

logger = logging.getLogger(__name__)


class Amounts(NamedTuple):
    """What was used; the fields are columns of the database, and fields of replies."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    audio_seconds: float = 0.0
    images: int = 0
    engine_seconds: float = 0.0


class Row(NamedTuple):
    """What was used within an hour, in one group."""

    hour: int  # since 1970
    tenant: str
    model: str
    task: str
    amounts: Amounts


Key = tuple[int, str, str, str]
Sums = dict[Key, Amounts]
GROUPS: Final = {  # what `by` may name: a column, or what is made of one
    "tenant": "tenant",
    "model": "model",
    "task": "task",
    "hour": f"hour * {HOUR}",
    "day": f"hour / 24 * {24 * HOUR}",
}
_FIELDS = Amounts._fields
_SCHEMA = (
    "CREATE TABLE usage (hour INTEGER, tenant TEXT, model TEXT, task TEXT, "
    + ", ".join(f"{name} NUMERIC NOT NULL" for name in _FIELDS)
    + ", PRIMARY KEY (hour, tenant, model, task)) WITHOUT ROWID;"
    "CREATE TABLE usage_journals (name TEXT PRIMARY KEY) WITHOUT ROWID;"
    "CREATE TABLE usage_id (id TEXT PRIMARY KEY)",
)
_ADD = (
    f"INSERT INTO usage VALUES ({', '.join('?' * (4 + len(_FIELDS)))}) ON CONFLICT (hour, tenant, model, task) "
    f"DO UPDATE SET {', '.join(f'{name} = {name} + excluded.{name}' for name in _FIELDS)}"
)


class _Batch(NamedTuple):
    """Sums that are added to the database together, and once: a caller who is cancelled may leave one half done."""

    sums: Sums
    journal: Journal | None  # None: it could not be written
    other_name: str

    @property
    def name(self) -> str:
        return self.other_name if self.journal is None else self.journal.name


class Found(NamedTuple):
    """The answer of one replica to a question."""

    database: str  # its id: replicas of one machine share one
    rows: list[tuple[list[str | int], Amounts]]


class Question(NamedTuple):
    """A question about usage: from one hour to before another, in groups."""

    begin: int
    end: int
    by: tuple[str, ...]


class Usage:
    """The usage of all tenants, as this process and its database know it."""

    def __init__(self, folder: StateFolder | None) -> None:
        """Raises `ConfigError`."""
        self.since = int(time.time())
        self._db = folder.db if folder is not None else Database(None)
        self._folder: Path | None = None if folder is None else folder.path / _FOLDER
        self._db.upgrade("usage", _SCHEMA)
        self._sums: Sums = {}
        self._journal: Journal | None = None  # of these sums
        self._pending: _Batch | None = None  # that is being added to the database
        self._copied: list[str] = []  # names of batches that are in the database, without a journal
        self._lock = asyncio.Lock()
        self._failing = False
        self.id = self._db.submit(_own_id).result()
        if self._folder is not None:
            for name, rows in leftovers(self._folder, Row):
                self._db.submit(_addition(name, _summed(rows))).result()
        self._db.submit(
            lambda db: db.execute("DELETE FROM usage WHERE hour < ?", (self.hour() - _KEEP_HOURS,)) and None
        )

    @staticmethod
    def hour() -> int:
        """Return the current hour, since 1970."""
        return int(time.time()) // HOUR

    def add(self, context: RequestContext, engine_seconds: float) -> None:
        """Count a request that has ended; it is written before the end of its reply is sent."""
        amounts = Amounts(
            *(1, context.tokens_in, context.cached_tokens, context.tokens_out),
            *(context.audio_seconds, context.images, engine_seconds),
        )
        row = Row(self.hour(), context.tenant.name, context.model, context.task or "", amounts)
        self._sums[row[:4]] = _plus(self._sums.get(row[:4]), amounts)
        if self._folder is None:
            return
        try:
            if self._journal is None:
                self._journal = Journal(self._folder)
            self._journal.append(row)
        except OSError as error:
            self._failed(error)

    async def write_forever(self) -> None:
        """Add new sums to the database every two seconds, until cancelled."""
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """Add what is new to the database; what cannot be added stays in its journal and in memory."""
        async with self._lock:
            await self._write()

    async def _write(self) -> None:
        """Write what is new; the caller holds the lock."""
        while self._pending or self._sums:
            if self._pending is None:
                self._pending = _Batch(self._sums, self._journal, new_name())
                self._sums, self._journal = {}, None
            batch = self._pending
            try:
                await self._db.run(_addition(batch.name, batch.sums, self._copied))
            except sqlite3.Error as error:
                self._failed(error)
                return
            self._pending, self._failing = None, False
            self._copied = []
            try:
                if batch.journal is not None:
                    await asyncio.to_thread(batch.journal.drop)
                self._copied.append(batch.name)
            except OSError as error:  # the name is remembered: the next start finds the file
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        if not self._failing:
            logger.error("usage cannot be written to state_dir, and is kept in memory: %s", error)
        self._failing = True

    async def find(self, question: Question) -> Found:
        """Return what was used, in groups, as far back as this process's database knows it.

        Raises `sqlite3.Error` while it cannot be read.
        """
        async with self._lock:
            await self._write()
            found = Found(self.id, await self._db.run(lambda db: _select(db, question)))
            waiting = [*self._sums.items(), *(self._pending.sums.items() if self._pending is not None else ())]
        more = _grouped(waiting, question)  # what a full disk keeps out of the database
        return found._replace(rows=merged([found, Found("memory", more)])) if more else found

    async def close(self) -> None:
        """Write everything; the state folder is closed later."""
        await self.flush()


def merged(answers: Iterable[Found]) -> list[tuple[list[str | int], Amounts]]:
    """Add up the answers of replicas; of those that share a database the one with most requests counts."""
    found: dict[tuple[str | int, ...], Amounts] = {}
    ordered = sorted(answers, key=lambda answer: sum(amounts.requests for _, amounts in answer.rows))
    for answer in {answer.database: answer for answer in ordered}.values():
        for group, amounts in answer.rows:
            found[tuple(group)] = _plus(found.get(tuple(group)), amounts)
    return [(list(group), found[group]) for group in sorted(found, key=str)]


def added(amounts: Iterable[Amounts]) -> Amounts:
    """Return the sum of amounts."""
    total = Amounts()
    for one in amounts:
        total = _plus(total, one)
    return total


def _plus(one: Amounts | None, other: Amounts) -> Amounts:
    return other if one is None else Amounts._make(a + b for a, b in zip(one, other, strict=True))


def _summed(rows: Sequence[Row]) -> Sums:
    sums: Sums = {}
    for row in rows:
        sums[row[:4]] = _plus(sums.get(row[:4]), row.amounts)
    return sums


def _addition(name: str, sums: Sums, copied: Sequence[str] = ()) -> Callable[[sqlite3.Connection], None]:
    """Return the work of adding the sums of a batch, once: after a crash its journal may be read again.

    The batches that were `copied` before have no journal any more, and need not be remembered.
    """

    def add(db: sqlite3.Connection) -> None:
        db.executemany("DELETE FROM usage_journals WHERE name = ?", [(name,) for name in copied])
        if not db.execute("INSERT OR IGNORE INTO usage_journals VALUES (?)", (name,)).rowcount:
            return
        db.executemany(_ADD, [(*key, *amounts) for key, amounts in sums.items()])

    return add


def _own_id(db: sqlite3.Connection) -> str:
    db.execute("INSERT INTO usage_id SELECT ? WHERE NOT EXISTS (SELECT * FROM usage_id)", (secrets.token_hex(8),))
    return str(db.execute("SELECT id FROM usage_id").fetchone()[0])


def _grouped(sums: Iterable[tuple[Key, Amounts]], question: Question) -> list[tuple[list[str | int], Amounts]]:
    """Return what `_select` would, of sums that are in memory."""
    found: dict[tuple[str | int, ...], Amounts] = {}
    for (hour, tenant, model, task), amounts in sums:
        if question.begin <= hour < question.end:
            labels: dict[str, str | int] = {"tenant": tenant, "model": model, "task": task}
            labels |= {"hour": hour * HOUR, "day": hour // 24 * 24 * HOUR}
            group = tuple(labels[name] for name in question.by)
            found[group] = _plus(found.get(group), amounts)
    return [(list(group), amounts) for group, amounts in found.items()]


def _select(db: sqlite3.Connection, question: Question) -> list[tuple[list[str | int], Amounts]]:
    groups = [GROUPS[name] for name in question.by]
    sums = [f"COALESCE(SUM({name}), 0)" for name in _FIELDS]
    query = f"SELECT {', '.join([*groups, *sums])} FROM usage WHERE hour >= ? AND hour < ?"
    if groups:
        query += f" GROUP BY {', '.join(groups)} LIMIT {MOST_GROUPS + 1}"
    rows = db.execute(query, (question.begin, question.end)).fetchall()
    return [(list(row[: len(groups)]), Amounts(*row[len(groups) :])) for row in rows]
