"""Which CPUs a replica and its threads compute on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.test_native import needs_native
from triptych.model.system import cpu_sets, cpu_threads
from triptych.service.runtimes.ray_serve import replica_cpus


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two sockets of two caches of four threads: CPU n and n + 8 are one core; CPUs 0-3 and 8-11 are node 0."""
    for cpu in range(16):
        core, folder = cpu % 8, tmp_path / f"cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology" / "thread_siblings_list").write_text(f"{core},{core + 8}\n")
        (folder / f"node{core // 4}").mkdir()
        first = core // 2 * 2
        last = f"{first}-{first + 1},{first + 8}-{first + 9}"
        for index, level, shared in ((0, 1, f"{core},{core + 8}"), (3, 3, last)):
            cache = folder / "cache" / f"index{index}"
            cache.mkdir(parents=True)
            (cache / "level").write_text(f"{level}\n")
            (cache / "shared_cpu_list").write_text(f"{shared}\n")
    monkeypatch.setattr(cpu_sets, "_CPUS", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("count", "free", "expected"),
    [
        (2, range(16), [0, 8]),  # a whole core
        (4, range(16), [0, 1, 8, 9]),  # a cache
        (8, range(16), [0, 1, 2, 3, 8, 9, 10, 11]),  # a socket
        (8, {1, 2, 3, *range(4, 8), *range(9, 16)}, [4, 5, 6, 7, 12, 13, 14, 15]),
        (4, {1, 9, 2, 3, 10, 11}, [2, 3, 10, 11]),
        (2, {1, 9, 2, 3, 10, 11}, [1, 9]),  # what is left of a cache, so that the whole one stays for another
        (12, range(16), [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]),
        (5, {0, 1, 2}, []),
    ],
)
def test_cpus_that_share_a_cache_are_chosen(count: int, free: set[int], expected: list[int]) -> None:
    assert cpu_sets.choose(count, cpu_sets.groups(set(free))) == expected


@pytest.mark.usefixtures("machine")
def test_replicas_claim_cpus_that_no_other_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_sets, "_NAME", f"\0test-{os.getpid()}-")
    found = [cpu_sets.claim(4, range(16)) for _ in range(5)]
    assert [len(cpus) for cpus, _ in found] == [4, 4, 4, 4, 0]
    assert sorted(cpu for cpus, _ in found for cpu in cpus) == list(range(16))
    for one in found[2][1]:  # its process ends
        one.close()
    assert cpu_sets.claim(4, range(16))[0] == found[2][0]
    for _, held in found:
        for one in held:
            one.close()


@pytest.mark.parametrize(
    ("binding", "threads", "quota", "bound"),
    [
        ("auto", 1, None, True),
        ("threads", 1, None, True),
        ("off", 1, None, False),
        ("auto", 4, None, False),  # all of them
        ("auto", 1, 2.0, False),  # other containers may have any of them
        ("auto", 1, 4.0, True),
    ],
)
def test_a_replica_names_its_cpus(
    binding: str, threads: int, quota: float | None, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_sets, "_NAME", f"\0test-{os.getpid()}-")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(replica_cpus, "cpu_quota", lambda: quota)
    for name in (cpu_sets.VARIABLE, cpu_sets.THREADS_VARIABLE):
        monkeypatch.setenv(name, "")
    held = replica_cpus.bind(binding, threads)
    for one in held:
        one.close()
    assert bool(held) == bound == bool(cpu_threads.cpu_list(os.environ[cpu_sets.VARIABLE]))
    assert (os.environ[cpu_sets.THREADS_VARIABLE] == "1") == (binding == "threads")


def test_replicas_find_no_cpu_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(replica_cpus, "cpu_quota", lambda: None)
    monkeypatch.setattr(cpu_sets, "_bound", lambda name: None)
    monkeypatch.setattr(cpu_sets, "_TURN_SECONDS", 0.0)
    assert replica_cpus.bind("auto", 1) == []
    assert "this one has none of its own" in caplog.text


def test_lists_of_cpus() -> None:
    assert cpu_sets.shown([8, 0, 1, 2, 10, 11]) == "0-2,8,10-11"
    assert cpu_threads.cpu_list("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert cpu_threads.cpu_list("0-x") == set() == cpu_threads.cpu_list("")


def test_a_process_runs_on_the_cpus_that_its_environment_names() -> None:
    last = max(os.sched_getaffinity(0))
    program = "import os; from triptych.model.system.cpu_sets import bind_process as b; b(os.environ); "
    program += "import json; print(json.dumps(list(os.sched_getaffinity(0))))"
    for named, expected in ((str(last), [last]), ("", None), ("4095", None), ("nonsense", None)):
        environment = os.environ | {cpu_sets.VARIABLE: named}
        ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        assert json.loads(ran.stdout) == (expected or sorted(os.sched_getaffinity(0)))


@needs_native
@pytest.mark.parametrize("wanted", ["1", "0"])
def test_each_thread_has_a_cpu_of_its_own_if_that_is_asked_for(wanted: str) -> None:
    program = """
import json, os, torch
from pathlib import Path
from triptych.model.linear.native import packed_linear
from triptych.model.native import library
library.LARGE = 0
torch.set_num_threads(2)
packed, x = packed_linear(library.native(), torch.ones(70, 64), None), torch.ones(5, 64)
assert torch.equal(packed(x), packed(x))
tasks = [int(path.name) for path in Path("/proc/self/task").iterdir()]
print(json.dumps([sorted(os.sched_getaffinity(0)), *(sorted(os.sched_getaffinity(task)) for task in tasks)]))
"""
    environment = os.environ | {cpu_sets.THREADS_VARIABLE: wanted}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True)
    main, *threads = json.loads(ran.stdout)
    every = sorted(os.sched_getaffinity(0))
    assert main == every
    assert threads.count(every[1:2]) == (wanted == "1" and len(every) > 1)
