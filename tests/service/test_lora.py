"""LoRA adapters over HTTP: named as models, mixed in one batch, loaded and unloaded by request, as vLLM does too."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import shutil
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from tests.engine.test_lora import MIXED, PROMPTS, SMALL, expected, folders
from tests.engine.thread_transport import ThreadTransport
from tests.model.checkpoints import loaded, native_backends
from tests.model.texts import bytes_tokenizer
from tests.service.test_adapters import write_folder
from tests.service.test_bad_requests import check_error
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.checkpoint.adapter_tensors import read_adapter
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.errors import ConfigError
from triptych.model.network.lora_weights import plan_adapter, planned_bytes
from triptych.service.app import create_app
from triptych.service.cli.main import main
from triptych.service.cli.parser import make_parser
from triptych.service.core.models import Models, ServedModel
from triptych.service.runtimes.assembly import read_models
from triptych.service.runtimes.model_reader import FolderReader, read_adapted
from triptych.service.settings.option_table import OPTIONS
from triptych.service.settings.resolve import resolve_config
from triptych.service.settings.service_settings import Limits, ModelSettings, ServiceSettings
from triptych.service.settings.sources import FileSettings, from_arguments

ENGINE = EngineConfig(**SMALL)
ADMIN = {"Authorization": "Bearer admin"}
SETTINGS = ServiceSettings(admin_keys=("admin",), models=ModelSettings(load_from=("any",)), vllm_metrics=True)


class Reader(FolderReader):
    """Reads a base model with the test's tokenizer."""

    async def read(self, spec: ModelSpec, base: ServedModel | None = None) -> ServedModel:
        found = await super().read(spec, base)
        return found if base is not None else replace(found, tokenizer=bytes_tokenizer())


@asynccontextmanager
async def service(
    *adapters: str, settings: ServiceSettings = SETTINGS, later: tuple[str, ...] = ()
) -> AsyncIterator[httpx.AsyncClient]:
    """`adapters` are loaded at the start, and requests may load those of `later`."""
    base = ModelSpec("base", str(folders()["base"]), ENGINE)
    specs = [base, *(ModelSpec(name, str(folders()[name]), ENGINE, adapter_of="base") for name in adapters)]
    served = [ServedModel("base", read_checkpoint(folders()["base"]), bytes_tokenizer(), ENGINE)]
    served += [read_adapted(spec, served[0]) for spec in specs[1:]]
    for name in later:
        spec = ModelSpec(name, str(folders()[name]), ENGINE, adapter_of="base")
        served.append(replace(read_adapted(spec, served[0]), loaded=False))
    engine = AsyncEngine(specs, ThreadTransport, {one.name: one.tokenizer for one in served})
    app = create_app(engine, Models(served), settings, Reader(1 << 30, "plain", Limits().max_beams))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test", headers=ADMIN) as client,
    ):
        yield client


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


async def complete(client: httpx.AsyncClient, model: str, ids: tuple[int, ...]) -> str:
    body = {"model": model, "prompt": list(ids), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    found: str = reply.json()["choices"][0]["text"]
    return found


def wanted_text(name: str, ids: tuple[int, ...]) -> str:
    return bytes_tokenizer().decode(expected(name, ids))


def test_requests_of_all_adapters_at_once_are_those_of_merged_models() -> None:
    async def work() -> None:
        async with service("sql", "fr") as client:
            asked = [(name or "base", ids) for name, ids in MIXED]
            found = await asyncio.gather(*(complete(client, *one) for one in asked))
            assert found == [wanted_text(*one) for one in asked]
            listed = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
            assert {name: (one["root"], one["parent"]) for name, one in listed.items()} == {
                "base": ("base", None),
                "sql": ("base", "base"),
                "fr": ("base", "base"),
            }
            unnamed = await client.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 1})
            assert unnamed.json()["model"] == "base", "an adapter is meant by its name alone"
            metrics = (await client.get("/metrics")).text
            for wanted in (
                'triptych_requests_total{model="sql",outcome="length",task="generate"} 4.0',
                'triptych_generation_tokens_total{model="fr"} 48.0',
                'triptych_lora_requests_running{model="sql"} 0.0',
                'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""}',
            ):
                assert wanted in metrics

    run(work())


def test_adapters_are_loaded_and_unloaded_by_request() -> None:
    async def work() -> None:
        async with service() as client:
            path = str(folders()["sql"])
            load = {"name": "sql", "path": path, "adapter_of": "base"}
            loaded = (await client.post("/models/load", json=load)).json()
            assert (loaded["state"], loaded["adapter_of"], loaded["memory_bytes"] > 0) == ("loaded", "base", True)
            assert await complete(client, "sql", PROMPTS[0]) == wanted_text("sql", PROMPTS[0])
            assert (await client.post("/models/unload", json={"name": "sql"})).status_code == 200
            check_error(
                await client.post("/v1/completions", json={"model": "sql", "prompt": "a"}), 404, "model_not_found"
            )
            for path_, name, wanted in (
                ("/nowhere", "x", 400),
                (str(folders()["base"]), "x", 400),
                (path, "base", 409),
            ):
                refused = await client.post("/models/load", json={**load, "path": path_, "name": name})
                assert refused.status_code == wanted, refused.text
            unknown = await client.post("/models/load", json={**load, "adapter_of": "other"})
            assert unknown.json()["error"]["param"] == "adapter_of"

    run(work())


def test_other_servers_fields_name_adapters() -> None:
    greedy = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    text = "abc"
    infill = {"input_prefix": text, "input_suffix": "", "n_predict": 12, "temperature": 0}

    async def work() -> None:
        async with service("sql", "fr") as client:
            wanted = {}
            for name in ("base", "sql", "fr"):
                reply = await client.post("/v1/completions", json={"model": name, "prompt": text, **greedy})
                wanted[name] = reply.json()["choices"][0]["text"]
            assert len(set(wanted.values())) == 3
            parameters = {"max_new_tokens": 12}
            for path, body in (
                ("/v1/completions", {"prompt": text, "lora_path": "fr", **greedy}),
                ("/v1/completions", {"model": "base", "prompt": text, "lora_path": "fr", **greedy}),
                ("/generate", {"inputs": text, "parameters": {**parameters, "adapter_id": "fr"}}),
                ("/", {"inputs": text, "adapter_id": "fr", "parameters": parameters}),
            ):
                found = await client.post(path, json=body)
                assert json.dumps(wanted["fr"])[1:-1] in json.dumps(found.json()), found.text
            listed = (await client.get("/lora-adapters")).json()
            assert listed == [{"id": 0, "path": "sql", "scale": 0.0}, {"id": 1, "path": "fr", "scale": 0.0}]
            assert (await client.post("/lora-adapters", json=[{"id": 1, "scale": 0}])).json() == {"success": True}
            for path, bad, param in (
                ("/lora-adapters", [{"id": 0, "scale": 0}, {"id": 1, "scale": 1}], "[1].scale"),
                ("/v1/completions", {"prompt": text, "lora_path": "base"}, "lora_path"),
                ("/v1/completions", {"model": "sql", "prompt": text, "lora_path": "fr"}, "lora_path"),
                ("/generate", {"inputs": text, "parameters": {"adapter_id": "base"}}, "parameters.adapter_id"),
                ("/infill", {**infill, "lora": [{"id": 2, "scale": 1}]}, "lora[0].id"),
            ):
                refused = await client.post(path, json=bad)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
            unknown = await client.post("/v1/completions", json={"prompt": text, "lora_path": "de"})
            check_error(unknown, 404, "model_not_found")
            asked = {**infill, "lora": [{"id": 0, "scale": 0}, {"id": 1, "scale": 1.0}]}
            assert "model fr cannot fill in the middle" in (await client.post("/infill", json=asked)).text

    run(work())


def test_vllms_routes_load_replace_and_unload() -> None:
    async def work() -> None:
        async with service() as client:
            body = {"lora_name": "sql", "lora_path": str(folders()["sql"])}
            added = await client.post("/v1/load_lora_adapter", json=body)
            assert (added.status_code, added.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
            assert await complete(client, "sql", PROMPTS[0]) == wanted_text("sql", PROMPTS[0])
            assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 400
            other = {**body, "lora_path": str(folders()["fr"]), "load_inplace": True}
            assert (await client.post("/v1/load_lora_adapter", json=other)).status_code == 200
            assert await complete(client, "sql", PROMPTS[0]) == wanted_text("fr", PROMPTS[0])
            assert (await client.post("/v1/load_lora_adapter", json={**body, "lora_name": "base"})).status_code == 400
            removed = await client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
            assert removed.text == "Success: LoRA adapter 'sql' removed successfully."
            for name in ("sql", "base"):
                check_error(
                    await client.post("/v1/unload_lora_adapter", json={"lora_name": name}), 404, "NotFoundError"
                )
            client.headers = httpx.Headers()
            assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 401

    run(work())


def test_openais_client_uses_vllms_routes() -> None:
    async def work() -> None:
        async with service() as client:
            there = AsyncOpenAI(base_url="http://test/v1", api_key="admin", http_client=client, max_retries=0)
            body = {"lora_name": "sql", "lora_path": str(folders()["sql"])}
            added = await there.post("/load_lora_adapter", body=body, cast_to=str)
            assert added == "Success: LoRA adapter 'sql' added successfully."
            assert [one.id for one in (await there.models.list()).data] == ["base", "sql"]
            ids, more = list(PROMPTS[0]), {"ignore_eos": True}
            made = await there.completions.create(
                model="sql", prompt=ids, max_tokens=12, temperature=0, extra_body=more
            )
            assert (made.model, made.choices[0].text) == ("sql", wanted_text("sql", PROMPTS[0]))
            with pytest.raises(BadRequestError, match="loaded already"):
                await there.post("/load_lora_adapter", body=body, cast_to=str)
            gone = await there.post("/unload_lora_adapter", body={"lora_name": "sql"}, cast_to=str)
            assert gone == "Success: LoRA adapter 'sql' removed successfully."
            with pytest.raises(NotFoundError):
                await there.completions.create(model="sql", prompt=ids)

    run(work())


def test_vllms_route_replaces_an_adapter_of_the_start_once_the_new_one_is_read() -> None:
    async def work() -> None:
        async with service("sql") as client:
            body = {"lora_name": "sql", "load_inplace": True}
            for path in (folders()["base"], "/nowhere"):
                refused = await client.post("/v1/load_lora_adapter", json={**body, "lora_path": str(path)})
                assert refused.status_code == 400, refused.text
                assert await complete(client, "sql", PROMPTS[0]) == wanted_text("sql", PROMPTS[0])
            assert refused.json()["error"]["param"] == "lora_path"
            added = await client.post("/v1/load_lora_adapter", json={**body, "lora_path": str(folders()["fr"])})
            assert added.status_code == 200, added.text
            assert await complete(client, "sql", PROMPTS[0]) == wanted_text("fr", PROMPTS[0])

    run(work())


def bounded(most: int, **more: Any) -> ServiceSettings:
    return replace(SETTINGS, models=replace(SETTINGS.models, max_loras=most, **more))


@pytest.mark.parametrize(("short", "state"), [(0, "available"), (1, "failed")])
def test_an_adapter_is_planned_below_the_memory_of_all_models(short: int, state: str) -> None:
    """There is room for one of two adapters, or for none."""
    model = loaded("llama", native_backends()[0])
    planned = planned_bytes(plan_adapter(read_adapter(folders()["fr"]), model), model)

    async def work() -> None:
        async with service() as client:
            whole = (await client.get("/models")).json()["memory_bytes"]
        models = replace(SETTINGS.models, memory=whole + planned - short)
        async with service(settings=replace(SETTINGS, models=models)) as client:
            for name in ("one", "two"):
                asked = {"name": name, "path": str(folders()["fr"]), "adapter_of": "base"}
                reply = await client.post("/models/load", json=asked)
            assert (await states(client))["one"] == state
            assert (reply.status_code, "it needs" in reply.text) == ((503, True) if short else (200, False))

    run(work())


async def states(client: httpx.AsyncClient) -> dict[str, str]:
    return {one["name"]: one["state"] for one in (await client.get("/models")).json()["models"]}


def test_the_least_recently_used_adapter_goes_for_another_one() -> None:
    async def work() -> None:
        async with service("sql", settings=bounded(1), later=("fr",)) as client:
            assert await states(client) == {"base": "loaded", "sql": "loaded", "fr": "available"}
            assert await complete(client, "fr", PROMPTS[0]) == wanted_text("fr", PROMPTS[0])
            assert await states(client) == {"base": "loaded", "sql": "available", "fr": "loaded"}
            asked = [(name or "base", ids) for name, ids in MIXED]
            found = await asyncio.gather(*(complete(client, *one) for one in asked))
            assert found == [wanted_text(*one) for one in asked], "those that wait for another adapter are answered"
            metrics = (await client.get("/metrics")).text
            assert 'vllm:lora_requests_info{max_lora="1",running' in metrics
            assert 'triptych_model_unloads_total{model="sql",reason="evicted"}' in metrics
            [waits] = [name for name, state in (await states(client)).items() if state == "available"]
            assert (await client.post("/models/unload", json={"name": waits})).status_code == 200
            check_error(
                await client.post("/v1/completions", json={"model": waits, "prompt": "a"}), 404, "model_not_found"
            )
            load = {"name": "de", "path": str(folders()["sql"]), "adapter_of": "base", "pinned": True}
            assert (await client.post("/models/load", json=load)).json()["state"] == "loaded"
            refused = await client.post("/models/load", json={**load, "name": "it"})
            assert "max_loras is 1, and as many adapters are pinned: de" in refused.text
            assert await states(client) == {"base": "loaded", "sql": "available", "fr": "available", "de": "loaded"} | {
                waits: "unloaded",
                "it": "failed",
            }

    run(work())


def test_a_running_request_keeps_its_adapter_and_another_waits_for_it() -> None:
    async def work() -> None:
        async with service("sql", settings=bounded(1), later=("fr",)) as client:
            body = {"model": "sql", "prompt": list(PROMPTS[0]), "max_tokens": 100, "ignore_eos": True, "temperature": 0}
            long = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(0.05)
            found = await asyncio.gather(*(complete(client, name, PROMPTS[1]) for name in ("fr", "sql", "fr")))
            assert found == [wanted_text(name, PROMPTS[1]) for name in ("fr", "sql", "fr")]
            assert (await long).json()["usage"]["completion_tokens"] == 100

    run(work())


def test_a_folder_of_adapters_is_read_on_demand_and_again_when_it_changes(tmp_path: Path) -> None:
    async def work() -> None:
        shutil.copytree(folders()["sql"], tmp_path / "one")
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "adapter_config.json").write_text("{}")
        settings = bounded(2, lora_dirs=(("base", str(tmp_path)),))
        async with service(settings=settings) as client:
            loader = client._transport.app.state.service.loader  # type: ignore[attr-defined]
            [watch] = loader._watches
            assert await states(client) == {"base": "loaded", "broken": "failed", "one": "available"}
            listed = {one["id"]: one["parent"] for one in (await client.get("/v1/models")).json()["data"]}
            assert listed == {"base": None, "one": "base"}
            assert await complete(client, "one", PROMPTS[0]) == wanted_text("sql", PROMPTS[0])
            shutil.copytree(folders()["fr"], tmp_path / "one", dirs_exist_ok=True)
            shutil.copytree(folders()["fr"], tmp_path / "two")
            for _ in range(2):
                await watch.scan()
            loader.unload_unneeded()
            for name in ("one", "two"):
                assert await complete(client, name, PROMPTS[0]) == wanted_text("fr", PROMPTS[0])
            shutil.rmtree(tmp_path / "two")
            for _ in range(2):
                await watch.scan()
            loader.unload_unneeded()
            await asyncio.wait({one.task for one in loader._models if one.task is not None} or {asyncio.sleep(0)})
            await watch.scan()
            assert set(await states(client)) == {"base", "broken", "one"}

    run(work())


NOT_PINNED = replace(SETTINGS, models=replace(SETTINGS.models, pin=False))


async def settled(client: httpx.AsyncClient) -> dict[str, str]:
    """Return the states of all models once no load or unload runs."""
    models = client._transport.app.state.service.loader._models  # type: ignore[attr-defined]
    while tasks := [one.task for one in models if one.task is not None]:
        await asyncio.wait(tasks)
    return await states(client)


async def order(client: httpx.AsyncClient, what: str, **body: Any) -> None:
    reply = await client.post(f"/models/{what}", json=body)
    assert reply.status_code == 200, reply.text


def test_an_unloaded_base_takes_its_adapters_with_it_and_brings_them_back() -> None:
    async def work() -> None:
        async with service("sql", "fr", settings=NOT_PINNED) as client:
            extra = {"path": str(folders()["fr"]), "adapter_of": "base"}
            await order(client, "load", name="extra", **extra)
            await order(client, "unload", name="fr")
            await order(client, "unload", name="base")
            gone = dict.fromkeys(("base", "sql", "fr", "extra"), "unloaded")
            assert await settled(client) == gone
            refused = await client.post("/models/load", json={"name": "sql"})
            assert "base model base was unloaded" in refused.text
            await order(client, "load", name="base")
            back = dict.fromkeys(("base", "sql", "extra"), "loaded")
            assert await settled(client) == back | {"fr": "unloaded"}, "an adapter that was unloaded alone stays so"
            assert await complete(client, "sql", PROMPTS[0]) == wanted_text("sql", PROMPTS[0])

    run(work())


def test_a_base_that_comes_back_offers_the_adapters_that_were_not_in_memory() -> None:
    settings = replace(NOT_PINNED, models=replace(NOT_PINNED.models, max_loras=1))

    async def work() -> None:
        async with service("sql", settings=settings, later=("fr",)) as client:
            await order(client, "unload", name="base")
            assert await settled(client) == {"base": "unloaded", "sql": "unloaded", "fr": "unloaded"}
            check_error(
                await client.post("/v1/completions", json={"model": "fr", "prompt": "a"}), 404, "model_not_found"
            )
            await order(client, "load", name="base")
            assert await settled(client) == {"base": "loaded", "sql": "available", "fr": "available"}
            for name in ("fr", "sql"):
                assert await complete(client, name, PROMPTS[0]) == wanted_text(name, PROMPTS[0])

    run(work())


def test_settings_name_adapters() -> None:
    paths = {name: str(folders()[name]) for name in ("base", "sql", "fr")}
    models: dict[str, dict[str, Any]] = {"base": {"path": paths["base"], "lora": {"fr": paths["fr"]}}}
    config = resolve_config(models, {"lora": (f"sql={paths['sql']}",)})
    found = {spec.name: (spec.path, spec.adapter_of) for spec in config.models}
    assert found == {
        "base": (paths["base"], None),
        "fr": (paths["fr"], "base"),
        "sql": (paths["sql"], "base"),
    }
    models["other"] = {"path": paths["base"]}
    assert resolve_config(models, {"lora": (f"other:sql={paths['sql']}",)}).models[-1].adapter_of == "other"
    for message, given in (
        ("name its model, MODEL:sql=PATH: one of base, other", f"sql={paths['sql']}"),
        ("no model is named third", f"third:sql={paths['sql']}"),
        ("another model or adapter has this name", f"base:fr={paths['sql']}"),
        ("another model or adapter has this name", f"base:other={paths['sql']}"),
        ("the adapter sql: /nowhere: no such folder; expected the folder of a LoRA adapter", "base:sql=/nowhere"),
        ("printable characters", "base:a\tb=/nowhere"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve_config(models, {"lora": (given,)})


def test_settings_bound_adapters_and_name_folders(tmp_path: Path) -> None:
    paths = {name: str(folders()[name]) for name in ("base", "sql", "fr")}
    models: dict[str, dict[str, Any]] = {"base": {"path": paths["base"]}}
    given = {"lora": (f"sql={paths['sql']}", f"fr={paths['fr']}"), "max_loras": 1, "lora_dir": (str(tmp_path),)}
    config = resolve_config(models, given)
    assert config.settings.models.lora_dirs == (("base", str(tmp_path)),)
    assert [(one.name, one.loaded) for one in read_models(config)] == [("base", True), ("sql", True), ("fr", False)]
    group = FileSettings(models={"other": {"path": paths["base"]}})
    assert [one.name for one in resolve_config(models, given, {"g": group}).groups[0].models] == ["other"]
    models["other"] = {"path": paths["base"]}
    for message, bad in (
        ("max_loras must be at least 1", {"max_loras": 0}),
        (f"name its model, MODEL:{tmp_path}: one of base, other", {"lora_dir": (str(tmp_path),)}),
        ("no model is named third", {"lora_dir": (f"third:{tmp_path}",)}),
        ("no such folder", {"lora_dir": ("base:/nowhere",)}),
        ("has the folder .* already", {"lora_dir": (f"base:{tmp_path}", f"base:{tmp_path}")}),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve_config(models, bad)


def test_a_bad_adapter_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    base = ServedModel("base", read_checkpoint(folders()["base"]), None, ENGINE)
    with pytest.raises(ConfigError, match=r"sql: .*expected the folder of a LoRA adapter"):
        read_adapted(ModelSpec("sql", str(tmp_path), ENGINE, adapter_of="base"), base)
    split = ModelSpec("sql", str(folders()["sql"]), replace(ENGINE, tensor_parallel_size=2), adapter_of="base")
    with pytest.raises(ConfigError, match=r"sql: a model that is split over ranks \(tensor_parallel_size\)"):
        read_adapted(split, base)
    own = replace(base, checkpoint=read_checkpoint(write_folder(tmp_path / "own")[0]))
    with pytest.raises(ConfigError, match="sql: the base model has adapters of its own"):
        read_adapted(ModelSpec("sql", str(folders()["sql"]), ENGINE, adapter_of="base"), own)


def test_inspect_shows_an_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--json"], []):
        with pytest.raises(SystemExit) as ended:
            main(["inspect", f"sql={folders()['sql']}", *flags])
        assert ended.value.code == 0
    line, _, table = capsys.readouterr().out.partition("\n")
    found = json.loads(line)
    assert (found["form"], found["adapter_of"], found["parameters"]) == ("adapter", "org/base", 3968)
    assert found["modules"]["q_proj"] == {"count": 2, "ranks": [4], "scales": [2.0], "parameters": 512}
    assert "LoRA adapter of org/base, 3,968 parameters" in table
    assert found["memory_bytes"] == {"float32": 15872, "bfloat16": 7936}
    assert "in memory: 0.02 MB in float32 or 0.01 MB in bfloat16" in table


def printed(language: str) -> str:
    """Return the last block of a language of the page, with this test's folders."""
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
    block = page.split(f"```{language}\n")[-1].split("```")[0].replace("\\\n", " ")
    places = {"/models/llama": "base", "/adapters/sql": "sql"}
    for text, name in places.items():
        block = block.replace(text, str(folders()[name]))
    return block


def test_the_commands_of_the_page_work_as_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folders()["fr"], tmp_path / "fr")
    block = printed("bash").replace("/more-adapters", str(tmp_path))
    inspect, serve, *calls = [line for line in block.splitlines() if not line.startswith("#")]
    with pytest.raises(SystemExit) as ended:
        main(inspect.split()[1:])
    assert ended.value.code == 0
    arguments = make_parser().parse_args(serve.split()[1:])
    models = dict(one.split("=") for one in arguments.models)
    given = from_arguments(arguments, OPTIONS)
    config = resolve_config({name: {"path": path} for name, path in models.items()}, given)
    assert [(one.name, one.adapter_of) for one in config.models] == [("base", None), ("sql", "base")]

    async def work() -> None:
        async with service("sql", settings=config.settings) as client:
            client.headers = httpx.Headers()
            for call in calls:
                asked = curl.parse_args(shlex.split(call)[1:])
                headers = dict(one.split(": ", 1) for one in asked.headers)
                method = "GET" if asked.data is None else "POST"
                url = asked.url.removeprefix("http://localhost:8000")
                reply = await client.request(method, url, content=asked.data, headers=headers)
                assert reply.status_code == 200, (call, reply.text)

    curl = argparse.ArgumentParser()
    curl.add_argument("url")
    curl.add_argument("-H", dest="headers", action="append", default=[])
    curl.add_argument("-d", dest="data")
    run(work())
    capsys.readouterr()
    exec(printed("python").replace('"SELECT"', "(5, 6, 7)"), {})  # the base has no tokenizer
    assert capsys.readouterr().out
