"""Unloading a model frees its memory, its ranks, and all its objects without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.front import async_test, collect, ids_of, served
from tests.engine.support import request
from tests.engine.test_models_come_and_go import CONFIG, LLAMA, OTHER, spec
from tests.engine.test_process_transport import is_alive
from tests.model.checkpoints import saved
from tests.model.sparse import qwen3, sparse_checkpoint
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.client.process_transport import ProcessTransport
from triptych.model.engine import builder
from triptych.model.errors import LoadFailedError
from triptych.model.parallel.rank_processes import RankProcesses


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
@async_test
async def test_unloading_gives_the_memory_back(times: int, tmp_path: Path) -> None:
    """Check the engine process's memory, as the system counts it."""
    folder = sparse_checkpoint(tmp_path / "large", qwen3(512, 1536, 4, 8, vocab=32_000, tied=True))
    large = ModelSpec("large", str(folder), EngineConfig(device="cpu", dtype="float32", kv_cache_memory=64 << 20))
    async with served(LLAMA, transport=ProcessTransport) as engine:
        transport = engine.transport
        assert isinstance(transport, ProcessTransport) and transport.pid is not None
        first = None
        for number in range(times):
            before = resident(transport.pid)
            info = await engine.load(large, None)
            await collect(engine.submit([replace(request(LLAMA, f"r{number}", 40), model="large")]))
            loaded = resident(transport.pid)
            assert loaded - before > 0.8 * (info.weight_bytes + (64 << 20))  # few rows of a table
            await engine.unload("large")
            after = resident(transport.pid)
            assert loaded - after >= 0.95 * (loaded - before)
            first = first or after
            assert after - first < 8 << 20, f"after {number} times more is left"
        await engine.unload(LLAMA)
        assert engine.models == {}


def resident(pid: int) -> int:
    """Return the bytes of memory that a process uses, including mapped weights."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Rss:"))


@async_test
async def test_the_ranks_of_a_model_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = list[int]()
    connect = RankProcesses.connect

    def connects(self: RankProcesses) -> list[tuple[int, int]]:
        pids.extend(self.pids)
        return connect(self)

    monkeypatch.setattr(RankProcesses, "connect", connects)
    split = ModelSpec(LLAMA, str(saved(LLAMA).path), replace(CONFIG, tensor_parallel_size=2))
    async with served("bert") as engine:
        with monkeypatch.context() as patch:
            patch.setattr(builder, "describe_model", lambda *arguments: 1 / 0)
            with pytest.raises(LoadFailedError, match="ZeroDivisionError"):
                await engine.load(split, None)
        assert not any(map(is_alive, pids))
        await engine.load(split, None)
        assert len(ids_of(await collect(engine.submit([request(LLAMA, "split", 5)])), "split")) == 12
        assert len(pids) == 2 and is_alive(pids[1])
        await engine.unload(LLAMA)
        assert not is_alive(pids[1])


@pytest.mark.parametrize("kind", [LLAMA, OTHER, "bert", "xlnet"])
def test_a_closed_model_is_freed_without_the_garbage_collector(kind: str) -> None:
    """Check models that are exempt from collection, as in the engine process."""
    model = builder.load(spec(kind))
    found = [weakref.ref(model.encode.model), weakref.ref(model.encode)]
    if model.generate is not None:
        found += [weakref.ref(model.generate), weakref.ref(model.generate.runner.cache)]  # type: ignore[attr-defined]
    gc.disable()
    try:
        model.close()
        del model
        assert not any(one() for one in found)
    finally:
        gc.enable()
