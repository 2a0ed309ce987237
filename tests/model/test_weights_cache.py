"""The weights cache maps exactly the bits that packing gives, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.digests import FORMATS, digest
from tests.model.checkpoints import contents, native_backends, saved
from tests.model.sparse import QWEN3_4B, sparse_checkpoint
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint import content, packed_file
from triptych.model.checkpoint.content import content_digest
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.weights_cache import WeightsCache
from triptych.model.linear.factory import LinearFactory
from triptych.model.native.library import Library
from triptych.model.network import packed_weights
from triptych.model.network.packed_weights import PackedWeights
from triptych.model.network.weights import load_model
from triptych.model.system.host_memory import available_memory
from triptych.model.system.mapped_file import MappedFile

needs_native = pytest.mark.skipif(not native_backends(), reason="there is no GCC here")
KIND = "llama-gqa"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat checkpoints that were just written as old ones."""
    monkeypatch.setattr(content, "_SETTLED_SECONDS", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def packed(
    folder: Path, checkpoint: Path, linear: LinearFactory | None = None, size: int | None = None
) -> PackedWeights:
    return PackedWeights(
        WeightsCache(folder, size), read_checkpoint(checkpoint), SdpaBackend(), linear or LinearFactory()
    )


def started(folder: Path, checkpoint: Path, linear: LinearFactory | None = None, size: int | None = None) -> str:
    """Return the cache's outcome at a start."""
    weights = packed(folder, checkpoint, linear, size)
    weights.load()
    return weights.outcome


def assert_loads(weights: PackedWeights, checkpoint: Path) -> None:
    """Assert that the weights are those that a start without a cache has."""
    found = contents(weights.load())
    expected = contents(load_model(read_checkpoint(checkpoint), SdpaBackend(), weights.network.linear))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.weights"))


def library() -> Library:
    found = native_backends()[0].library
    assert isinstance(found, Library)
    return found


@needs_native
@pytest.mark.parametrize("kind", ["gpt2", pytest.param("gpt-neox", marks=pytest.mark.slow), "marian", "albert"])
def test_a_mapped_model_computes_the_same_bits(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("float32", "bfloat16", "int8", "torch"):
        settings: dict[str, Any] = {**FORMATS[name], "weights_cache": str(folder)}
        expected = digest(kind, saved(kind).path, FORMATS[name])
        assert expected is not None
        assert digest(kind, saved(kind).path, settings) == expected, name
        with monkeypatch.context() as patch:
            patch.setattr(packed_weights, "fill_weights", lambda *_: pytest.fail("the second start packed"))
            assert digest(kind, saved(kind).path, settings) == expected, name
    assert len(files(folder)) == 4


@needs_native
def test_the_plan_counts_what_is_there_once(folder: Path) -> None:
    checkpoint = saved(KIND).path
    first = packed(folder, checkpoint)
    assert (first.is_found, first.resident, first.others_in_use) == (False, 0, 0)
    first.load()
    size = files(folder)[0].stat().st_size
    second = packed(folder, checkpoint)
    assert (second.is_found, second.resident, second.others_in_use) == (True, size, 0)
    other = packed(folder, checkpoint, LinearFactory(torch.bfloat16))
    assert (other.is_found, other.others_in_use) == (False, size)
    del first, second
    assert other.others_in_use == 0  # no process has it mapped any more


def test_a_tokens_table_enters_memory_row_by_row(tmp_path: Path) -> None:
    path, size = tmp_path / "weights", 8 << 20
    path.write_bytes(bytes(size))

    def resident() -> int:
        """Return the KiB of the file that are in this process's memory."""
        parts = Path("/proc/self/smaps").read_text().split(str(path))[1:]
        return sum(int(part.split("Rss:")[1].split()[0]) for part in parts)

    with path.open("rb") as file:
        mapped = MappedFile(file.fileno(), size)
    mapped.read_ahead([range((2 << 20) + 5, 7 << 20)])
    assert resident() in (0, 3 << 10, (3 << 10) + 4)  # 0: an older kernel
    assert int(mapped.tensor(6 << 20, 1)) == 0
    assert resident() <= 4 << 10


def test_mapped_file_cache_is_not_available(tmp_path: Path) -> None:
    cgroup, meminfo = tmp_path / "sys/fs/cgroup", tmp_path / "proc/meminfo"
    meminfo.parent.mkdir()
    meminfo.write_text("MemAvailable:  1000 kB\n")
    assert available_memory(tmp_path, mapped=400 * 1024) == 600 * 1024
    cgroup.mkdir(parents=True)
    for name, text in {
        "memory.max": "500000",
        "memory.current": "450000",
        "memory.stat": "inactive_file 100000",
    }.items():
        (cgroup / name).write_text(text)
    assert available_memory(tmp_path, mapped=30_000) == 120_000
    assert available_memory(tmp_path, mapped=300_000) == 50_000  # of another group, or not counted as inactive


def test_of_processes_that_start_together_one_packs(folder: Path) -> None:
    waiting = [packed(folder, saved(KIND).path) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(PackedWeights.load, waiting))
    assert sorted(weights.outcome for weights in waiting) == ["mapped", "mapped", "written"]
    places = {weights.network.get_parameter("tokens.weight").data_ptr() for weights in waiting}
    assert len(places) == 3  # mappings of one file
    assert len(files(folder)) == 1


def test_what_was_used_longest_ago_makes_room(folder: Path, tmp_path: Path) -> None:
    started(folder, saved(KIND).path)
    size = files(folder)[0].stat().st_size
    kinds = ("llama", "llama-bias", "qwen2")
    started(folder, saved(kinds[0]).path)
    for number, file in enumerate(files(folder)):
        os.utime(file, (number, number))
    used = packed(folder, saved(KIND).path)  # now
    for kind in kinds[1:]:
        assert started(folder, saved(kind).path, size=3 * size) == "written"
    assert used.is_found
    assert started(folder, saved(KIND).path) == "mapped"
    assert started(folder, saved(kinds[2]).path) == "mapped"
    assert sum(file.stat().st_size for file in files(folder)) <= 3 * size
    assert len(list(folder.glob("*.content"))) == len(files(folder))


def test_what_is_mapped_is_not_removed_to_make_room(folder: Path) -> None:
    used = packed(folder, saved(KIND).path)
    used.load()
    size = files(folder)[0].stat().st_size
    most = 2 * size - packed_file.ALIGNMENT
    outcome = started(folder, saved("llama").path, size=most)
    assert outcome == "not kept: [Errno 27] the files that are in use leave no room within weights_cache_size"
    del used
    assert started(folder, saved("llama").path, size=most) == "written"
    assert len(files(folder)) == 1


_START = """
import sys, time
from triptych.model.api.messages import ModelSpec
from triptych.model.engine.builder import load

settings = EngineConfig(quantization="int8", device="cpu", weights_cache=sys.argv[2], kv_cache_memory=256 << 20)
info = load(ModelSpec("m", sys.argv[1], settings)).info
sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in open("/proc/self/smaps_rollup") if "kB" in line}
print(info.weights_cache, info.weight_bytes, sizes["Pss:"], flush=True)
sys.stdin.read()
"""


@contextmanager
def starting(folder: Path, checkpoint: Path) -> Iterator[tuple[str, int, int]]:
    """Yield a process that has loaded the model: the cache's outcome, its bytes of weights, and its share of memory."""
    command = [sys.executable, "-c", _START, str(checkpoint), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            outcome, weights, share = process.stdout.readline().split()
            yield outcome, int(weights), int(share)
        finally:
            process.stdin.close()


@needs_native
@pytest.mark.slow
@pytest.mark.alone
def test_four_billion_start_in_three_seconds_and_are_shared(folder: Path, tmp_path: Path) -> None:
    if available_memory() < 8e9 or shutil.disk_usage(tmp_path).free < 8e9:
        pytest.skip("less than 8 GB of memory or disk are free")
    checkpoint = sparse_checkpoint(tmp_path / "model", QWEN3_4B)
    with starting(folder, checkpoint) as (outcome, weights, _):
        assert outcome == "written"
    with starting(folder, checkpoint) as (_, _, alone):
        began = time.monotonic()
        with starting(folder, checkpoint) as (outcome, _, shared):
            seconds = time.monotonic() - began
            assert outcome == "mapped"
            assert alone > weights
            assert shared < 0.5 * weights + (alone - weights) + (64 << 20)
    assert seconds < 3.0


def test_digests_do_not_depend_on_threads_and_see_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_PIECE", 1000)
    paths = [tmp_path / "1", tmp_path / "2"]
    paths[0].write_bytes(bytes(2500))
    paths[1].write_bytes(bytes(500))
    found = content_digest(paths, 1)
    assert content_digest(paths, 3) == found
    paths[0].write_bytes(bytes(2499) + b"1")
    assert content_digest(paths, 2) != found
    paths[0].write_bytes(bytes(2000))
    paths[1].write_bytes(bytes(1000))  # the same bytes in all
    assert content_digest(paths, 2) != found
