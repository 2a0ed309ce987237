"""Models are loaded and unloaded while others are served; a failure changes nothing else."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.front import Brake, async_test, collect, ends_of, idle, ids_of, served, text_of, until
from tests.engine.support import request
from tests.engine.thread_transport import ThreadTransport
from tests.model.checkpoints import copied, prompt, saved
from tests.model.sparse import qwen3, sparse_checkpoint
from tests.model.texts import bytes_tokenizer
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import Events, ModelSpec
from triptych.model.api.request import EncodeRequest, FinishReason, Request, token_source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.client import async_engine
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.client.process_transport import ProcessTransport
from triptych.model.engine import background_jobs, builder, generate_builder, loop
from triptych.model.engine.loop import EngineLoop
from triptych.model.errors import (
    ConfigError,
    EngineDeadError,
    EngineGoneError,
    LoadFailedError,
    MemoryShortageError,
    ModelNotLoadedError,
)
from triptych.model.linear.native import NativeLinear
from triptych.model.pretrained import embedded_models
from triptych.model.system.background_work import Work, in_thread

LLAMA, OTHER = "llama-gqa", "marian"
CONFIG = EngineConfig(kv_cache_memory=4 << 20, block_size=4, device="cpu", dtype="float32")


def spec(kind: str, name: str = "", path: Path | None = None) -> ModelSpec:
    return ModelSpec(name or kind, str(path or saved(kind).path), CONFIG)


@pytest.fixture
def brake(monkeypatch: pytest.MonkeyPatch) -> Brake:
    return Brake(monkeypatch)


@asynccontextmanager
async def streaming(engine: AsyncEngine) -> AsyncIterator[None]:
    """Stream from `LLAMA` during the block, and check that its tokens stay the same."""
    alone = ids_of(await collect(engine.submit([request(LLAMA, "alone", 5, max_tokens=90)])), "alone")
    streamed = asyncio.create_task(collect(engine.submit([request(LLAMA, "streamed", 5, max_tokens=90)])))
    yield
    assert ids_of(await streamed, "streamed") == alone
    assert (engine.health().ready, engine.restarts) == (True, 0)


@async_test
async def test_a_model_is_loaded_beside_a_stream_and_unloaded(brake: Brake) -> None:
    brake.seconds = 0.002
    async with served(LLAMA) as engine, streaming(engine):
        for _ in range(2):  # the second time works like the first
            with pytest.raises(ModelNotLoadedError, match="no model named marian"):
                engine.check_room(OTHER)
            info = await engine.load(spec(OTHER), bytes_tokenizer())
            assert engine.models[OTHER] is info
            assert info.memory_bytes > info.weight_bytes
            outputs = await collect(engine.submit([request(OTHER, "new", 5)]))
            assert ends_of(outputs) == {("new", 0): FinishReason.LENGTH}
            assert text_of(outputs) == bytes_tokenizer().decode(ids_of(outputs, "new"))
            assert set(engine.demand()) == set(engine.stats()) == {LLAMA, OTHER}
            await engine.unload(OTHER)
            for names in (engine.models, engine.demand(), engine.stats()):
                assert set(names) == {LLAMA}
            with pytest.raises(ModelNotLoadedError):
                engine.submit([request(OTHER, "late", 5)])
            with pytest.raises(ModelNotLoadedError):
                await engine.unload(OTHER)
    await until(lambda: idle(engine))


@async_test
async def test_a_failed_load_changes_nothing(brake: Brake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    brake.seconds = 0.002
    broken = copied(OTHER, tmp_path / "broken")
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    async with served(LLAMA) as engine, streaming(engine):

        async def fails(error: type[Exception], match: str, spec: ModelSpec) -> Exception:
            with pytest.raises(error, match=match) as raised:
                await engine.load(spec, None)
            assert set(engine.models) == set(engine.stats()) == {LLAMA}
            return raised.value

        await fails(ConfigError, "llama-gqa is served already", spec(OTHER, LLAMA))
        await fails(ConfigError, "config.json", spec(OTHER, path=tmp_path))
        shortage = await fails(MemoryShortageError, "weights take", replace(spec(OTHER), memory=1 << 20))
        assert isinstance(shortage, MemoryShortageError) and shortage.available_bytes == 1 << 20
        await fails(MemoryShortageError, "weights take", replace(spec(OTHER), memory=0))

        made = list[weakref.ref[NativeLinear]]()
        reserve = NativeLinear.reserve

        def records(self: NativeLinear) -> None:
            if not self.arrays:  # else it is the stream's
                made.append(weakref.ref(self))
            reserve(self)

        def truncates(self: NativeLinear) -> None:
            if not self.arrays:
                weights.write_bytes(whole[: len(whole) // 2])  # its header was read before
            records(self)

        def raises(*arguments: Any) -> None:
            raise RuntimeError("secret detail of the fault")

        monkeypatch.setattr(NativeLinear, "reserve", truncates)
        await fails(ConfigError, "became shorter", spec(OTHER, path=broken))
        monkeypatch.setattr(NativeLinear, "reserve", records)
        for module, culprit in (
            (builder, "attach_native_stacks"),
            (generate_builder, "KVCache"),
            (builder, "describe_model"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(module, culprit, raises)
                error = await fails(LoadFailedError, "RuntimeError while marian was loaded", spec(OTHER))
                assert "secret" not in str(error)
        assert made
        assert not any(linear() for linear in made), "what was loaded in vain is still there"

        weights.write_bytes(whole)
        assert (await engine.load(spec(OTHER, path=broken), None)).name == OTHER


@async_test
async def test_unloading_waits_for_requests_and_ends_those_that_take_too_long(brake: Brake) -> None:
    async with served(LLAMA, OTHER, "bert") as engine:
        await collect(engine.submit([request(OTHER, "before", 4, max_tokens=2)]))  # until then it has had no requests
        brake.seconds = 0.005
        short = asyncio.create_task(collect(engine.submit([request(OTHER, "short", 4, max_tokens=8)])))
        await engine.unload(OTHER, drain_seconds=30.0)
        assert ends_of(await asyncio.wait_for(short, 60.0)) == {("short", 0): FinishReason.LENGTH}

        ready = threading.Event()
        brake.ready = ready.is_set
        stream = engine.submit([request(LLAMA, "long", 4, max_tokens=90, n=2)])
        encode = asyncio.create_task(engine.encode([EncodeRequest("e", LLAMA, token_source(prompt(5)))]))
        await asyncio.sleep(0.02)
        unloading = asyncio.create_task(engine.unload(LLAMA, drain_seconds=0.1))
        await asyncio.sleep(0.05)
        assert not unloading.done()
        assert set(engine.models) == {"bert"}
        again = asyncio.create_task(engine.load(spec(LLAMA), None))  # waits until the model is unloaded
        unloading.cancel()  # stops nothing
        outputs = await collect(stream)
        assert ends_of(outputs) == {("long", 0): FinishReason.CANCELLED, ("long", 1): FinishReason.CANCELLED}
        assert [output.finish_reason for output in await encode] == [FinishReason.CANCELLED]
        ready.set()
        assert (await again).name == LLAMA


def reloadable(engine: AsyncEngine, name: str) -> bool:
    return not any(name in names for names in (engine._table._loading, engine._table._unloading))


@async_test
async def test_a_load_that_is_cancelled_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    ended = list[BaseException]()

    def waits(spec: ModelSpec, *, idle: bool) -> Work[builder.LoadedModel]:
        begun.set()
        try:
            yield from in_thread(lambda: go_on.wait(60.0))
        except GeneratorExit as error:
            ended.append(error)
            raise
        return (yield from builder.loading(spec, idle=idle))

    monkeypatch.setattr(background_jobs, "loading", waits)
    async with served(LLAMA) as engine:
        loading = [asyncio.create_task(engine.load(spec(OTHER, name), None)) for name in ("first", "second", "third")]
        await until(begun.is_set)
        for task in loading[:2]:
            task.cancel()
        await asyncio.wait(loading[:2])
        again = asyncio.create_task(engine.load(spec(OTHER, "first"), None))  # starts after the cancelled load
        await asyncio.sleep(0.05)
        go_on.set()
        assert (await loading[2]).name == "third"
        assert len(ended) == 1, "the second had begun"
        assert (await again).name == "first"
        await until(lambda: reloadable(engine, "second"))
        assert set(engine.models) == {LLAMA, "third", "first"}


class Mortal(ThreadTransport):
    """A transport whose loop can be lost."""

    async def start(self, on_events: Callable[..., None], on_lost: Callable[[str], None]) -> None:
        self.lose = on_lost
        await super().start(on_events, on_lost)


@async_test
async def test_a_restarted_engine_has_what_was_loaded_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(async_engine, "_RESTART_SECONDS", (0.01,))
    go_on, slow = threading.Event(), "slow"

    def waits(spec: ModelSpec, *, idle: bool) -> Work[builder.LoadedModel]:
        if spec.name == slow:
            yield from in_thread(lambda: go_on.wait(60.0))
        return (yield from builder.loading(spec, idle=idle))

    monkeypatch.setattr(background_jobs, "loading", waits)
    gone = copied(OTHER, tmp_path / "gone")
    async with served(LLAMA, "bert", transport=Mortal) as engine:
        await engine.load(spec(OTHER), bytes_tokenizer())
        await engine.load(spec(OTHER, "vanished", gone), None)
        await engine.unload("bert")
        loading = asyncio.create_task(engine.load(spec(OTHER, slow), None))
        await asyncio.sleep(0.05)
        gone.rename(tmp_path / "elsewhere")
        transport = engine.transport
        assert isinstance(transport, Mortal)
        transport.lose("an accident")
        with pytest.raises(EngineDeadError, match="an accident"):
            await loading
        with pytest.raises(EngineGoneError):
            await engine.load(spec(OTHER, "refused"), None)
        go_on.set()
        await until(lambda: engine.health().ready)
        assert set(engine.models) == {LLAMA, OTHER}
        for name in engine.models:
            outputs = await collect(engine.submit([request(name, f"again {name}", 5)]))
            assert ends_of(outputs) == {(f"again {name}", 0): FinishReason.LENGTH}


@async_test
async def test_an_unload_during_a_restart_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "_RESTART_SECONDS", (0.01,))
    loops = list[EngineLoop]()
    init = EngineLoop.__init__

    def records(self: EngineLoop, *arguments: Any) -> None:
        loops.append(self)
        init(self, *arguments)

    monkeypatch.setattr(EngineLoop, "__init__", records)
    async with served(LLAMA, OTHER, transport=Mortal) as engine:
        transport = engine.transport
        assert isinstance(transport, Mortal)
        transport.lose("an accident")
        await until(lambda: len(loops) == 2)
        await engine.unload(OTHER)
        await until(lambda: engine.health().ready)
        await until(lambda: {model.name for model in loops[1].models} == {LLAMA})


@async_test
async def test_an_engine_begins_without_models() -> None:
    async with served() as engine:
        assert engine.health().ready
        assert engine.models == engine.stats() == {}
        await engine.load(spec(LLAMA), None)
        assert len(ids_of(await collect(engine.submit([request(LLAMA, "first", 5)])), "first")) == 12


@async_test
async def test_an_engine_can_be_closed_or_break_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "_RESTART_SECONDS", (0.01,))
    begun, signs = threading.Event(), list[Events]()  # signs of life
    on_events = AsyncEngine._on_events

    def counts(engine: AsyncEngine, events: Events) -> None:
        signs.append(events)
        on_events(engine, events)

    monkeypatch.setattr(AsyncEngine, "_on_events", counts)

    def never_ends(spec: ModelSpec, *, idle: bool) -> Work[builder.LoadedModel]:
        begun.set()
        while True:
            yield None

    monkeypatch.setattr(background_jobs, "loading", never_ends)
    monkeypatch.setattr(loop, "HEARTBEAT_SECONDS", 0.05)
    async with served(LLAMA) as engine:
        loading = asyncio.create_task(engine.load(spec(OTHER), None))
        await until(begun.is_set)
        signs.clear()
        await until(lambda: len(signs) >= 5)
        outputs = await collect(engine.submit([request(LLAMA, "streamed", 5)]))
        assert ends_of(outputs) == {("streamed", 0): FinishReason.LENGTH}
        with monkeypatch.context() as patch:

            def breaks(model: builder.LoadedModel) -> None:
                raise RuntimeError("secret detail of the fault")

            patch.setattr(builder.LoadedModel, "check", breaks)
            with pytest.raises(EngineDeadError, match="RuntimeError in the engine"):
                await loading
        await until(lambda: engine.health().ready)
        assert set(engine.models) == {LLAMA}
        begun.clear()
        loading = asyncio.create_task(engine.load(spec(OTHER), None))
        await until(begun.is_set)
    with pytest.raises(EngineDeadError, match="shut down"):
        await loading


def test_parts_of_a_job_take_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, parts = 0.0, list[float]()  # when they began
    monkeypatch.setattr(background_jobs, "time", SimpleNamespace(monotonic=lambda: now))

    def loading(spec: ModelSpec, *, idle: bool) -> Work[None]:
        nonlocal now
        for _ in range(10):
            parts.append(now)
            now += 0.004
            yield None

    monkeypatch.setattr(background_jobs, "loading", loading)
    jobs = background_jobs.BackgroundJobs()
    jobs.add(background_jobs.LoadJob(spec(LLAMA)))
    while len(parts) < 8:
        now += 0.002
        assert not list(jobs.run(0.002))
    assert min(after - before for before, after in pairwise(parts)) >= 0.004 / background_jobs.SHARE
    while not (ended := list(jobs.run(None))):
        assert jobs.timeout(1.0) == 0.0
    assert [job.name for job in ended] == [LLAMA] and jobs.timeout(1.0) == 1.0


@pytest.mark.slow
@pytest.mark.alone
@async_test
async def test_streams_are_slowed_down_by_no_more_than_half_while_a_model_loads(tmp_path: Path) -> None:
    """Check that the 99th percentile of the time between tokens at most doubles during the load."""
    folder = sparse_checkpoint(tmp_path / "large", qwen3(1024, 3072, 16, 16, tied=True))
    large = ModelSpec("large", str(folder), EngineConfig(device="cpu", quantization="int8"))
    code = ModelSpec("code", str(embedded_models()["code"]), EngineConfig(device="cpu"))
    engine = AsyncEngine([code], ProcessTransport, {})
    await engine.start()
    gaps = list[float]()

    async def streams(number: int) -> None:
        for again in count():
            params = SamplingParams(max_tokens=200, ignore_eos=True)
            one = Request(f"{number}-{again}", "code", prompt(8), params, arrival_time=time.monotonic())
            last = None
            async for _ in engine.submit([one]):
                now = time.monotonic()
                gaps.extend([now - last] if last is not None else [])
                last = now

    tasks = [asyncio.create_task(streams(number)) for number in range(8)]
    try:
        ratios = list[float]()
        (folder / "model.safetensors").read_bytes()  # the first read fills the holes of a sparse file
        await asyncio.sleep(1.0)
        for _ in range(5):
            gaps.clear()
            await asyncio.sleep(3.0)
            alone = quantiles(gaps, n=100)[-1]
            gaps.clear()
            await engine.load(large, None)
            ratios.append(quantiles(gaps, n=100)[-1] / alone)
            await engine.unload("large")
        print(f"p99 between tokens while loading, over p99 without: {[round(ratio, 2) for ratio in ratios]}")
        assert median(ratios) <= 2.0
    finally:
        for task in tasks:
            task.cancel()
        await engine.close()
