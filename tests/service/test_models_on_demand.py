"""Models loaded by requests and from folders: once for all requests, noticed when added or removed, and unloaded."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import httpx
import pytest

from tests.service.fake_engine import FakeEngineClient
from tests.service.support import check_accounts, counted, hold, info, run, samples, until
from tests.service.test_models import ADMIN, code, generate, listed, load, make, state, unload, write_models
from triptych.model.api.messages import ModelSpec
from triptych.model.api.stats import EngineStats, ModelInfo
from triptych.model.errors import ConfigError, MemoryShortageError
from triptych.model.text.tokenizer import Tokenizer
from triptych.service import app as application
from triptych.service.core.models import Model, Origin, ServedModel
from triptych.service.core.models_folder import AdaptersFolder, ModelsFolder
from triptych.service.lifecycle import adapter_room, folder_watch
from triptych.service.lifecycle import state as service_state
from triptych.service.settings.service_settings import Limits


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("stored"))


@pytest.fixture
def folder(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "models"))


def test_a_model_is_loaded_once_for_all_who_ask(folder: Path) -> None:
    app = make(folder, load_delay_s=0.1)

    async def work(client: httpx.AsyncClient) -> None:
        assert (await listed(client))["one"]["state"] == "available"
        names = [one["id"] for one in (await client.get("/v1/models")).json()["data"]]
        assert names == ["gen", "seq", "enc", "one", "two"]
        asked = [asyncio.create_task(generate(client, "one")) for _ in range(5)]
        asked.append(asyncio.create_task(client.post("/tokenize", json={"model": "one", "text": "a"})))
        await until(lambda: app.service.loader._waiting == 6)
        asked[0].cancel()  # the first client disconnects
        replies = await asyncio.gather(*asked[1:])
        assert [reply.status_code for reply in replies] == [200] * 5
        assert (await listed(client))["one"]["state"] == "loaded"

    run(app, work)
    check_accounts(app)
    assert [spec.name for spec in app.client.loaded] == ["one"]


def test_waiting_is_bounded_by_number_and_by_the_request_s_own_time(folder: Path) -> None:
    app = make(folder, limits=Limits(max_waiting_for_load=2))
    go_on, read = asyncio.Event(), app.reader.read

    async def held(spec: ModelSpec) -> ServedModel:
        await go_on.wait()
        return await read(spec)

    app.reader.read = held  # type: ignore[method-assign]

    async def work(client: httpx.AsyncClient) -> None:
        leaves, stays = (asyncio.create_task(generate(client, "one")) for _ in range(2))
        await until(lambda: app.service.loader._waiting == 2)
        full = await generate(client, "two")
        assert (full.status_code, code(full)) == (429, "queue_full") and full.headers["retry-after"]
        leaves.cancel()
        await until(lambda: app.service.loader._waiting == 1)
        late = await generate(client, "one", timeout_s=0.05)
        assert (late.status_code, code(late)) == (504, "deadline")
        go_on.set()
        assert (await stays).status_code == 200

    run(app, work)
    check_accounts(app)


def test_a_model_that_fails_is_not_tried_again_at_once(folder: Path) -> None:
    app = make(folder, load_error=ConfigError("one: too odd"))

    async def work(client: httpx.AsyncClient) -> None:
        for _ in range(3):
            reply = await generate(client, "one")
            assert (reply.status_code, code(reply)) == (503, "model_failed")
            assert "too odd" in reply.json()["error"]["message"] and 0 < int(reply.headers["retry-after"]) <= 30

    run(app, work)
    assert len(app.reader.located) == 1
    check_accounts(app)


def test_folders_that_come_change_and_go_are_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make(folder, names=("one", "two", "late", "bad"))
    monkeypatch.setattr(folder_watch, "_MIN_SECONDS", 0.0)

    async def work(client: httpx.AsyncClient) -> None:
        [watch] = app.service.loader._watches
        assert (await generate(client, "late")).status_code == 404
        shutil.copytree(folder / "one", folder / "late")
        assert (await generate(client, "late")).status_code == 200  # before the next look at the folder
        (folder / "bad").mkdir()
        (folder / "bad" / "config.json").write_text("{")
        await watch.scan()
        assert (await listed(client))["bad"]["state"] == "failed"
        reply = await generate(client, "bad")
        assert (reply.status_code, code(reply)) == (503, "model_failed")
        shutil.rmtree(folder / "bad")
        shutil.copytree(folder / "one", folder / "bad")  # mended
        await watch.scan()
        assert (await generate(client, "bad")).status_code == 200
        shutil.rmtree(folder / "two")
        shutil.rmtree(folder / "late")
        await watch.scan()
        assert "two" not in await listed(client)
        assert (await listed(client))["late"]["state"] == "loaded"  # once may be an accident
        await watch.scan()
        app.service.loader.unload_unneeded()
        await until(lambda: state(app, "late") == "available")
        await watch.scan()
        assert "late" not in await listed(client)

    run(app, work)
    check_accounts(app)


def test_names_that_cannot_be_served_and_links_elsewhere_are_left_out(folder: Path) -> None:
    for name in ("with space", "-dash", "ünï"):
        shutil.copytree(folder / "one", folder / name)
    shutil.copytree(folder / "one", folder.parent / "elsewhere")
    os.symlink(folder.parent / "elsewhere", folder / "outside")
    os.symlink(folder / "one", folder / "inside")
    os.symlink("circle", folder / "circle")  # its target cannot be looked up
    shutil.copytree(folder / "one", folder / "gen")  # the name of a model that is served
    app = make(folder)
    names = {name for name, one in run(app, listed).items() if one["origin"] == "models-dir"}
    assert names == {"one", "two", "inside"}


def test_a_link_to_nothing_hides_no_change_of_its_folder(folder: Path) -> None:
    os.symlink("nowhere", folder / "one" / "extra")
    models = ModelsFolder(str(folder))
    before = models.scan()
    (folder / "one" / "config.json").write_text("{")
    after = models.scan()
    assert before and after and not before["one"].reason and after["one"].reason


def test_an_adapter_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    for name in ("dead", "bare"):
        (tmp_path / name).mkdir()
    os.symlink("nowhere", tmp_path / "dead" / "adapter_config.json")
    (tmp_path / "bare" / "adapter_config.json").write_text('{"r": 4}')
    found = AdaptersFolder(str(tmp_path)).scan()
    assert found is not None and found.keys() == {"bare", "dead"}
    assert "is a link to a file that is not there" in found["dead"].reason
    assert "adapter_model.safetensors is missing" in found["bare"].reason


def test_a_file_that_cannot_be_looked_up_hides_no_other_model(folder: Path) -> None:
    os.symlink("x" * 300, folder / "long.gguf")  # as a link to where this process may not look
    assert (ModelsFolder(str(folder)).scan() or {}).keys() == {"one", "two"}


def test_a_folder_that_cannot_be_listed_for_a_while_is_said_once_and_looked_at_again(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "place"
    os.symlink(folder, place)
    models = ModelsFolder(str(place))
    assert models.scan()
    for target in ("place", "nowhere"):
        place.unlink()
        os.symlink(target, place)
        assert models.scan() is None
    assert [one.message for one in caplog.records] == ["models_dir cannot be listed: a link leads in a circle"]
    place.unlink()
    os.symlink(folder, place)
    assert models.scan()


def test_a_model_that_an_operator_withdraws_is_loaded_no_more(folder: Path) -> None:
    app = make(folder)
    models, loader = app.service.models, app.service.loader

    async def work(client: httpx.AsyncClient) -> None:
        assert (await load(client, "new", path="one")).status_code == 200
        await loader.begin_unload(models["new"], "idle")
        withdrawn = loader.unload("new", None)
        if (model := models.get("new")) is not None:  # for a request that comes at the same time
            await asyncio.wait({loader.begin_load(model)})
        await withdrawn
        assert "new" not in app.client.models and state(app, "new") is None
        assert (await generate(client, "new")).status_code == 404

    run(app, work)


def test_a_load_that_is_given_up_leaves_no_wait_for_adapters() -> None:
    async def work() -> None:
        model = Model(ModelSpec("one", "/one", adapter_of="base"), Origin.REQUEST, pinned=False)
        with model.in_use():
            waiting = asyncio.create_task(adapter_room._wait_for_one([model]))
            while len(asyncio.all_tasks()) < 3:
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})
            await asyncio.sleep(0)
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(work())


def test_idle_models_are_unloaded_but_those_of_the_start(folder: Path) -> None:
    app = make(folder, keep_alive_s=0.05)

    async def work(client: httpx.AsyncClient) -> None:
        assert (await generate(client, "one")).status_code == 200
        assert (await load(client, "two", pinned=True)).status_code == 200
        free = hold(app)
        running = asyncio.create_task(generate(client, "one"))
        await until(lambda: app.client.running)
        await asyncio.sleep(0.06)
        app.service.loader.unload_unneeded()
        assert (await listed(client))["one"]["state"] == "loaded"  # it is in use
        free.set()
        await running
        await asyncio.sleep(0.06)
        app.service.loader.unload_unneeded()
        await until(lambda: state(app, "one") == "available")
        assert {name: one["state"] for name, one in (await listed(client)).items()} == {
            **dict.fromkeys(("gen", "seq", "enc", "two"), "loaded"),
            "one": "available",
        }
        assert (await generate(client, "one")).status_code == 200

    run(app, work)
    check_accounts(app)
    assert counted(app, "triptych_model_unloads_total") == {("one", "idle"): 1}


def test_work_in_the_background_goes_on_after_a_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(application, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(service_state, "_MODELS_SECONDS", 0.001)
    app, looks = make(folder), list[int]()
    look_after = app.service.loader.look_after

    async def faulty() -> None:
        looks.append(len(looks))
        if len(looks) == 1:
            raise RuntimeError("canary")
        await look_after()

    app.service.loader.look_after = faulty  # type: ignore[method-assign]
    run(app, lambda _: until(lambda: len(looks) > 2))
    assert "unexpected RuntimeError" in caplog.text


def test_what_the_engine_has_counted_for_a_model_is_kept_when_that_goes(folder: Path) -> None:
    """Nothing has read the metrics since."""
    app = make(folder)

    def stats() -> dict[str, EngineStats]:
        return {name: EngineStats(name, preemptions=7) for name in app.client.models}

    app.client.stats = stats  # type: ignore[method-assign]

    async def work(client: httpx.AsyncClient) -> None:
        for _ in range(2):
            assert (await generate(client, "one")).status_code == 200
            assert (await unload(client, "one")).status_code == 200

    run(app, work)
    assert samples(app, "triptych_preemptions_total")["one",] == 14


@pytest.fixture
def within(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted engine keeps to the memory that a model may take, as a real one does."""
    real = FakeEngineClient.load

    async def load(self: FakeEngineClient, spec: ModelSpec, tokenizer: Tokenizer | None) -> ModelInfo:
        needed = self._loadable[spec.name].memory_bytes
        if spec.memory is not None and spec.memory < needed:
            raise MemoryShortageError("it does not fit", needed, spec.memory)
        return await real(self, spec, tokenizer)

    monkeypatch.setattr(FakeEngineClient, "load", load)


@pytest.mark.usefixtures("within")
def test_the_least_recently_used_model_makes_room(folder: Path) -> None:
    app = make(folder, memory=250)

    async def work(client: httpx.AsyncClient) -> None:
        for name in ("one", "two", "one"):
            assert (await generate(client, name)).status_code == 200
        assert (await load(client, "new", path="one")).status_code == 200
        states = {name: one["state"] for name, one in (await listed(client)).items()}
        assert (states["one"], states["two"], states["new"]) == ("loaded", "available", "loaded")
        assert (await generate(client, "two")).status_code == 200  # it comes back when it is needed
        reply = await client.get("/models", headers=ADMIN)
        assert (reply.json()["memory_bytes"], reply.json()["memory_limit"]) == (200, 250)

    run(app, work)
    assert app.client.unloaded == ["two", "one"]
    assert counted(app, "triptych_model_unloads_total") == {("two", "evicted"): 1, ("one", "evicted"): 1}


@pytest.mark.usefixtures("within")
def test_what_the_engine_has_lost_makes_no_room(folder: Path) -> None:
    app = make(folder, memory=250)

    async def work(client: httpx.AsyncClient) -> None:
        for name in ("two", "one"):
            assert (await generate(client, name)).status_code == 200
        del app.client.models["two"]  # the engine was restarted without it, just now
        app.client._loadable["new"] = info("new", "decoder-only", memory_bytes=200)
        assert (await load(client, "new", path="one")).status_code == 200
        states = {name: one["state"] for name, one in (await listed(client)).items()}
        assert (states["one"], states["two"], states["new"]) == ("available", "failed", "loaded")

    run(app, work)
    assert app.client.unloaded == ["one"]


@pytest.mark.usefixtures("within")
def test_models_in_use_and_pinned_ones_stay_and_the_rest_is_told_to_wait(folder: Path) -> None:
    app = make(folder, memory=250)

    async def work(client: httpx.AsyncClient) -> None:
        assert (await load(client, "one", pinned=True)).status_code == 200
        assert (await generate(client, "two")).status_code == 200
        free = hold(app)
        running = asyncio.create_task(generate(client, "two"))
        await until(lambda: app.client.running)
        reply = await load(client, "new", path="one")
        assert (reply.status_code, code(reply)) == (503, "model_memory") and reply.headers["retry-after"]
        assert "model_memory" in reply.json()["error"]["message"]
        free.set()
        assert (await running).status_code == 200
        app.client._loadable["new"] = info("new", "decoder-only", memory_bytes=1000)
        reply = await load(client, "new", path="one")  # more than there is in all: nothing is unloaded for it
        assert reply.status_code == 503

    run(app, work)
    assert app.client.unloaded == []
    check_accounts(app)


@pytest.mark.usefixtures("within")
def test_models_of_the_start_are_evicted_where_that_is_said(folder: Path) -> None:
    app = make(folder, memory=100, pin=False)
    for name in ("gen", "seq", "enc"):
        app.client._from_start[name] = info(name, "decoder-only", memory_bytes=50)

    async def work(client: httpx.AsyncClient) -> None:
        assert (await generate(client, "one")).status_code == 200
        states = {name: one["state"] for name, one in (await listed(client)).items()}
        assert states == dict.fromkeys(("gen", "seq", "enc", "two"), "available") | {"one": "loaded"}

    run(app, work)
