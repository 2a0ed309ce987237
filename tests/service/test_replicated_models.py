"""Models on all replicas: operations, the wanted state afterwards, and replicas that die, over a scripted cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoints
from tests.service.support import App, byte_tokenizer, info, make_app, opened, served, until
from triptych.model.api.messages import ModelSpec
from triptych.model.errors import ConfigError
from triptych.service.core.errors import ApiError
from triptych.service.lifecycle.fleet import Fleet, LoadOrder, LocalFleet
from triptych.service.runtimes.ray_serve import replicated_fleet
from triptych.service.runtimes.ray_serve.replicated_fleet import Command, CommandResult, ReplicatedFleet, WantedStore
from triptych.service.settings.service_settings import ModelSettings, ServiceSettings


class MemoryStore:
    """A cluster's store within one process; each access yields to other tasks, like one over the network."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    async def get(self, key: str) -> bytes | None:
        await asyncio.sleep(0)
        return self.values.get(key)

    async def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        await asyncio.sleep(0)
        if not overwrite and key in self.values:
            return False
        self.values[key] = value
        return True

    async def delete(self, key: str) -> None:
        await asyncio.sleep(0)
        self.values.pop(key, None)


class Siblings:
    """The other replicas of a cluster."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._name = cluster, name

    def fleet(self, local: LocalFleet) -> Fleet:
        fleet = ReplicatedFleet(local, WantedStore(self._cluster.store, "app"), self._others)
        self._cluster.fleets[self._name] = fleet
        return fleet

    async def _others(self, command: Command) -> list[CommandResult | None]:
        fleets = [fleet for name, fleet in self._cluster.fleets.items() if name != self._name]
        return list(await asyncio.gather(*(fleet.follow(command) for fleet in fleets)))

    def leases(self) -> None:
        """Share no quotas."""

    async def cancel(self, request_id: str) -> int:
        raise AssertionError("no test cancels")


class Cluster:
    """Replicas that tests start and kill; each has its own application."""

    def __init__(self, folder: Path) -> None:
        self.store = MemoryStore()
        self.apps: dict[str, App] = {}
        self.fleets: dict[str, ReplicatedFleet] = {}
        self._folder = folder
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def start(self, name: str) -> App:
        settings = ServiceSettings(admin_keys=("k",), models=ModelSettings(models_dir=str(self._folder)))
        loadable = [info(model, "decoder-only", memory_bytes=100) for model in ("new", "one", "gen", "ad")]
        given = served("gen", "decoder-only", byte_tokenizer()).adapted(ModelSpec("ad", "/first", adapter_of="gen"))
        app = make_app(given, settings=settings, loadable=loadable, replicas=Siblings(self, name))
        await self._stack.enter_async_context(opened(app))
        self.apps[name] = app
        return app

    def kill(self, name: str) -> None:
        del self.apps[name], self.fleets[name]

    def states(self, model: str) -> list[str]:
        slots = [app.service.models.get(model) for app in self.apps.values()]
        return ["" if slot is None else slot.state.value for slot in slots]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    checkpoints.llama(folder / "one")
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicated_fleet, "_LOCK_SECONDS", 0.001)
    monkeypatch.setattr(replicated_fleet, "POLL_SECONDS", 1e9)


def run(folder: Path, work: Any, replicas: Sequence[str] = ("a", "b")) -> None:
    async def main() -> None:
        async with Cluster(folder) as cluster:
            for name in replicas:
                await cluster.start(name)
            await work(cluster)

    asyncio.run(main())


async def refusal(work: Coroutine[Any, Any, None] | asyncio.Task[None]) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await work
    return refused.value


ORDER = LoadOrder("new", "one", {"max_num_seqs": 4}, pinned=True)


def test_a_load_is_on_all_replicas_and_on_those_that_come_later(folder: Path) -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.fleets["a"].begin_load(ORDER)
        assert cluster.states("new") == ["loaded", "loaded"]
        cluster.kill("a")
        await cluster.start("c")
        assert cluster.states("new") == ["loaded", "loaded"]
        slot = cluster.apps["c"].service.models.get("new")
        assert slot is not None and slot.pinned and slot.spec.engine.max_num_seqs == 4
        [entry] = [one for one in await cluster.fleets["c"].entries() if one.name == "new"]
        assert entry.replicas == {"loaded": 2}
        await cluster.fleets["c"].begin_unload("new", 0.0)
        assert cluster.states("new") == ["", ""]
        await cluster.start("d")
        assert cluster.states("new") == ["", "", ""]
        assert (await refusal(cluster.fleets["d"].begin_unload("new", 0.0))).status == 409
        assert not [key for key in cluster.store.values if "lock" in key]

    run(folder, work)


def test_adapters_are_on_all_replicas_and_go_with_their_base(folder: Path) -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.fleets["a"].begin_load(LoadOrder("new", "one", adapter_of="gen"))
        await cluster.start("c")
        assert cluster.states("new") == ["loaded"] * 3
        assert {app.service.models["new"].spec.adapter_of for app in cluster.apps.values()} == {"gen"}
        await cluster.fleets["c"].begin_unload("gen", 0.0)
        assert (cluster.states("gen"), cluster.states("ad")) == (["unloaded"] * 3, ["unloaded"] * 3)
        await cluster.fleets["c"].begin_load(LoadOrder("gen"))
        for fleet in cluster.fleets.values():
            await fleet.reconcile()
        assert cluster.states("new") == ["loaded"] * 3, "an adapter that an operator has loaded is loaded with its base"

    run(folder, work)


def test_an_adapter_of_the_start_may_get_another_folder_on_all_replicas(folder: Path) -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.fleets["a"].begin_unload("ad", 0.0)
        await cluster.fleets["b"].begin_load(LoadOrder("ad", "one", adapter_of="gen"))
        await cluster.start("c")  # which is started with the first folder
        for _ in range(2):
            await cluster.fleets["c"].reconcile()
        assert cluster.states("ad") == ["loaded"] * 3
        assert {app.service.models["ad"].spec.path for app in cluster.apps.values()} == {str(folder / "one")}

    run(folder, work)


def test_an_adapter_that_was_evicted_is_unloaded_everywhere(folder: Path) -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.fleets["a"].begin_load(LoadOrder("new", "one", adapter_of="gen"))
        for app in cluster.apps.values():
            await app.service.loader.begin_unload(app.service.models["new"], "evicted")
        assert cluster.states("new") == ["available"] * 2
        await cluster.fleets["b"].begin_unload("new", None)
        assert cluster.states("new") == ["", ""]

    run(folder, work)


@pytest.mark.parametrize("failing", ["a", "b"])
def test_a_load_that_one_replica_cannot_do_changes_none(folder: Path, failing: str) -> None:
    async def work(cluster: Cluster) -> None:
        cluster.apps[failing].script.load_error = ConfigError("too odd")
        error = await refusal(cluster.fleets["a"].begin_load(ORDER))
        assert error.status == 400 and "too odd" in error.message
        assert "loaded" not in cluster.states("new")
        if failing == "b":
            assert "1 of 3 replicas failed, and all are as before" in error.message
            assert cluster.apps["a"].client.unloaded == cluster.apps["c"].client.unloaded == ["new"]
        await cluster.start("d")
        assert "loaded" not in cluster.states("new")

    run(folder, work, ("a", "b", "c"))


def test_what_a_killed_replica_had_begun_is_taken_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(cluster: Cluster) -> None:
        command = Command("load", "new", "its-token", "one", {}, False)
        await cluster.store.put("app/models-lock", b"its-token 3")
        await cluster.fleets["b"].follow(command)
        await cluster.fleets["b"].reconcile()
        assert cluster.states("new") == ["", "loaded"]  # the operation may still be going on
        monkeypatch.setattr(replicated_fleet, "_STALE_SECONDS", -1.0)
        await cluster.fleets["b"].reconcile()
        assert cluster.states("new") == ["", ""]
        await cluster.fleets["a"].begin_load(ORDER)  # the lock of the dead is taken
        assert cluster.states("new") == ["loaded", "loaded"]

    run(folder, work)


def test_models_of_the_start_stay_unloaded_on_new_replicas_and_can_come_back(folder: Path) -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.fleets["a"].begin_unload("gen", 0.0)
        await cluster.start("c")
        assert cluster.states("gen") == ["unloaded"] * 3
        await cluster.fleets["c"].begin_load(LoadOrder("gen"))
        await cluster.start("d")
        assert cluster.states("gen") == ["loaded"] * 4

    run(folder, work)


def test_operations_take_turns_and_a_load_can_be_given_up_by_another_replica(folder: Path) -> None:
    async def work(cluster: Cluster) -> None:
        for app in cluster.apps.values():
            app.script.load_delay_s = 0.05
        first = cluster.fleets["a"].begin_load(ORDER)
        same, other = cluster.fleets["b"].begin_load(ORDER), cluster.fleets["b"].begin_load(LoadOrder("one"))
        await asyncio.gather(first, same, other)
        assert cluster.states("new") == cluster.states("one") == ["loaded", "loaded"]
        assert all(len(app.client.loaded) == 2 for app in cluster.apps.values())
        await cluster.fleets["b"].begin_unload("new", 0.0)
        for app in cluster.apps.values():
            app.script.load_delay_s = 60.0
        load = cluster.fleets["a"].begin_load(ORDER)
        await until(lambda: "loading" in cluster.states("new"))
        await cluster.fleets["b"].begin_unload("new", 0.0)
        assert (await refusal(load)).code == "load_cancelled"
        assert "loaded" not in cluster.states("new")

    run(folder, work)


def test_an_order_that_is_refused_is_refused_before_any_replica_is_asked(folder: Path) -> None:
    async def work(cluster: Cluster) -> None:
        with pytest.raises(ApiError, match="no such folder"):
            cluster.fleets["a"].begin_load(LoadOrder("new", "../one"))
        assert not cluster.store.values

    run(folder, work)


def test_a_replica_that_lost_a_wanted_model_loads_it_again(folder: Path) -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.fleets["a"].begin_load(ORDER)
        app = cluster.apps["b"]
        del app.client.models["new"]  # its engine was restarted without it
        app.service.loader.notice_lost()
        await cluster.fleets["b"].reconcile()
        assert cluster.states("new") == ["loaded", "loaded"]

    run(folder, work)


def test_an_operation_that_was_taken_for_dead_leaves_the_lease_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replica was paused for longer than a lease lasts: both would change the set."""
    monkeypatch.setattr(replicated_fleet, "_HEARTBEAT_SECONDS", 0.001)
    store = MemoryStore()
    store.values["app/models-lock"] = b"next 0"

    async def work() -> None:
        async with asyncio.timeout(5):
            await WantedStore(store, "app")._beat("first")

    asyncio.run(work())
    assert store.values["app/models-lock"] == b"next 0"
