"""Batches of several owners, and batches whose disk or input is lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.service.support import App, check_accounts, hold, make_app, run
from tests.service.test_batches import Json, batch_app, begin, ended, jsonl, line, results, upload
from tests.service.test_option_table import GROUPS
from triptych.service.batches import runner as runner_module
from triptych.service.batches import store
from triptych.service.batches.calls import AUDIO_ROUTES
from triptych.service.batches.output_files import OutputFiles
from triptych.service.batches.records import Batch
from triptych.service.batches.runner import RunningBatch, _in_turns
from triptych.service.batches.store import Store, Tables
from triptych.service.batches.turns import Turns
from triptych.service.core import state_folder
from triptych.service.settings import sources
from triptych.service.settings.resolve import resolve_config
from triptych.service.settings.service_settings import Limits, ServiceSettings


def batch_of(owner: str, status: str = "in_progress", name: str = "b") -> Batch:
    return Batch(name, owner, "/generate", "file-1", "24h", 0, 1, status=status)


class TestOwners:
    def test_owners_who_wait_take_turns(self) -> None:
        begun: list[str] = []

        async def work() -> None:
            turns, free = Turns(1), asyncio.Event()

            async def one(name: str) -> None:
                async with turns.place(name[0]):
                    begun.append(name)
                    await free.wait()

            tasks = [asyncio.create_task(one(name)) for name in ("a1", "a2", "a3", "a4", "b1", "c1", "c2")]
            await asyncio.sleep(0)
            tasks[5].cancel()  # while it waits
            await asyncio.sleep(0)
            free.set()
            await asyncio.wait(tasks)
            async with asyncio.timeout(5):
                await one("z")  # the place is free again

        asyncio.run(work())
        assert begun == ["a1", "a2", "b1", "c2", "a3", "a4", "z"]

    def test_one_who_has_a_place_already_gives_it_back_if_cancelled(self) -> None:
        async def work() -> None:
            turns = Turns(1)

            async def one() -> None:
                async with turns.place("a"):
                    await asyncio.sleep(0)

            first, second = asyncio.create_task(one()), asyncio.create_task(one())
            await first
            second.cancel()  # in the step in which it got the place
            await asyncio.wait({second})
            async with asyncio.timeout(5):
                await one()

        asyncio.run(work())

    def test_the_number_of_places_follows_the_models_that_are_loaded(self) -> None:
        """None may be when the first line runs: it loads its own."""

        async def work() -> None:
            turns, going = Turns(1), list[str]()

            async def one(name: str) -> None:
                async with turns.place(name):
                    going.append(name)
                    await asyncio.Event().wait()

            tasks = [asyncio.create_task(one(name)) for name in "abcde"]
            for places, held in ((1, 1), (3, 3), (2, 3)):
                turns.resize(places)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert len(going) == held
            for at, held in ((0, 3), (1, 4)):  # of three places with two, the first one that is free is no more
                tasks[at].cancel()
                await asyncio.wait({tasks[at]})
                await asyncio.sleep(0)
                assert len(going) == held
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

        asyncio.run(work())

    def test_lines_are_held_for_as_many_places_as_there_are_now(self, tmp_path: Path) -> None:
        runner, places = batch_app(tmp_path).app.state.batches.runner, [1]
        runner.room = SimpleNamespace(slots=lambda _: places[0])

        async def work() -> None:
            turns, running = runner.turns("/generate"), RunningBatch(runner, batch_of("a"))
            await running._hold(1, 1)
            waits = asyncio.create_task(running._hold(2, 1))
            await asyncio.sleep(0)
            assert not waits.done()
            places[0] = 2
            running._ended.set()
            async with turns.place("a"), asyncio.timeout(5):
                await waits
                async with runner.turns("/generate").place("a"):
                    assert runner.turns("/generate") is turns

        asyncio.run(work())

    def test_the_batches_of_one_owner_leave_places_to_others(self) -> None:
        active = [batch_of("a", name=f"a{at}") for at in range(40)]
        active += [batch_of("b", name="b0"), batch_of("a", "cancelling", "a40"), batch_of("b", name="b1")]
        assert [one.id for one in _in_turns(active)[:5]] == ["a40", "a0", "b0", "a1", "b1"]
        assert len(_in_turns(active)) == 43

    def test_a_batch_that_gave_up_its_place_goes_on_later(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of two places the second goes from the first owner's second batch to another owner's."""
        monkeypatch.setattr(runner_module, "_MAX_BATCHES", 2)
        app = batch_app(tmp_path, api_keys=("k1", "k2"))
        mine, other = ({"Authorization": f"Bearer {key}"} for key in ("k1", "k2"))
        free = hold(app)

        async def work(client: httpx.AsyncClient) -> None:
            first, second = [await begin(client, [line("a"), line("b")], headers=mine) for _ in range(2)]
            tasks = app.app.state.batches.runner._tasks
            while tasks.keys() != {first["id"], second["id"]}:
                await asyncio.sleep(0.01)
            third = await begin(client, [line("c")], headers=other)
            while tasks.keys() != {first["id"], third["id"]}:
                await asyncio.sleep(0.01)
            free.set()
            for batch, headers in ((first, mine), (second, mine), (third, other)):
                done = await ended(client, batch, headers=headers)
                assert done["request_counts"]["completed"] == done["request_counts"]["total"] > 0

        run(app, work)
        check_accounts(app)

    def test_lines_do_not_count_in_quotas(self, tmp_path: Path) -> None:
        """As with OpenAI's batches: else a batch would take the requests of its owner."""
        keys = tmp_path / "keys"
        keys.write_text("alice a requests/min=1 tokens/min=10 concurrent=1\n")
        app = batch_app(tmp_path / "state", api_key_file=str(keys))
        headers = {"Authorization": "Bearer a"}

        async def work(client: httpx.AsyncClient) -> None:
            done = await ended(
                client, await begin(client, [line(str(at)) for at in range(8)], headers=headers), headers=headers
            )
            assert done["request_counts"]["completed"] == 8
            reply = await client.post("/v1/completions", json=line("x")["body"], headers=headers)
            assert reply.status_code == 200

        run(app, work)


class TestRoom:
    def test_a_batch_leaves_places_for_audio_to_others(self, tmp_path: Path) -> None:
        app = batch_app(tmp_path, limits=Limits(max_audio_requests=4))

        async def work(client: httpx.AsyncClient) -> None:
            room = app.app.state.batches.runner.room
            assert [room.slots(one) for one in AUDIO_ROUTES] == [2, 2]
            assert room.slots("/generate") > 2

        run(app, work)

    def test_bodies_of_lines_take_no_room_from_those_of_clients(self, tmp_path: Path) -> None:
        app = batch_app(tmp_path, limits=Limits(max_held_body_bytes=150_000))
        free = hold(app)

        async def work(client: httpx.AsyncClient) -> None:
            batch = await begin(client, [line("a", user="x" * 100_000)])
            while not app.client.submitted:
                await asyncio.sleep(0.01)
            body = line("b", user="x" * 100_000, max_tokens=-1)["body"]
            assert (await client.post("/v1/completions", json=body)).status_code == 400  # not 429
            free.set()
            await ended(client, batch)

        run(app, work)

    def test_a_batch_holds_few_bytes_of_its_lines(self) -> None:
        async def work() -> None:
            room: Any = SimpleNamespace(slots=lambda _: 3)
            running = RunningBatch(SimpleNamespace(room=room), batch_of("a"))  # type: ignore[arg-type]
            large = 20 << 20
            await running._hold(1, large)
            waits = asyncio.create_task(running._hold(2, large))
            await asyncio.sleep(0)
            assert not waits.done()
            del running._held[1]
            running._ended.set()
            await waits
            assert list(running._held) == [2]

        asyncio.run(work())

    def test_an_idle_service_does_not_write(self, tmp_path: Path) -> None:
        app = batch_app(tmp_path)

        async def work(client: httpx.AsyncClient) -> None:
            await ended(client, await begin(client, [line("a")]))
            batches = app.app.state.batches

            async def lease() -> Any:
                return await batches.store.run(lambda tables: tables._rows("SELECT holder, beats FROM lease")[0])

            while (await lease())[0]:
                await asyncio.sleep(0.01)
            await batches.runner._look()
            before = await lease()
            await batches.runner._look()
            assert await lease() == before and not batches.runner._tasks

        run(app, work)

    @pytest.mark.parametrize("status", ["in_progress", "finalizing"])
    def test_a_batch_that_ends_while_it_is_looked_at_stays_as_it_is(self, status: str, tmp_path: Path) -> None:
        """Its lines would be sent and counted again, or its output replaced by errors."""
        app = batch_app(tmp_path)

        async def work(client: httpx.AsyncClient) -> None:
            done = await ended(client, await begin(client, [line("a"), line("b")]))
            batches = app.app.state.batches
            while batches.runner._tasks:
                await batches.runner._look()
            [seen] = await batches.store.run(lambda tables: tables.batches("", None, 1))
            seen.status = status
            assert await batches.store.run(lambda tables: tables.take_lease())
            await batches.runner._guarded(seen)
            assert (await client.get(f"/v1/batches/{done['id']}")).json() == done
            assert [one["custom_id"] for one in (await results(client, done))[0]] == ["a", "b"]

        run(app, work)

    def test_a_cancelled_batch_closes_its_input(self, tmp_path: Path) -> None:
        app = batch_app(tmp_path)
        free = hold_after(app, 0)

        async def work(client: httpx.AsyncClient) -> None:
            batch = await begin(client, [line(str(at)) for at in range(100)])
            async with asyncio.timeout(30):
                while not app.client.running:
                    await asyncio.sleep(0.01)
            assert (await client.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 200
            assert (await ended(client, batch))["status"] == "cancelled"
            free.set()
            links = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
            assert str(tmp_path / "files" / batch["input_file_id"]) not in links

        gc.disable()
        try:
            run(app, work)
        finally:
            gc.enable()

    def test_info_has_the_limit_of_the_disk(self, tmp_path: Path) -> None:
        async def work(client: httpx.AsyncClient) -> Any:
            return (await client.get("/info")).json()["max_state_bytes"]

        assert run(batch_app(tmp_path, max_state_bytes=12_345_678), work) == 12_345_678
        assert run(make_app(), work) is None

    def test_each_group_has_its_own_batches(self, tmp_path: Path) -> None:
        """Its replicas have its models alone, and may share the folder with those of another group."""
        file = tmp_path / "triptych.yaml"
        file.write_text(GROUPS)
        found = sources.from_file(file)
        config = resolve_config(found.models, found.settings, found.groups)
        folders = [one.settings.batches_dir for one in config.applications]
        assert folders == ["", "group-chat", "group-more"]

        async def work(client: httpx.AsyncClient) -> None:
            await ended(client, await begin(client, [line("a")]))
            assert (tmp_path / "state" / "group-chat" / "batches.sqlite").exists()
            assert not (tmp_path / "state" / "batches.sqlite").exists()

        settings = ServiceSettings(state_dir=str(tmp_path / "state"), batches_dir="group-chat")
        run(make_app(settings=settings), work)


class TestFailures:
    @pytest.mark.parametrize("lose", [Path.unlink, lambda path: path.write_bytes(b"{}\n" * 3)])
    def test_a_batch_without_its_input_ends(self, tmp_path: Path, lose: Callable[[Path], Any]) -> None:
        app = batch_app(tmp_path)
        free = hold(app)

        async def work(client: httpx.AsyncClient) -> None:
            batch = await begin(client, [line(str(at)) for at in range(3)])
            while not app.client.submitted:
                await asyncio.sleep(0.01)
            lose(tmp_path / "files" / batch["input_file_id"])
            await client.post(f"/v1/batches/{batch['id']}/cancel")
            done = await ended(client, batch)
            assert (done["status"], done["request_counts"]) == ("failed", {"total": 3, "completed": 0, "failed": 3})
            assert [one["code"] for one in done["errors"]["data"]] == ["file_missing"]
            free.set()

        run(app, work)

    def test_a_mark_of_byte_order_is_left_out(self, tmp_path: Path) -> None:
        """Editors on Windows write one."""

        async def work(client: httpx.AsyncClient) -> None:
            content = b"\xef\xbb\xbf" + jsonl([line("a"), line("b")]).replace(b"\n", b"\r\n")
            file = (await upload(client, content)).json()
            body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            done = await ended(client, (await client.post("/v1/batches", json=body)).json())
            assert done["request_counts"]["completed"] == 2

        run(batch_app(tmp_path), work)

    def test_output_files_on_a_full_disk_leave_nothing(self, tmp_path: Path) -> None:
        files = OutputFiles(folder := Store(tmp_path, 10**9))
        with few_bytes(10_000):
            files.add([(1, 1, b"a" * 9_000), (2, 0, b"b" * 100)])
            with pytest.raises(OSError, match="large"):
                files.add([(3, 1, b"c" * 9_000)])
            files.close()
        assert not list((tmp_path / "files").iterdir())
        folder.close()

    def test_an_output_whose_transaction_is_undone_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        app = batch_app(tmp_path)
        finish, failures = Tables.finish, 0
        monkeypatch.setattr(runner_module, "_PAUSE_SECONDS", 0.01)

        def fail(tables: Tables, *arguments: Any) -> Batch:
            nonlocal failures
            found = finish(tables, *arguments)
            failures += 1
            if failures <= 3:
                raise sqlite3.OperationalError("database or disk is full")
            return found

        monkeypatch.setattr(Tables, "finish", fail)

        async def work(client: httpx.AsyncClient) -> None:
            done = await ended(client, await begin(client, [line("a"), line("b", max_tokens=-1)]))
            assert [[one["custom_id"] for one in some] for some in await results(client, done)] == [["a"], ["b"]]
            kept = {path.name for path in (tmp_path / "files").iterdir()}
            assert kept == {done[f"{kind}_file_id"] for kind in ("input", "output", "error")}

        run(app, work)
        assert failures == 4

    def test_a_disk_that_fails_is_a_503(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async def work(client: httpx.AsyncClient) -> None:
            with few_bytes(50_000):
                full = await upload(client, b"a" * 100_000)
            assert (full.status_code, full.json()["error"]["code"]) == (503, "state_unavailable")

            def fail(*_: Any, **__: Any) -> None:
                raise sqlite3.OperationalError("attempt to write a readonly database")

            with monkeypatch.context() as patch:
                for name in ("file", "files", "add_file", "batches", "batch"):
                    patch.setattr(Tables, name, fail)
                assert (await upload(client, b"a")).status_code == 503
                for path in ("/v1/files", "/v1/files/file-x", "/v1/batches", "/v1/batches/batch_x"):
                    reply: Json = (await client.get(path)).json()
                    assert reply["error"]["code"] == "state_unavailable"
            assert not list((tmp_path / "files").iterdir())
            assert (await upload(client, b"a")).status_code == 200

        run(batch_app(tmp_path), work)


@contextlib.contextmanager
def few_bytes(most: int) -> Iterator[None]:
    """Let no file of this process grow beyond `most` bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestKills:
    """A copy of the folder at a commit is what a kill at that time leaves."""

    @pytest.mark.parametrize("end", ["completed", "cancelled", "expired"])
    def test_a_service_goes_on_from_each_commit(
        self, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines = [line(str(at), max_tokens=-1 if at % 3 == 2 else 1 + 7 * bool(at)) for at in range(9)]
        kept = self.copies(tmp_path, monkeypatch, lines, end)
        assert len(kept) >= 5
        monkeypatch.setattr(store, "LEASE_SECONDS", 0.0)
        for folder in kept:
            app = batch_app(folder)
            ends, found = run(app, lambda client, app=app: self.result(client, app))
            if ends is None:  # the batch was not there yet
                continue
            output, errors = found
            assert ends["status"] in ("completed", end), folder
            ids = [one["custom_id"] for one in (*output, *errors)]
            if ends["status"] != "cancelled" or ends["request_counts"]["total"]:  # else cancelled before the check
                assert sorted(ids) == [str(at) for at in range(9)], folder
            assert ends["request_counts"]["completed"] == len(output)
            assert ends["request_counts"]["failed"] == len(errors)
            tokens = sum(one["response"]["body"]["usage"]["total_tokens"] for one in output)
            assert ends["usage"]["total_tokens"] == tokens
            check_accounts(app)

    async def result(self, client: httpx.AsyncClient, app: App) -> tuple[Json | None, Any]:
        found = (await client.get("/v1/batches")).json()["data"]
        if not found:
            return None, None
        done = await ended(client, found[0])
        return done, await results(client, done)

    def copies(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[Json], end: str) -> list[Path]:
        """Run a batch, and return copies of its folder before and after each commit that changes it."""
        folder, kept = tmp_path / "state", []
        commit, seen = state_folder.Database._commit, ""

        def copied(database: Any, together: Any) -> None:
            nonlocal seen

            def copy(connection: Any) -> None:
                nonlocal seen
                found = [
                    connection.execute(f"SELECT * FROM {one}").fetchall() for one in ("batches", "results", "files")
                ]
                if repr(found) != seen:
                    seen = repr(found)
                    kept.append(tmp_path / f"copy{len(kept)}")
                    shutil.copytree(folder, kept[-1])

            if database._file.name != "batches.sqlite":
                commit(database, together)
                return
            before = seen
            commit(
                database, [*together, state_folder._Piece(copy, Future())]
            )  # before the commit, with the files that it names
            if seen != before:
                seen = ""
                copy(database._connection)

        app = batch_app(folder)
        with monkeypatch.context() as patch:
            patch.setattr(state_folder.Database, "_commit", copied)
            if end == "expired":
                patch.setattr("triptych.service.batches.routes.DAY_SECONDS", 1)

            async def work(client: httpx.AsyncClient) -> None:
                free = asyncio.Event() if end == "completed" else hold_after(app, 12)
                batch = await begin(client, lines)
                async with asyncio.timeout(30):
                    while (
                        end == "cancelled"
                        and not (await client.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]["completed"]
                    ):
                        await asyncio.sleep(0.01)
                if end == "cancelled":
                    await client.post(f"/v1/batches/{batch['id']}/cancel")
                assert (await ended(client, batch))["status"] == end
                free.set()

            run(app, work)
        return kept


def hold_after(app: App, outputs: int) -> asyncio.Event:
    """Make the engine give no output after some requests until the event is set."""
    free, work, begun = asyncio.Event(), app.client._work, [0]

    async def held(*arguments: Any) -> None:
        begun[0] += 1
        if begun[0] > outputs:
            await free.wait()
        await work(*arguments)

    app.client._work = held  # type: ignore[method-assign]
    return free
