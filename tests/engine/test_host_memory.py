"""The host memory available to a process, on a machine and in a container."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from triptych.model.api.engine_config import EngineConfig
from triptych.model.cache.kv_cache import promised_memory
from triptych.model.engine import builder
from triptych.model.engine.execution.model_runner import ModelRunner
from triptych.model.llm import LLM
from triptych.model.system.host_memory import available_memory

MACHINE = {"proc/meminfo": "MemTotal:       1000 kB\nMemFree:          50 kB\nMemAvailable:    600 kB\n"}
NEW = {
    "sys/fs/cgroup/memory.max": "300000\n",
    "sys/fs/cgroup/memory.current": "250000\n",
    "sys/fs/cgroup/memory.stat": "anon 100000\nfile 150000\ninactive_file 140000\n",
}
OLD = {
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "200000",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "150000",
    "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 20000\n",
}
UNIT = {  # a unit of systemd, in a slice that has a limit too
    "proc/self/cgroup": "0::/a.slice/b.service\n",
    "sys/fs/cgroup/a.slice/memory.max": "90000\n",
    "sys/fs/cgroup/a.slice/memory.current": "50000\n",
    "sys/fs/cgroup/a.slice/b.service/memory.max": "80000\n",
    "sys/fs/cgroup/a.slice/b.service/memory.current": "30000\n",
}
OLD_UNIT = {
    "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n",
    **{name.replace("memory/", "memory/box/"): text for name, text in OLD.items()},
}


def written(files: dict[str, str], root: Path) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MACHINE, 600 * 1024),  # cached files do not count as in use
        (MACHINE | NEW, 190_000),
        (MACHINE | OLD, 70_000),
        (MACHINE | NEW | {"sys/fs/cgroup/memory.max": "max\n"}, 600 * 1024),
        (MACHINE | OLD | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, 600 * 1024),
        (MACHINE | NEW | {"sys/fs/cgroup/memory.current": "500000"}, 0),
        (MACHINE | UNIT, 40_000),
        (MACHINE | NEW | {"proc/self/cgroup": "0::/seen/from/outside\n"}, 190_000),
        (MACHINE | OLD_UNIT, 70_000),
    ],
)
def test_minimum_of_machine_and_control_groups(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert available_memory(written(files, tmp_path)) == expected


def test_of_this_machine_and_without_any_of_these_files(tmp_path: Path) -> None:
    assert available_memory() > 1 << 20
    assert available_memory(tmp_path) > 1 << 20


@pytest.mark.parametrize("asked", [None, 32 << 20])
def test_a_default_kv_pool_takes_memory_as_it_is_used(asked: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that was asked for is taken at load. What is promised is not given to the model that is loaded next."""
    gc.collect()  # engines of other tests: freed in the middle of this one, their memory would be counted as free
    others = promised_memory()  # to engines of other tests that have not ended
    monkeypatch.setattr(builder, "available_memory", lambda **given: others + (400 << 20))
    with LLM("code", EngineConfig(kv_cache_memory=asked)) as llm:
        runner = llm._generate.runner  # type: ignore[union-attr]
        assert isinstance(runner, ModelRunner)
        cache, before = runner.cache, runner.cache.promised
        if asked is not None:
            assert before == 0
            return
        assert before > 0.6 * cache.nbytes and promised_memory() >= before
        with LLM("code") as second:
            assert llm.info.memory_bytes - before // 3 < second.info.memory_bytes < llm.info.memory_bytes - before // 5
        cache.commit()
        assert cache.promised == 0
