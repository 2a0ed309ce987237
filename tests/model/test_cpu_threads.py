"""How many threads compute: the operator's choice, else what affinity and control groups allow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.model.errors import ConfigError
from triptych.model.system import cpu_threads
from triptych.model.system.child_process import engine_environment
from triptych.service.runtimes.ray_serve.replica_cpus import threads_of_replica, with_threads
from triptych.service.settings.parsers import replicas
from triptych.service.settings.resolve import resolve_config
from triptych.service.settings.serve_config import ServeConfig


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of four processors whose control groups set no limit."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 5})
    monkeypatch.setattr(cpu_threads, "cpu_quota", lambda: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3.0),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/of/the/host\n", {"cpu.max": "200000 100000\n"}, 2.0),  # a container that sees its group as the root
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "50000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 0.5),
        ("3:cpu:/host\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("0::/\n", {"cpu.max": "nonsense\n"}, None),
        (None, {}, None),
    ],
)
def test_the_quota_is_the_least_of_all_groups(
    own: str | None, files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    placed = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (placed | ({"proc/self/cgroup": own} if own is not None else {})).items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    assert cpu_threads.cpu_quota(tmp_path) == expected


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("variable", "quota", "expected"),
    [
        (None, None, 4),
        (None, 2.5, 2),
        (None, 0.5, 1),
        (None, 64.0, 4),
        ("3", 2.0, 3),  # the operator's choice
        ("3,2", None, 3),
        ("0", None, 4),
        ("none", 2.0, 2),
        ("", None, 4),
    ],
)
def test_engines_get_the_chosen_threads(
    variable: str | None, quota: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_threads, "cpu_quota", lambda: quota)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert engine_environment()["OMP_NUM_THREADS"] == str(expected)


def test_torch_computes_with_the_chosen_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # MKL allows no more than the cores of a machine
    program = "import json, torch; print(json.dumps(torch.get_num_threads()))"
    command = [sys.executable, "-c", program]
    assert json.loads(subprocess.run(command, env=engine_environment(), capture_output=True, check=True).stdout) == 1


def config(**settings: object) -> ServeConfig:
    return resolve_config({"a": {"path": "/a"}}, settings)


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("settings", "variable", "expected"),
    [
        ({}, None, None),  # a single replica finds its CPUs itself
        ({"replicas": replicas("2")}, None, 2),
        ({"replicas": replicas("1-3")}, None, 1),
        ({"replicas": replicas("9")}, None, 1),
        ({"replicas": replicas("2"), "threads": 4}, None, 4),
        ({"replicas": replicas("2")}, "3", 3),
        ({"replicas": replicas("2")}, "", 2),  # no number: the variable says nothing
        ({"replicas": replicas("2")}, "0", 2),
        ({"replicas": replicas("2")}, "all", 2),
        ({}, "3", 3),
        ({}, "", None),
    ],
)
def test_replicas_of_one_machine_divide_its_cpus(
    settings: dict[str, object], variable: str | None, expected: int | None
) -> None:
    environment = {} if variable is None else {"OMP_NUM_THREADS": variable}
    assert with_threads(config(**settings), environment, on_gpus=False).settings.threads == expected


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("threads", "assigned", "variable", "expected"),
    [
        (None, 0.0, "1", 4),  # 1 is Ray's value for an actor without CPUs
        (None, 2.0, "2", 2),
        (None, 2.0, "8", 2),
        (None, 2.5, "2", 2),
        (None, 0.5, "1", 1),
        (None, 0.0, "8", 8),
        (3, 2.0, "2", 3),
    ],
)
def test_a_replica_computes_with_its_cpus(threads: int | None, assigned: float, variable: str, expected: int) -> None:
    assert threads_of_replica(threads, assigned, {"OMP_NUM_THREADS": variable}) == expected


def test_one_replica_a_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_threads, "_NODES", tmp_path)
    assert replicas("auto") == {"min_replicas": 1, "max_replicas": 1}
    for node, cpus in enumerate(("0-1,4", "2,3", "5-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 2, 3})
    assert replicas("auto") == {"min_replicas": 2, "max_replicas": 2}


def test_bad_numbers_of_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads must be 1 to 1024, found 0"):
        config(threads=0)
