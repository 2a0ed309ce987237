"""Models that come and go while the service runs, over a scripted engine: orders, failures, refusals."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests import checkpoints
from tests.service.support import App, check_accounts, counted, hold, info, live, make_app, run, until
from triptych.model.errors import ConfigError, LoadFailedError, MemoryShortageError
from triptych.service.cli.main import main
from triptych.service.settings.service_settings import Limits, ModelSettings, ServiceSettings

ADMIN = {"authorization": "Bearer admin-key"}
PROMPT = {"prompt": "hello", "max_tokens": 4}


def write_models(folder: Path) -> Path:
    """Fill a folder with two models, and what is none."""
    checkpoints.llama(folder / "one")
    shutil.copytree(folder / "one", folder / "two")
    (folder / "notes").mkdir()
    (folder / "notes" / "readme.txt").write_text("no model")
    return folder


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("stored"))


@pytest.fixture
def folder(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "models"))


def settings(folder: Path | None = None, *, limits: Limits | None = None, **models: Any) -> ServiceSettings:
    later = ModelSettings(models_dir=str(folder) if folder else "", **models)
    return ServiceSettings(admin_keys=("admin-key",), models=later, limits=limits or Limits(), drain_timeout_s=5.0)


def make(folder: Path | None = None, *, names: tuple[str, ...] = ("one", "two", "new"), **options: Any) -> App:
    script = {name: options.pop(name) for name in list(options) if name in ("load_delay_s", "load_error", "delay_s")}
    loadable = [info(name, "decoder-only", memory_bytes=100) for name in names]
    return make_app(settings=settings(folder, **options), loadable=loadable, **script)


async def listed(client: httpx.AsyncClient) -> dict[str, Any]:
    reply = await client.get("/models", headers=ADMIN)
    assert reply.status_code == 200, reply.text
    return {model["name"]: model for model in reply.json()["models"]}


async def load(client: httpx.AsyncClient, name: str, **fields: Any) -> httpx.Response:
    return await client.post("/models/load", json={"name": name, **fields}, headers=ADMIN)


async def unload(client: httpx.AsyncClient, name: str, **fields: Any) -> httpx.Response:
    return await client.post("/models/unload", json={"name": name, **fields}, headers=ADMIN)


async def generate(client: httpx.AsyncClient, model: str, **fields: Any) -> httpx.Response:
    return await client.post("/generate", json={"model": model, **PROMPT, **fields})


def state(app: App, name: str) -> str | None:
    slot = app.service.models.get(name)
    return None if slot is None else slot.state.value


def code(reply: httpx.Response) -> str:
    return str(reply.json()["error"]["code"])


# -- keys


def test_without_an_admin_key_the_routes_say_which_setting_turns_them_on() -> None:
    app = make_app()

    async def work(client: httpx.AsyncClient) -> None:
        for method, path in (("GET", "/models"), ("POST", "/models/load"), ("POST", "/models/unload")):
            reply = await client.request(method, path, headers=ADMIN)
            assert (reply.status_code, code(reply)) == (403, "admin_disabled")
            assert "--admin-key" in reply.json()["error"]["message"]

    run(app, work)


def test_only_an_admin_key_opens_the_routes_and_it_opens_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(settings=ServiceSettings(api_keys=("user-key",), admin_keys=("admin-key",)))
    caplog.set_level(logging.DEBUG)

    async def work(client: httpx.AsyncClient) -> None:
        for key, status in (("", 401), ("wrong", 401), ("user-key", 403), ("admin-ke", 401), ("admin-key", 200)):
            for place in ("/models", "/models/load"):
                body = {} if place == "/models" else {"json": {"name": "gen"}}
                method = "GET" if place == "/models" else "POST"
                for header in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                    reply = await client.request(method, place, headers=header, **body)
                    assert reply.status_code == status, (key, place, reply.text)
        assert (await client.get("/v1/models", headers=ADMIN)).status_code == 401
        assert (await client.post("/generate", json=PROMPT | {"model": "gen"}, headers=ADMIN)).status_code == 401

    run(app, work)
    assert "admin-key" not in caplog.text and "user-key" not in caplog.text


def test_a_key_cannot_be_both() -> None:
    with pytest.raises(ConfigError, match="an admin key must not be an API key"):
        ServiceSettings(api_keys=("same",), admin_keys=("same",))


# -- orders


def test_a_model_is_loaded_served_and_unloaded(folder: Path) -> None:
    app = make(folder)

    async def work(client: httpx.AsyncClient) -> None:
        reply = await load(client, "new", path="one", settings={"dtype": "float32", "max_num_seqs": 4})
        assert reply.status_code == 200, reply.text
        found = reply.json()
        assert (found["state"], found["origin"], found["memory_bytes"]) == ("loaded", "request", 100)
        assert found["replicas"] == {"loaded": 1}
        [spec] = app.client.loaded
        assert (spec.path, spec.engine.dtype, spec.engine.max_num_seqs) == (str(folder / "one"), "float32", 4)
        assert (await generate(client, "new")).status_code == 200
        assert "new" in [one["id"] for one in (await client.get("/v1/models")).json()["data"]]
        described = {one["name"]: one for one in (await client.get("/info")).json()["models"]}
        assert described["new"]["state"] == "loaded" and described["two"]["state"] == "available"
        metrics = (await client.get("/metrics")).text
        assert 'triptych_replicas{model="new"} 1.0' in metrics
        reply = await unload(client, "new")
        assert (reply.status_code, reply.json()["state"]) == (200, "unloaded")
        assert "new" not in await listed(client)
        reply = await generate(client, "new")
        assert (reply.status_code, code(reply)) == (404, "model_not_found")
        metrics = (await client.get("/metrics")).text
        assert 'triptych_replicas{model="new"}' not in metrics and 'triptych_kv_blocks{model="new"' not in metrics
        assert 'triptych_requests_total{model="new",outcome="length",task="generate"} 1.0' in metrics
        assert (await client.get("/readyz")).status_code == 200

    run(app, work)
    check_accounts(app)
    assert counted(app, "triptych_model_loads_total") == {("new", "loaded"): 1}
    assert counted(app, "triptych_model_unloads_total") == {("new", "request"): 1}


BAD = {
    "traversal": ({"path": "../secret"}, 400, "invalid_value"),
    "deep traversal": ({"path": "one/../../secret"}, 400, "invalid_value"),
    "absolute": ({"path": "/etc"}, 403, "source_not_allowed"),
    "the folder itself": ({"path": "."}, 400, "invalid_value"),
    "a file": ({"path": "one/config.json"}, 400, "invalid_value"),
    "a link": ({"path": "link"}, 400, "invalid_value"),
    "a NUL": ({"path": "one\0"}, 400, "invalid_value"),
    "not a hub name": ({"path": "hf:../x/y"}, 400, "invalid_value"),
    "no path": ({}, 400, "missing_field"),
    "slashes in the name": ({"name": "a/b/c", "path": "one"}, 400, "invalid_value"),
    "a part of dots in the name": ({"name": "a/..", "path": "one"}, 400, "invalid_value"),
    "a quote in the name": ({"name": 'a"b', "path": "one"}, 400, "invalid_value"),
    "a long name": ({"name": "a" * 65, "path": "one"}, 400, "invalid_value"),
    "a newline": ({"name": "a\n", "path": "one"}, 400, "invalid_value"),
    "dots": ({"name": "..", "path": "one"}, 400, "invalid_value"),
    "an unknown setting": ({"path": "one", "settings": {"dtipe": "float32"}}, 400, "invalid_value"),
    "a bad setting": ({"path": "one", "settings": {"max_num_seqs": -1}}, 400, "invalid_value"),
    "no engine setting": ({"path": "one", "settings": {"port": 1}}, 400, "invalid_value"),
    "trust": ({"path": "one", "settings": {"pickle": True}}, 400, "invalid_value"),
    "a folder to read": ({"path": "one", "settings": {"draft_model": "/tmp/x"}}, 400, "invalid_value"),
    "a place to write to": ({"path": "one", "settings": {"weights_cache": "/tmp/x"}}, 400, "invalid_value"),
    "an unknown field": ({"path": "one", "dtype": "float32"}, 400, "unknown_field"),
    "another path of a name": ({"name": "gen", "path": "one"}, 409, "model_exists"),
}


def test_what_may_not_be_loaded_is_refused_before_any_work(folder: Path) -> None:
    app = make(folder)
    checkpoints.bert(folder.parent / "secret")
    (folder / "link").symlink_to(folder.parent / "secret")

    async def work(client: httpx.AsyncClient) -> None:
        for name, (fields, status, expected) in BAD.items():
            reply = await client.post("/models/load", json={"name": "new", **fields}, headers=ADMIN)
            assert (reply.status_code, code(reply)) == (status, expected), (name, reply.text)
            assert str(folder.parent) not in reply.text
        assert "link" not in await listed(client)

    run(app, work)
    assert not app.client.loaded and not app.reader.located


@pytest.mark.parametrize(
    ("allowed", "path", "status"),
    [
        (("hub",), "one", 403),
        (("hub",), "hf:org/name@main", 200),
        (("models-dir",), "hf:org/name", 403),
        (("models-dir",), "one", 200),
        (("models-dir",), "{folder}/one", 200),
        (("models-dir",), "{folder}/../secret", 400),
        (("any",), "hf:org/name", 200),
        (("any",), "{folder}/../secret", 200),
    ],
)
def test_a_setting_says_where_models_may_come_from(
    folder: Path, allowed: tuple[str, ...], path: str, status: int
) -> None:
    app = make(folder, load_from=allowed)
    (folder.parent / "secret").mkdir()
    reply = run(app, lambda client: load(client, "new", path=path.format(folder=folder)))
    assert reply.status_code == status, reply.text
    assert [spec.path for spec in app.reader.located] == (
        []
        if status != 200
        else [str(folder / "one") if path.endswith("one") else path]
        if "secret" not in path
        else [str(folder.parent / "secret")]
    )


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (ConfigError("new: hidden_size is missing"), 400, "load_failed"),
        (LoadFailedError("out of memory"), 500, "load_failed"),
        (MemoryShortageError("no", 10_000_000, 1_000_000), 503, "model_memory"),
        (RuntimeError("canary /etc/secret"), 500, "load_failed"),
    ],
)
def test_a_failed_load_changes_nothing_and_is_told(
    folder: Path, error: Exception, status: int, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = make(folder, load_error=error)

    async def work(client: httpx.AsyncClient) -> None:
        before = await client.get("/v1/models")
        reply = await load(client, "new", path="one")
        assert (reply.status_code, code(reply)) == (status, expected), reply.text
        assert "canary" not in reply.text
        found = (await listed(client))["new"]
        assert found["state"] == "failed" and found["reason"]
        assert (await client.get("/v1/models")).json() == before.json()
        assert (await client.get("/readyz")).status_code == 200
        assert (await generate(client, "new")).status_code == 404
        assert (await generate(client, "gen")).status_code == 200
        app.script.load_error = None  # it is tried again when that is asked for
        assert (await load(client, "new", path="one")).status_code == 200

    run(app, work)
    assert "new could not be loaded" in caplog.text and "canary" not in caplog.text
    assert counted(app, "triptych_model_loads_total") == {("new", "failed"): 1, ("new", "loaded"): 1}
    check_accounts(app)


def test_two_loads_of_one_name_are_one_and_a_different_one_is_refused(folder: Path) -> None:
    app = make(folder, load_delay_s=0.1)

    async def work(client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(load(client, "new", path="one"))
        await until(lambda: state(app, "new"))
        other = await load(client, "new", path="two")
        assert (other.status_code, code(other)) == (409, "model_exists")
        same = await load(client, "new", path="one")
        assert same.status_code == (await first).status_code == 200
        again = await load(client, "new")
        assert again.status_code == 200

    run(app, work)
    assert len(app.client.loaded) == 1


def test_a_load_goes_on_without_its_client_and_can_be_given_up(folder: Path) -> None:
    app = make(folder, load_delay_s=0.2)

    async def work(client: httpx.AsyncClient) -> None:
        task = asyncio.create_task(load(client, "new", path="two"))
        await until(lambda: state(app, "new") == "loading")
        task.cancel()
        reply = await load(client, "one", wait=False)
        assert (reply.status_code, reply.json()["state"]) == (202, "loading")
        await until(lambda: (state(app, "new"), state(app, "one")) == ("loaded", "loaded"))
        task = asyncio.create_task(load(client, "two"))
        await until(lambda: state(app, "two") == "loading")
        reply = await unload(client, "two")
        assert (reply.status_code, reply.json()["state"]) == (200, "failed")
        assert code(await task) == "load_cancelled"
        assert (await generate(client, "two")).status_code == 200  # given up is not broken

    run(app, work)
    assert counted(app, "triptych_model_loads_total")["two", "cancelled"] == 1


def test_a_load_that_is_given_up_before_it_begins_leaves_no_trace(folder: Path) -> None:
    app = make(folder)

    async def work(client: httpx.AsyncClient) -> None:
        load, given_up = (
            app.service.loader.begin_load(app.service.models["one"]),
            app.service.loader.unload("one", None),
        )
        await asyncio.wait({load, given_up})
        await asyncio.sleep(0)
        assert state(app, "one") == "failed"
        assert (await asyncio.wait_for(generate(client, "one"), 10)).status_code == 200

    run(app, work)
    assert counted(app, "triptych_model_loads_total")["one", "cancelled"] == 1


# -- unloading


def test_unloading_drains_and_refuses_what_comes_new(folder: Path) -> None:
    app = make(folder)

    async def work(client: httpx.AsyncClient) -> None:
        free = hold(app)
        running = asyncio.create_task(generate(client, "gen"))
        await until(lambda: app.client.running)
        leaving = asyncio.create_task(unload(client, "gen"))
        await until(lambda: state(app, "gen") == "unloading")
        reply = await generate(client, "gen")
        assert (reply.status_code, code(reply)) == (503, "model_unloading")
        assert int(reply.headers["retry-after"]) > 0
        refused = await load(client, "gen")
        assert (refused.status_code, code(refused)) == (409, "model_unloading")
        assert not leaving.done()
        free.set()
        assert (await running).json()["choices"][0]["finish_reason"] == "length"
        assert (await leaving).json()["state"] == "unloaded"
        reply = await generate(client, "gen")
        assert reply.status_code == 404 and "/models/load" in reply.json()["error"]["message"]
        app.client._loadable["gen"] = info("gen", "decoder-only")
        assert (await load(client, "gen")).status_code == 200
        assert (await generate(client, "gen")).status_code == 200

    run(app, work)
    check_accounts(app)


def test_requests_that_outlast_the_drain_are_cancelled(folder: Path) -> None:
    app = make(folder, delay_s=0.02)

    async def work(client: httpx.AsyncClient) -> None:
        running = asyncio.create_task(generate(client, "gen", max_tokens=50))
        await until(lambda: app.client.running)
        assert (await unload(client, "gen", drain_s=0.05)).status_code == 200
        assert (await running).json()["choices"][0]["finish_reason"] == "cancelled"

    run(app, work)
    check_accounts(app)


def test_the_last_model_can_go(folder: Path) -> None:
    app = make()

    async def work(client: httpx.AsyncClient) -> None:
        for name in ("gen", "seq", "enc"):
            assert (await unload(client, name)).status_code == 200
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.get("/v1/models")).json()["data"] == []
        assert (await client.get("/info")).json()["models"] == []
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.post("/generate", json=PROMPT)).json()["error"]["message"] == "no model can generate"
        for name, status in (("gen", 409), ("nope", 404)):
            assert (await unload(client, name)).status_code == status

    run(app, work)


# -- loads that fail, and models that are lost


def test_a_load_that_takes_too_long_is_given_up(folder: Path) -> None:
    app = make(folder, load_delay_s=60.0, load_timeout_s=0.05)
    reply = run(app, lambda client: load(client, "new", path="one"))
    assert (reply.status_code, code(reply)) == (503, "load_failed")
    assert "load_timeout" in reply.json()["error"]["message"]


def test_the_time_limit_of_a_load_begins_with_its_turn(folder: Path) -> None:
    app = make(folder, load_delay_s=0.5, load_timeout_s=0.9)

    async def work(client: httpx.AsyncClient) -> None:
        replies = await asyncio.gather(*(load(client, name, path=name) for name in ("one", "two")))
        assert [reply.status_code for reply in replies] == [200, 200], [reply.text for reply in replies]

    run(app, work)


def test_a_model_lost_with_the_engine_is_told_and_loaded_again(folder: Path) -> None:
    app = make(folder)

    async def work(client: httpx.AsyncClient) -> None:
        assert (await generate(client, "one")).status_code == 200
        del app.client.models["one"]  # the engine was restarted without it
        assert (await generate(client, "one")).status_code == 503
        app.service.loader.notice_lost()
        assert (await listed(client))["one"]["state"] == "failed"
        assert (await generate(client, "one")).status_code == 200

    run(app, work)
    check_accounts(app)


def test_the_command_line_lists_loads_and_unloads(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make(folder)
    monkeypatch.setenv("TRIPTYCH_ADMIN_KEYS", "admin-key")

    def command(*arguments: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            main(["models", *arguments, "--url", url])
        shown = capsys.readouterr()
        return ended.value.code, shown.out + shown.err

    with live(app) as url:
        status, shown = command("load", "new", "one", "--set", "max-num-seqs=4", "--pin")
        assert status == 0 and "loaded (pinned)" in shown and "1 loaded" in shown
        assert app.client.loaded[0].engine.max_num_seqs == 4
        status, shown = command("list")
        assert status == 0 and shown.splitlines()[0].split()[:3] == ["name", "state", "memory"]
        assert {line.split()[0] for line in shown.splitlines()[1:]} == {"gen", "seq", "enc", "one", "two", "new"}
        assert command("unload", "new", "--drain", "0")[0] == 0
        assert command("load", "new", "../x") == (1, "triptych: 400: path: models_dir has no such folder\n")
        assert command("load")[0] == 2
        assert command("list", "--admin-key", "wrong")[0] == 1
    assert command("list")[0] == 1  # no service answers


def test_the_documentation_has_the_settings_of_models(folder: Path) -> None:
    schema = run(make(folder), lambda client: client.get("/openapi.json")).json()
    body = schema["components"]["schemas"]["LoadBody"]["properties"]["settings"]
    assert {"dtype", "quantization", "max_model_len"} <= body["properties"].keys()
    assert json.dumps(schema["paths"]["/models/load"])


def test_a_name_with_a_slash_works_wherever_names_do(folder: Path) -> None:
    """As a text of a body and in a path, plain and percent-encoded, which is how clients send it."""
    app = make(folder, names=("org/new-1.5B",))

    async def work(client: httpx.AsyncClient) -> None:
        assert (await load(client, "org/new-1.5B", path="one")).status_code == 200
        for shown in ("org/new-1.5B", "org%2Fnew-1.5B", "org%2fnew-1%2E5B"):
            reply = await client.get(f"/v1/models/{shown}")
            assert (reply.status_code, reply.json()["id"]) == (200, "org/new-1.5B")
        assert (await generate(client, "org/new-1.5B")).json()["model"] == "org/new-1.5B"
        reply = await client.post("/generate?model=org%2Fnew-1.5B", json=PROMPT)
        assert reply.json()["model"] == "org/new-1.5B"
        for other in ("org", "org/", "org/new-1.5B/", "org/new-1.5B/x", "/org/new-1.5B", "new-1.5B", "%2e%2e/new-1.5B"):
            reply = await client.get(f"/v1/models/{other}")
            assert (reply.status_code, code(reply)) == (404, "model_not_found"), other
        assert (await unload(client, "org/new-1.5B")).status_code == 200
        assert (await client.get("/v1/models/org/new-1.5B")).status_code == 404

    run(app, work)
    with live(app) as url:
        body = {"name": "org/new-1.5B", "path": "one"}
        assert httpx.post(f"{url}/models/load", json=body, headers=ADMIN).status_code == 200
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        assert client.models.retrieve("org/new-1.5B").id == "org/new-1.5B"
        assert "org/new-1.5B" in [model.id for model in client.models.list()]
    check_accounts(app)
