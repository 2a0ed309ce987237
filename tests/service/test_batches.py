"""Files and batches: the routes, what a batch does with its lines, and what survives."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.support import App, check_accounts, hold, live, make_app, run
from triptych.model.errors import ConfigError
from triptych.service.app import Application
from triptych.service.batches import calls, records, runner, store
from triptych.service.batches.calls import request_of
from triptych.service.batches.lines import parse
from triptych.service.cli import batch as batch_command
from triptych.service.http.form_stream import read_form_to
from triptych.service.http.multipart import boundary_of, read_form
from triptych.service.observability import logs
from triptych.service.settings.serve_config import ServeConfig
from triptych.service.settings.service_settings import Limits, ServiceSettings

Json = dict[str, Any]
ROOT = Path(__file__).parent.parent.parent


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> Json:
    body = {"model": "gen", "prompt": "a", "max_tokens": 2, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: Sequence[Json | str]) -> bytes:
    return b"".join((one if isinstance(one, str) else json.dumps(one)).encode() + b"\n" for one in lines)


def batch_app(folder: Path, **settings: Any) -> App:
    return make_app(settings=ServiceSettings(state_dir=str(folder), **settings))


async def upload(client: httpx.AsyncClient, content: bytes, **options: Any) -> httpx.Response:
    files = {"file": ("in.jsonl", content)}
    return await client.post("/v1/files", files=files, data={"purpose": "batch"}, **options)


async def begin(
    client: httpx.AsyncClient, lines: Sequence[Json | str], endpoint: str = "/v1/completions", **options: Any
) -> Json:
    file = (await upload(client, jsonl(lines), **options)).json()
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    made = await client.post("/v1/batches", json=body, **options)
    assert made.status_code == 200, made.text
    found: Json = made.json()
    return found


async def ended(client: httpx.AsyncClient, batch: Json, **options: Any) -> Json:
    async with asyncio.timeout(60):
        while True:
            found: Json = (await client.get(f"/v1/batches/{batch['id']}", **options)).json()
            if found["status"] in ("completed", "failed", "expired", "cancelled"):
                return found
            await asyncio.sleep(0.01)


async def content(client: httpx.AsyncClient, file_id: str | None, **options: Any) -> list[Json]:
    if file_id is None:
        return []
    reply = await client.get(f"/v1/files/{file_id}/content", **options)
    assert reply.status_code == 200
    return [json.loads(one) for one in reply.text.splitlines()]


async def results(client: httpx.AsyncClient, batch: Json, **options: Any) -> tuple[list[Json], list[Json]]:
    return (
        await content(client, batch["output_file_id"], **options),
        await content(client, batch["error_file_id"], **options),
    )


class TestBatch:
    def test_each_line_is_answered_as_its_route_answers(self, tmp_path: Path) -> None:
        app = batch_app(tmp_path)
        lines = [line("a"), line("b", max_tokens=-1), line("c", model="nope"), line("d", prompt="ab")]

        async def work(client: httpx.AsyncClient) -> None:
            batch = await begin(client, lines)
            assert batch["status"] == "validating"
            done = await ended(client, batch)
            assert (done["status"], done["request_counts"]) == ("completed", {"total": 4, "completed": 2, "failed": 2})
            output, errors = await results(client, done)
            assert [one["custom_id"] for one in output] == ["a", "d"]
            assert [one["custom_id"] for one in errors] == ["b", "c"]
            assert [one["response"]["status_code"] for one in errors] == [400, 404]
            direct = (await client.post("/v1/completions", json=lines[0]["body"])).json()
            reply = output[0]["response"]
            assert reply["body"]["choices"] == direct["choices"]
            assert reply["request_id"] and output[0]["error"] is None
            assert done["usage"]["output_tokens"] == 4
            assert done["usage"]["total_tokens"] == sum(
                one["response"]["body"]["usage"]["total_tokens"] for one in output
            )
            file = (await client.get(f"/v1/files/{done['output_file_id']}")).json()
            assert file["purpose"] == "batch_output"
            assert file["filename"] == f"{batch['id']}_output.jsonl"

        run(app, work)
        check_accounts(app)
        assert all(one.is_background for one in app.client.submitted[:2])

    @pytest.mark.parametrize(
        ("endpoint", "body", "key"),
        [
            ("/generate", {"model": "gen", "prompt": "a"}, "choices"),
            ("/encode", {"model": "enc", "input": "w1"}, "data"),
            ("/v1/embeddings", {"model": "enc", "input": ["w1", "w2"]}, "data"),
        ],
    )
    def test_other_endpoints(self, tmp_path: Path, endpoint: str, body: Json, key: str) -> None:
        async def work(client: httpx.AsyncClient) -> None:
            one = {"custom_id": "x", "method": "POST", "url": endpoint, "body": body}
            done = await ended(client, await begin(client, [one], endpoint))
            output, _ = await results(client, done)
            assert output[0]["response"]["body"][key]
            assert done["usage"]["input_tokens"] > 0

        run(batch_app(tmp_path), work)

    def test_a_bad_line_fails_the_batch_before_any_is_run(self, tmp_path: Path) -> None:
        lines = [
            line("a"),
            "{",
            line("a"),
            {**line("b"), "method": "GET"},
            line("c", "/v1/embeddings"),
            line("d", stream=True),
            {**line("e"), "extra": 1},
            {"custom_id": "f", "method": "POST", "url": "/v1/completions"},
            {**line("g"), "body": []},
            {**line("h"), "custom_id": 7},
            line("z" * 600),
            "[" * 5000,
            "",
            line("last", stream=False),
        ]
        app = batch_app(tmp_path)

        async def work(client: httpx.AsyncClient) -> None:
            done = await ended(client, await begin(client, lines))
            assert done["status"] == "failed"
            found = [(one["line"], one["code"], one["param"]) for one in done["errors"]["data"]]
            assert found == [
                (2, "invalid_json_line", None),
                (3, "duplicate_custom_id", "custom_id"),
                (4, "invalid_method", "method"),
                (5, "invalid_url", "url"),
                (6, "stream_not_supported", "body.stream"),
                (7, "unknown_field", "extra"),
                (8, "missing_field", "body"),
                (9, "invalid_body", "body"),
                (10, "invalid_type", "custom_id"),
                (11, "invalid_custom_id", "custom_id"),
                (12, "invalid_json_line", None),
            ]
            assert done["output_file_id"] is None and done["failed_at"]
            empty = await ended(client, await begin(client, ["", " "]))
            assert [one["code"] for one in empty["errors"]["data"]] == ["empty_file"]

        run(app, work)
        assert not app.client.submitted

    def test_a_file_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("triptych.service.batches.lines.MAX_LINES", 3)
        monkeypatch.setattr("triptych.service.batches.lines.MAX_EMBEDDED", 3)
        app = batch_app(tmp_path, limits=Limits(max_body_bytes=5_000))

        async def codes(client: httpx.AsyncClient, lines: Sequence[Json], endpoint: str) -> list[Any]:
            done = await ended(client, await begin(client, lines, endpoint))
            return [(one["line"], one["code"]) for one in done["errors"]["data"]]

        async def work(client: httpx.AsyncClient) -> None:
            many = [line(str(at)) for at in range(6)]
            assert await codes(client, many, "/v1/completions") == [(4, "too_many_requests")]
            long = [line("a", prompt="a" * 6_000), line("b", prompt="b" * 20_000), line("c")]
            assert await codes(client, long, "/v1/completions") == [(1, "body_too_large"), (2, "line_too_long")]
            texts = [line(str(at), "/v1/embeddings", input=["w1", "w2"]) for at in range(2)]
            assert await codes(client, texts, "/v1/embeddings") == [(2, "too_many_inputs")]

        run(app, work)

    def test_load_is_waited_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        app = batch_app(tmp_path)
        app.script.queue_full, app.script.retry_after_s = "queue_requests", 0.1
        monkeypatch.setattr(calls, "ENGINE_PAUSE_SECONDS", 0.05)

        async def work(client: httpx.AsyncClient) -> None:
            batch = await begin(client, [line("a"), line("b")])
            await asyncio.sleep(0.1)
            app.script.queue_full, app.script.die_after = None, 1
            while not app.client.submitted:
                await asyncio.sleep(0.01)
            app.script.die_after = None
            done = await ended(client, batch)
            assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}

        run(app, work)
        check_accounts(app)

    def test_a_line_that_breaks_the_engine_again_and_again_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(calls, "ENGINE_PAUSE_SECONDS", 0.05)
        app = batch_app(tmp_path)
        app.script.die_after = 1

        async def work(client: httpx.AsyncClient) -> None:
            done = await ended(client, await begin(client, [line("a")]))
            _, errors = await results(client, done)
            assert errors[0]["response"]["body"]["error"]["code"] == "engine_failed"

        run(app, work)
        assert len(app.client.submitted) == 3


class TestEnds:
    def test_cancel(self, tmp_path: Path) -> None:
        app = batch_app(tmp_path)

        async def work(client: httpx.AsyncClient) -> None:
            first = await begin(client, [line("a")])
            await ended(client, first)
            free = hold(app)
            batch = await begin(client, [line("b"), line("c")])
            while len(app.client.submitted) < 3:
                await asyncio.sleep(0.01)
            assert (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()["status"] == "cancelling"
            done = await ended(client, batch)
            assert (done["status"], done["request_counts"]["failed"]) == ("cancelled", 2)
            _, errors = await results(client, done)
            assert {one["custom_id"] for one in errors} == {"b", "c"}
            assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
            free.set()
            assert (await client.post(f"/v1/batches/{first['id']}/cancel")).status_code == 409
            assert (await client.post("/v1/batches/batch_x/cancel")).status_code == 404

        run(app, work)
        check_accounts(app)

    def test_expiry(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        app = batch_app(tmp_path)
        monkeypatch.setattr("triptych.service.batches.routes.DAY_SECONDS", 1)
        free = hold(app)

        async def work(client: httpx.AsyncClient) -> None:
            done = await ended(client, await begin(client, [line("a")]))
            assert (done["status"], done["request_counts"]["failed"]) == ("expired", 1)
            _, errors = await results(client, done)
            assert errors[0]["error"]["code"] == "batch_expired"
            free.set()

        run(app, work)

    def test_drain_and_restart(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        app = batch_app(tmp_path)

        async def stop(client: httpx.AsyncClient) -> Json:
            await ended(client, await begin(client, [line("x")]))
            free, batch = hold(app), await begin(client, [line(str(at)) for at in range(20)])
            while len(app.client.submitted) < 3:
                await asyncio.sleep(0.01)
            async with asyncio.timeout(5):
                await app.service.drain()
            free.set()
            return batch

        batch = run(app, stop)
        again = batch_app(tmp_path)
        monkeypatch.setattr(store, "LEASE_SECONDS", 0.1)

        async def work(client: httpx.AsyncClient) -> None:
            done = await ended(client, batch)
            output, _ = await results(client, done)
            assert [one["custom_id"] for one in output] == [str(at) for at in range(20)]

        run(again, work)

    def test_a_process_that_lost_the_lease_changes_nothing(self, tmp_path: Path) -> None:
        async def work() -> None:
            first, second = store.Store(tmp_path, 10**9), store.Store(tmp_path, 10**9)
            batch = records.Batch("batch_1", "", "/generate", "file-1", "24h", records.now(), records.now() + 60)
            await first.run(lambda tables: tables.add_batch(batch, 1))
            assert await first.run(lambda tables: tables.take_lease())
            assert not await second.run(lambda tables: tables.take_lease())
            result = records.Result(1, True, b"{}")
            await first.run(lambda tables: tables.add_results("batch_1", [result, result]))
            second._lease.since -= 60
            assert await second.run(lambda tables: tables.take_lease())
            with pytest.raises(store.LeaseLostError):
                await first.run(lambda tables: tables.add_results("batch_1", [records.Result(2, True, b"{}")]))
            await second.run(lambda tables: tables.add_results("batch_1", [result]))
            assert await second.run(lambda tables: tables.lines_done("batch_1")) == {1}
            assert (await second.run(lambda tables: tables.batch("", "batch_1"))).completed == 1  # type: ignore[union-attr]
            first.close()
            second.close()

        asyncio.run(work())


class TestFiles:
    def test_routes(self, tmp_path: Path) -> None:
        async def work(client: httpx.AsyncClient) -> None:
            made = [(await upload(client, bytes([65 + at]))).json() for at in range(3)]
            assert made[0]["object"] == "file" and made[0]["bytes"] == 1 and made[0]["filename"] == "in.jsonl"
            assert made[0]["expires_at"] - made[0]["created_at"] == 30 * 86_400
            page = (await client.get("/v1/files?limit=2")).json()
            assert [one["id"] for one in page["data"]] == [made[2]["id"], made[1]["id"]] and page["has_more"]
            page = (await client.get(f"/v1/files?limit=2&order=asc&after={made[1]['id']}")).json()
            assert [one["id"] for one in page["data"]] == [made[2]["id"]] and not page["has_more"]
            assert (await client.get("/v1/files?purpose=batch_output")).json()["data"] == []
            assert (await client.get(f"/v1/files/{made[1]['id']}/content")).content == b"B"
            assert (await client.delete(f"/v1/files/{made[1]['id']}")).json()["deleted"]
            for path in (made[1]["id"], "file-x", "..%2Fbatches.sqlite", "batches.sqlite"):
                assert (await client.get(f"/v1/files/{path}")).status_code == 404
                assert (await client.get(f"/v1/files/{path}/content")).status_code == 404
            assert not (tmp_path / "files" / made[1]["id"]).exists()
            for query in ("limit=0", "limit=10001", f"limit={1:09}9999", f"limit={1:09}{'9' * 5000}", "order=x"):
                assert (await client.get(f"/v1/files?{query}")).status_code == 400

        run(batch_app(tmp_path), work)

    def test_an_upload_that_is_cancelled_stays_open_until_its_thread_has_written(self, tmp_path: Path) -> None:
        """Else the thread could write to another file or connection, which has the descriptor next. Ray cancels."""
        form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nABC\r\n--b--\r\n'
        begun, go = threading.Event(), threading.Event()

        async def in_thread(work: Callable[[], None]) -> None:
            def held() -> None:
                begun.set()
                assert go.wait(60)
                work()

            await asyncio.to_thread(held)

        async def receive() -> Json:
            return {"type": "http.request", "body": form, "more_body": False}

        async def work() -> None:
            task = asyncio.create_task(read_form_to(tmp_path / "x", receive, b"b", in_thread))
            await asyncio.to_thread(begun.wait, 60)
            for _ in range(2):
                task.cancel()
                _, waiting = await asyncio.wait({task}, timeout=0.05)
                assert waiting
            go.set()
            await asyncio.wait({task})
            assert task.cancelled()
            assert (tmp_path / "x").read_bytes() == b"ABC"

        asyncio.run(work())

    def test_the_bytes_on_disk_are_a_metric_without_any_batch(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runner, "POLL_SECONDS", 0.02)

        async def work(client: httpx.AsyncClient) -> None:
            async def stored() -> float:
                text = (await client.get("/metrics")).text
                found = re.search(r"^triptych_batch_state_bytes (\S+)$", text, re.MULTILINE)
                assert found is not None
                return float(found[1])

            file = (await upload(client, bytes(200_000))).json()
            async with asyncio.timeout(60):
                while await stored() < 200_000:
                    await asyncio.sleep(0.01)
                await client.delete(f"/v1/files/{file['id']}")
                while await stored() >= 200_000:
                    await asyncio.sleep(0.01)

        run(batch_app(tmp_path), work)

    def test_a_part_of_a_file(self, tmp_path: Path) -> None:
        parts = {"1-2": b"BC", "2-": b"CD", "-1": b"D", "1-99": b"BCD", "-9": b"ABCD"}
        whole = ["bytes=2-1", "bytes=-", "bytes=0-0,2-2", "lines=1-2", "nothing", "bytes=\u0661-2"]

        async def work(client: httpx.AsyncClient) -> None:
            file = (await upload(client, b"ABCD")).json()

            async def got(asked: str, **headers: str) -> httpx.Response:
                given = {"range": asked.encode(), **{name: value.encode() for name, value in headers.items()}}
                return await client.get(f"/v1/files/{file['id']}/content", headers=given)

            for part, found in parts.items():
                reply = await got(f"bytes={part}")
                assert (reply.status_code, reply.content) == (206, found), part
            for part in ("4-", "4-9", "-0"):
                reply = await got(f"bytes={part}")
                assert reply.status_code == 416 and reply.headers["content-range"] == "bytes */4"
                assert reply.json()["error"]["code"] == "range_not_satisfiable"
                assert (await got(f"bytes={part}", **{"if-range": '"another version"'})).content == b"ABCD"
            for asked in whole:
                reply = await got(asked)
                assert (reply.status_code, reply.content) == (200, b"ABCD"), asked

        run(batch_app(tmp_path), work)

    @pytest.mark.parametrize(
        ("data", "files", "param"),
        [
            ({"purpose": "assistants"}, "a", "purpose"),
            ({}, "a", "purpose"),
            ({"purpose": "batch"}, None, "file"),
            (
                {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "10"},
                "a",
                "expires_after.seconds",
            ),
            ({"purpose": "batch", "expires_after[seconds]": "3600"}, "a", "expires_after.anchor"),
            ({"purpose": "batch", "extra": "1"}, "a", "extra"),
        ],
    )
    def test_bad_uploads(self, tmp_path: Path, data: Json, files: str | None, param: str) -> None:
        async def work(client: httpx.AsyncClient) -> None:
            sent = {"file": files} if files else {"other": ""}
            parts = {**{name: (None, text) for name, text in data.items()}}
            if files:
                parts["file"] = ("x.jsonl", sent["file"])  # type: ignore[assignment]
            reply = await client.post("/v1/files", files=parts or {"x": (None, "")})
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"]["param"] == param
            assert not list((tmp_path / "files").iterdir())

        run(batch_app(tmp_path), work)

    def test_expires_after(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async def work(client: httpx.AsyncClient) -> None:
            data = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
            file = (await client.post("/v1/files", files={"file": ("a", b"x")}, data=data)).json()
            assert file["expires_at"] - file["created_at"] == 3600
            later = time.time() + 4000
            monkeypatch.setattr(store, "now", lambda: int(later))
            assert (await client.get(f"/v1/files/{file['id']}")).status_code == 404
            app.app.state.batches.runner._swept = -1e9
            app.app.state.batches.runner.notice()
            while list((tmp_path / "files").iterdir()):
                await asyncio.sleep(0.01)

        app = batch_app(tmp_path)
        run(app, work)

    def test_files_belong_to_a_key(self, tmp_path: Path) -> None:
        mine, other = ({"Authorization": f"Bearer {key}"} for key in ("k1", "k2"))

        async def work(client: httpx.AsyncClient) -> None:
            batch = await begin(client, [line("a")], headers=mine)
            done = await ended(client, batch, headers=mine)
            paths = [f"/v1/files/{done[name]}" for name in ("input_file_id", "output_file_id")]
            for path in (*paths, *(f"{one}/content" for one in paths), f"/v1/batches/{batch['id']}"):
                assert (await client.get(path, headers=mine)).status_code == 200
                assert (await client.get(path, headers=other)).status_code == 404
            assert (await client.delete(paths[0], headers=other)).status_code == 404
            assert (await client.post(f"/v1/batches/{batch['id']}/cancel", headers=other)).status_code == 404
            for path in ("/v1/files", "/v1/batches"):
                assert (await client.get(path, headers=other)).json()["data"] == []
                after = batch["id"] if "batches" in path else done["input_file_id"]
                assert (await client.get(f"{path}?after={after}", headers=other)).json()["data"] == []
            body = {"input_file_id": done["input_file_id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            assert (await client.post("/v1/batches", json=body, headers=other)).status_code == 404

        run(batch_app(tmp_path, api_keys=("k1", "k2")), work)

    def test_the_disk_is_bounded(self, tmp_path: Path) -> None:
        async def work(client: httpx.AsyncClient) -> None:
            assert (await upload(client, b"a" * 150_000)).status_code == 200
            reply = await upload(client, b"a" * 150_000)
            assert (reply.status_code, reply.json()["error"]["code"]) == (413, "no_space")
            assert len(list((tmp_path / "files").iterdir())) == 1

        run(batch_app(tmp_path, max_state_bytes=300_000), work)

    def test_an_input_of_a_running_batch_is_kept(self, tmp_path: Path) -> None:
        app = batch_app(tmp_path)
        free = hold(app)

        async def work(client: httpx.AsyncClient) -> None:
            batch = await begin(client, [line("a")])
            reply = await client.delete(f"/v1/files/{batch['input_file_id']}")
            assert (reply.status_code, reply.json()["error"]["code"]) == (409, "file_in_use")
            free.set()
            await ended(client, batch)
            assert (await client.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 200

        run(app, work)

    def test_without_a_folder_the_routes_say_what_to_set(self) -> None:
        async def work(client: httpx.AsyncClient) -> None:
            for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/batches/x")):
                reply = await client.request(method, path)
                assert reply.status_code == 501
                assert "--state-dir" in reply.json()["error"]["message"]

        run(make_app(), work)


def test_transcriptions_take_a_file_as_base64(tmp_path: Path) -> None:
    data = base64.b64encode(b"RIFF\r\n--x").decode()
    one = {"file": f"data:audio/wav;base64,{data}", "temperature": 0.5, "timestamp_granularities": ["word", "segment"]}
    raw = json.dumps({**line("a", "/v1/audio/transcriptions"), "body": one}).encode()
    body, media_type = request_of(parse(raw))
    form = read_form(body, boundary_of(media_type))
    assert form.files[0][1].data == b"RIFF\r\n--x"
    assert form.texts == (
        ("temperature", "0.5"),
        ("timestamp_granularities[]", "word"),
        ("timestamp_granularities[]", "segment"),
    )


class TestClients:
    @pytest.fixture
    def url(self, tmp_path: Path) -> Iterator[str]:
        with live(batch_app(tmp_path / "state")) as url:
            yield url

    def test_the_openai_package(self, url: str) -> None:
        openai = pytest.importorskip("openai", reason="openai's client is not installed")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        content = jsonl([line("a"), line("b", max_tokens=-1)])
        file = client.files.create(
            file=("x.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
        )
        assert (file.bytes, file.expires_at - file.created_at) == (len(content), 7200)
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"run": "7"}
        )
        while batch.status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing")
            time.sleep(0.02)
            batch = client.batches.retrieve(batch.id)
        assert (batch.model, batch.metadata, batch.endpoint) == ("gen", {"run": "7"}, "/v1/completions")
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
        assert batch.usage.total_tokens == batch.usage.input_tokens + 2
        reply = json.loads(client.files.content(batch.output_file_id).text)
        assert reply["response"]["body"]["choices"][0]["text"] == "he"
        assert json.loads(client.files.content(batch.error_file_id).read())["custom_id"] == "b"
        assert [one.id for one in client.batches.list(limit=1)] == [batch.id]
        assert {one.id for one in client.files.list()} == {file.id, batch.output_file_id, batch.error_file_id}
        assert client.files.retrieve(file.id).filename == "x.jsonl"
        with pytest.raises(openai.ConflictError) as ended:
            client.with_options(max_retries=2).batches.cancel(batch.id)
        assert ended.value.response.request.headers["x-stainless-retry-count"] == "0"
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)

    def test_a_service_without_a_folder_gets_a_file_once(self) -> None:
        """The package sends a request again after a 501, unless the reply says no."""
        openai = pytest.importorskip("openai", reason="openai's client is not installed")
        with live(make_app()) as url:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2)
            with pytest.raises(openai.InternalServerError, match="--state-dir") as refused:
                client.files.create(file=("x.jsonl", b"{}"), purpose="batch")
        assert refused.value.response.request.headers["x-stainless-retry-count"] == "0"

    def test_the_commands_of_the_page(self, url: str, tmp_path: Path) -> None:
        page = (ROOT / "docs" / "batches.md").read_text().replace('"code"', '"gen"')
        blocks = re.findall(r"```bash\n(.*?)```", page, re.S)[1:]  # the first starts a service
        upload, wait, read = "\n".join(blocks[:3]), blocks[3], blocks[4]
        ids = f"{wait.strip()} | grep -o 'file-[0-9a-f]*' | sed -n 2p"
        polls = f'until OUTPUT=$({ids}) && [ -n "$OUTPUT" ]; do sleep 0.1; done'
        table = re.findall(r"^\| `(curl [^`]*)`", page, re.M)
        assert len(table) == 4
        others = "\n".join(f"{one} -sf{' -o /dev/null' if 'cancel' in one else ''} || exit 9" for one in table[:3])
        script = f"set -e\n{upload}\n{polls}\n{read}\n{others}\n"
        done = subprocess.run(
            ["bash", "-c", script],
            env={**os.environ, "URL": url},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        first = [json.loads(one) for one in done.stdout.splitlines()[:2]]
        assert [one["custom_id"] for one in first] == ["one", "two"]
        assert '"deleted":true' in done.stdout


class TestCommand:
    def run(self, folder: Path, monkeypatch: pytest.MonkeyPatch, lines: Sequence[Json | str], **script: Any) -> int:
        """Run `triptych batch` over a scripted engine."""
        file = folder / "in.jsonl"
        file.write_bytes(jsonl(lines))

        def build(config: ServeConfig) -> Application:
            return make_app(settings=config.settings, **script).app

        monkeypatch.setattr(batch_command, "build_app", build)
        monkeypatch.setattr(logs, "setup", lambda *_: None)
        return batch_command.run(file, {"gen": {"path": str(folder)}}, {}, folder / "out.jsonl")

    def test_a_file_is_run_offline(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(tmp_path, monkeypatch, [line("a"), line("b", max_tokens=-1)]) == 1
        assert [json.loads(one)["custom_id"] for one in (tmp_path / "out.jsonl").read_text().splitlines()] == ["a"]
        assert json.loads((tmp_path / "out.jsonl.errors").read_text())["response"]["status_code"] == 400
        assert "2/2 lines, 1 failed" in capsys.readouterr().err
        assert not (tmp_path / "out.jsonl.state").exists()
        assert self.run(tmp_path, monkeypatch, [line("a")]) == 0
        assert not (tmp_path / "out.jsonl.errors").exists()  # that of the first run
        assert self.run(tmp_path, monkeypatch, [line("b", max_tokens=-1)]) == 1
        assert (tmp_path / "out.jsonl").read_bytes() == b""
        assert self.run(tmp_path, monkeypatch, ["\ufeff" + json.dumps(line("a"))]) == 0

    def test_bad_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(tmp_path, monkeypatch, [line("a"), "{"]) == 1
        assert "in.jsonl: line 2: the line is no JSON object" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="does not exist"):
            batch_command.run(tmp_path / "in.jsonl", {}, {}, tmp_path / "no" / "out")
        (tmp_path / "x.errors").hardlink_to(tmp_path / "in.jsonl")
        for output in ("in.jsonl", "x"):
            with pytest.raises(ConfigError, match="is the file of requests, which would be overwritten"):
                batch_command.run(tmp_path / "in.jsonl", {}, {}, tmp_path / output)
        for first in ("", "x", json.dumps(line("a", "/nope"))):
            with pytest.raises(ConfigError, match="first line"):
                self.run(tmp_path, monkeypatch, [first])

    def test_an_interrupted_run_goes_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        lines = [line(str(at)) for at in range(12)]
        monkeypatch.setattr(store, "LEASE_SECONDS", 0.1)
        state_of = batch_command._state
        calls = 0

        async def stop(batches: Any, batch_id: str) -> Any:
            nonlocal calls
            found = await state_of(batches, batch_id)
            calls += 1
            if found.completed:
                raise KeyboardInterrupt
            return found

        with monkeypatch.context() as patch:
            patch.setattr(batch_command, "_state", stop)
            with pytest.raises(KeyboardInterrupt):
                self.run(tmp_path, monkeypatch, lines)
        with pytest.raises(ConfigError, match=r"out\.jsonl\.state has replies to another file"):
            self.run(tmp_path, monkeypatch, [line("other")])
        assert calls and (tmp_path / "out.jsonl.state").exists()
        assert self.run(tmp_path, monkeypatch, lines) == 0
        output = [json.loads(one) for one in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [one["custom_id"] for one in output] == [str(at) for at in range(12)]
