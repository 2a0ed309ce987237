"""Usage by name of key: it adds up to the `usage` of all replies, and a kill loses none of it."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.support import App, ask, events, make_app, run
from triptych.service.core import state_folder
from triptych.service.core.request_context import RequestContext
from triptych.service.core.state_folder import StateFolder
from triptych.service.routes import usage as routes
from triptych.service.settings.service_settings import ServiceSettings
from triptych.service.settings.tenant import Tenant
from triptych.service.tenants import tenancy, usage
from triptych.service.tenants.usage import Amounts, Found, Question, Row, Usage, added, merged
from triptych.service.tenants.usage_journal import Journal, leftovers

ADMIN = {"authorization": "Bearer root"}
ALL = Question(0, 10**9, ("tenant",))


def app_of(tmp_path: Path, state: str = "", **script: Any) -> App:
    file = tmp_path / "keys"
    file.write_text("alice a\nbob b\nplain\n")
    settings = ServiceSettings(api_key_file=str(file), admin_keys=("root",), state_dir=state)
    return make_app(settings=settings, **script)


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def usage_of(client: httpx.AsyncClient, query: str = "") -> Any:
    return (await client.get(f"/usage{query}", headers=ADMIN)).raise_for_status().json()


def test_usage_adds_up_to_that_of_all_replies_though_clients_leave_and_requests_fail(tmp_path: Path) -> None:
    app, numbers = app_of(tmp_path, str(tmp_path / "state"), delay_s=0.001), random.Random(5)
    told = {"alice": Amounts(), "bob": Amounts(), "unnamed": Amounts()}
    names = {"a": "alice", "b": "bob", "plain": "unnamed"}
    broken = dict.fromkeys(told, 0)

    async def one(client: httpx.AsyncClient) -> None:
        holder = numbers.choice(list(names))
        prompt = [5] * numbers.randint(1, 9)
        stream = numbers.random() < 0.5
        body: dict[str, Any] = {
            "model": "gen",
            "prompt": prompt,
            "max_tokens": numbers.randint(1, 20),
            "stream": stream,
        }
        kind = numbers.choice(["generate", "encode", "bad", "leaves", "chat"])
        if kind == "encode":
            reply = await client.post("/encode", json={"model": "enc", "input": ["hello"] * 3}, headers=key(holder))
            used = reply.json()["usage"]
        elif kind == "bad":
            await client.post("/generate", json=body | {"top_p": 7}, headers=key(holder))
            return
        elif kind == "leaves":
            task = asyncio.create_task(client.post("/generate", json=body, headers=key(holder)))
            await asyncio.sleep(numbers.random() * 0.01)
            if task.cancel():
                await asyncio.wait({task})
                broken[names[holder]] += 1
                return
            used = task.result().json()["usage"]
        else:
            reply = await client.post("/generate", json=body, headers=key(holder))
            used = events(reply.text)[-2]["usage"] if stream else reply.json()["usage"]
        told[names[holder]] = added(
            [
                told[names[holder]],
                Amounts(1, used["prompt_tokens"], used.get("cached_tokens", 0), used.get("completion_tokens", 0)),
            ]
        )

    async def work(client: httpx.AsyncClient) -> Any:
        await asyncio.gather(*(one(client) for _ in range(200)))
        await asyncio.sleep(0.05)
        return await usage_of(client)

    found = {group.pop("tenant"): group for group in run(app, work)["data"]}
    assert set(found) == set(told)
    left = 0
    for name, sums in found.items():
        extra = sums["requests"] - told[name].requests  # of clients that left after their request was accepted
        assert 0 <= extra <= broken[name]
        left += extra
        for field in ("prompt_tokens", "completion_tokens"):
            more = sums[field] - getattr(told[name], field)
            assert (more == 0) if not extra else 0 <= more <= extra * 20, (name, field)
        assert sums["engine_seconds"] > 0
    assert left


def test_groups_times_and_refusals(tmp_path: Path) -> None:
    app = app_of(tmp_path)

    async def work(client: httpx.AsyncClient) -> list[Any]:
        for name in ("a", "a", "b"):
            body = {"model": "gen", "prompt": [5, 6], "max_tokens": 2}
            await client.post("/generate", json=body, headers=key(name))
        await client.post("/encode", json={"model": "enc", "input": "hello"}, headers=key("b"))
        queries = ("?by=tenant,model", "?by=day,task", "?by=", "?to=2020-01-01", "?from=2020-01-01T00:00:00%2B02:00")
        queries += ("?from=9999-12-31T23:59:59-10:00&to=9999-12-31T23:59:59-10:00",)
        return [await usage_of(client, query) for query in queries]

    by_model, by_day, one, none, late, last = run(app, work)
    assert [(row["tenant"], row["model"], row["requests"]) for row in by_model["data"]] == [
        *(("alice", "gen", 2), ("bob", "enc", 1)),
        ("bob", "gen", 1),
    ]
    assert [(row["day"][10:], row["task"]) for row in by_day["data"]] == [
        *(("T00:00:00Z", "encode"), ("T00:00:00Z", "generate")),
    ]
    assert one["data"] == [one["total"]] == [by_model["total"]] and one["total"]["completion_tokens"] == 6
    assert none["data"] == [] and none["total"]["requests"] == 0
    assert late["from"] == "2019-12-31T22:00:00Z" and not late["is_stored"]
    assert last["from"].startswith("9999-12-31") and last["data"] == []
    for query, status, param in (
        *(("?by=colour", 400, "by"), ("?from=soon", 400, "from"), ("?until=2020-01-01", 400, "until")),
    ):
        refused = ask(app, "GET", f"/usage{query}", headers=ADMIN)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    assert ask(app, "GET", "/usage", headers=key("a")).json()["error"]["code"] == "admin_key_required"
    assert ask(make_app(), "GET", "/usage").json()["error"]["code"] == "admin_disabled"


def test_a_kill_at_any_point_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    context = RequestContext("r", model="gen", tenant=Tenant("alice"), tokens_in=3, tokens_out=4)

    async def lived(step: int) -> None:
        folder = StateFolder(str(tmp_path), shared=True)
        usage = Usage(folder)
        usage.add(context, 0.5)
        if step == 1:
            await usage.flush()
        usage.add(context, 0.5)
        journal = usage._journal
        assert journal is not None
        if step == 2:  # in the database, and the journal is not deleted yet
            journal.drop = lambda: None  # type: ignore[method-assign]
            await usage.flush()
        if step == 3:  # the last line is cut
            with journal.file.open("ab") as file:
                file.write(b"[49")
        os.close(journal._descriptor)  # the kill: the lock is lost
        folder.close()

    for step in range(4):
        asyncio.run(lived(step))
    folder = StateFolder(str(tmp_path))
    rows = asyncio.run(Usage(folder).find(ALL)).rows
    assert rows == [(["alice"], Amounts(8, 24, 0, 32, 0.0, 0, 4.0))]
    assert list((tmp_path / "usage").iterdir()) == []
    folder.close()


def test_a_journal_of_a_replica_that_runs_is_left_to_it(tmp_path: Path) -> None:
    context = RequestContext("r", tenant=Tenant("alice"))

    async def work() -> list[Found]:
        folders = [StateFolder(str(tmp_path), shared=True) for _ in range(2)]
        first = Usage(folders[0])
        first.add(context, 0.0)
        second = Usage(folders[1])
        second.add(context, 0.0)
        answers = [await one.find(ALL) for one in (first, second)]
        for folder in folders:
            folder.close()
        return answers

    answers = asyncio.run(work())
    assert merged(answers) == [(["alice"], Amounts(2))]
    other = Found("other", [(["alice"], Amounts(5)), (["bob"], Amounts(1))])
    assert merged([other, *answers]) == [(["alice"], Amounts(7)), (["bob"], Amounts(1))]


def test_a_full_disk_keeps_usage_in_memory_until_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> list[Found]:
        folder = StateFolder(str(tmp_path))
        usage = Usage(folder)
        await folder.db.run(lambda db: db.execute("ALTER TABLE usage RENAME TO hidden") and None)
        for _ in range(3):
            usage.add(RequestContext("r", tenant=Tenant("alice")), 0.0)
            await usage.flush()
        await folder.db.run(lambda db: db.execute("ALTER TABLE hidden RENAME TO usage") and None)
        found = await usage.find(ALL)
        folder.close()
        return [found]

    assert merged(asyncio.run(work())) == [(["alice"], Amounts(3))]
    assert len(caplog.records) == 1


def test_an_answer_has_what_a_full_disk_keeps_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_folder, "_BUSY_SECONDS", 0.01)
    app = app_of(tmp_path, str(tmp_path / "state"))
    full = "CREATE TRIGGER IF NOT EXISTS full BEFORE INSERT ON usage BEGIN SELECT RAISE(ABORT, 'full'); END"

    async def work(client: httpx.AsyncClient) -> list[Any]:
        service = app.service
        assert service.state_folder is not None
        db, answers = service.state_folder.db, []
        for name in ("alice", "bob"):
            service.tenants.usage.add(RequestContext("r", model="gen", tenant=Tenant(name)), 0.0)
            answers.append(await usage_of(client, "?by=day,tenant"))
            await db.run(lambda db: db.execute(full) and None)
        with_none = await usage_of(client, "?to=2020-01-01")
        await db.run(lambda db: db.execute("DROP TRIGGER full") and None)
        other = sqlite3.connect(tmp_path / "state" / "triptych.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        locked = await client.get("/usage", headers=ADMIN)
        other.close()
        return [*answers, with_none, locked, await usage_of(client, "?by=day,tenant")]

    before, with_memory, none, locked, after = run(app, work)
    assert [row["tenant"] for row in before["data"]] == ["alice"] and none["data"] == []
    assert [row["tenant"] for row in with_memory["data"]] == ["alice", "bob"] and with_memory == after
    assert (locked.status_code, locked.json()["error"]["code"]) == (503, "not_live")


def test_a_journal_on_a_full_disk_loses_only_what_did_not_fit(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    rows = [Row(number, "alice", "gen", "generate", Amounts(number)) for number in range(4)]
    journal.append(rows[0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.file.stat().st_size + 10, limits[1]))
    try:
        for row in rows[1:3]:
            with pytest.raises(OSError, match=r"space left|too large"):
                journal.append(row)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.append(rows[3])
    os.close(journal._descriptor)
    assert [found for _, found in leftovers(tmp_path, Row)] == [[rows[0], rows[3]]]


@pytest.mark.parametrize("stored", [False, True])
def test_who_leaves_while_sums_are_added_does_not_make_them_count_twice(tmp_path: Path, stored: bool) -> None:
    async def work() -> list[Found]:
        folder = StateFolder(str(tmp_path)) if stored else None
        usage = Usage(folder)
        usage._folder = None  # as if no journal could be written
        usage.add(RequestContext("r", tenant=Tenant("alice")), 0.0)
        asking = asyncio.create_task(usage.find(ALL))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        found = [await usage.find(ALL)]
        if folder is not None:
            folder.close()
        return found

    assert merged(asyncio.run(work())) == [(["alice"], Amounts(1))]


def test_a_journal_that_cannot_be_deleted_stops_nothing_and_counts_once(tmp_path: Path) -> None:
    async def work() -> tuple[Found, Found]:
        folder = StateFolder(str(tmp_path))
        usage = Usage(folder)
        for fails in (True, False):
            usage.add(RequestContext("r", tenant=Tenant("alice")), 0.0)
            journal = usage._journal
            assert journal is not None
            if fails:
                journal.drop = broken  # type: ignore[method-assign]
            await usage.flush()
            if fails:
                os.close(journal._descriptor)
        first = await usage.find(ALL)
        second = await Usage(folder).find(ALL)  # the next start finds the file
        folder.close()
        return first, second

    def broken() -> None:
        raise OSError("not permitted")

    assert [found.rows for found in asyncio.run(work())] == [[(["alice"], Amounts(2))]] * 2


def test_an_answer_has_all_groups_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (usage, routes):
        monkeypatch.setattr(module, "MOST_GROUPS", 2)
    app = app_of(tmp_path)
    for name in ("alice", "bob", "carol"):
        app.service.tenants.usage.add(RequestContext("r", tenant=Tenant(name)), 0.0)
        answer = ask(app, "GET", "/usage", headers=ADMIN)
        assert answer.status_code == (400 if name == "carol" else 200)
    assert answer.json()["error"]["param"] == "by" and "more than 2 groups" in answer.json()["error"]["message"]
    assert ask(app, "GET", "/usage?by=", headers=ADMIN).json()["total"]["requests"] == 3


def test_metrics_by_name_are_bounded_and_the_access_line_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tenancy, "_MOST_LABELLED", 1)
    caplog.set_level("INFO")
    app = app_of(tmp_path)

    async def work(client: httpx.AsyncClient) -> str:
        for name, tokens in (("a", 2), ("b", 3), ("plain", 1), ("a", -1)):
            body = {"model": "gen", "prompt": [5, 6], "max_tokens": tokens}
            await client.post("/generate", json=body, headers=key(name))
        return (await client.get("/metrics", headers=key("a"))).text

    shown = run(app, work).splitlines()
    for line in (
        'triptych_tenant_tokens_total{kind="completion",model="gen",tenant="alice"} 2.0',
        'triptych_tenant_tokens_total{kind="prompt",model="gen",tenant="others"} 4.0',
        'triptych_tenant_requests_total{model="gen",outcome="length",tenant="alice"} 1.0',
        'triptych_tenant_requests_total{model="",outcome="rejected",tenant="alice"} 1.0',
    ):
        assert line in shown
    lines = [record for record in caplog.records if record.name == "triptych.access" and "/generate" in record.message]
    assert "by bob gen 2 in 3 out" in lines[1].message and lines[1].fields["tenant"] == "bob"  # type: ignore[attr-defined]


def test_of_replicas_with_one_database_the_answer_that_knows_most_counts() -> None:
    """Replicas of another machine are asked together, and the first may answer before the second has written."""
    early, late = (Found("one", [(["alice"], Amounts(number, 10 * number))]) for number in (2, 3))
    assert merged([early, late]) == merged([late, early]) == late.rows
