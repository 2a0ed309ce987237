"""Weights are packed in a separate process, which leaves no trace however it ends."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.digests import digest
from tests.model.checkpoints import copied, saved
from triptych.model.api.engine_config import AUTO_CACHE, EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.checkpoint import content
from triptych.model.checkpoint.weights_cache import WeightsCache
from triptych.model.engine import packing
from triptych.model.engine.builder import load
from triptych.model.engine.packing import PackOrder, Part, open_cache
from triptych.model.errors import ConfigError, EngineDeadError
from triptych.model.system.child_process import start_child

KIND = "llama-gqa"
CONFIG = EngineConfig(device="cpu", dtype="float32", kv_cache_memory=1 << 20)


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SMALL_BYTES", 0)
    monkeypatch.setattr(content, "_SETTLED_SECONDS", 0.0)


def spec(path: Path | None = None, **settings: Any) -> ModelSpec:
    return ModelSpec("m", str(path or saved(KIND).path), replace(CONFIG, **settings))


def descriptors() -> set[tuple[str, str]]:
    """Return the open descriptors and their targets."""
    gc.collect()  # objects of earlier tests may hold descriptors
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder's own
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def test_a_child_packs_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "quantization": "int8"}
    path, cached = saved(KIND).path, {**settings, "weights_cache": str(tmp_path / "cache")}
    with monkeypatch.context() as patch:
        patch.setattr(packing, "SMALL_BYTES", 1 << 30)
        expected = digest(KIND, path, settings)
    before = descriptors()
    assert digest(KIND, path, settings) == digest(KIND, path, cached) == expected
    assert descriptors() <= before
    (file,) = (tmp_path / "cache").glob("*.weights")
    monkeypatch.setattr(packing, "start_child", lambda *_, **__: pytest.fail("the second start packs"))
    assert digest(KIND, path, cached) == expected
    assert load(spec(**cached)).info.weights_cache == "mapped" and file.exists()


def test_a_broken_checkpoint_has_the_error_that_it_has_in_this_process(tmp_path: Path) -> None:
    broken = copied(KIND, tmp_path)
    weights = next(broken.glob("*.safetensors"))
    start_child = packing.start_child

    def truncating(*given: Any, **named: Any) -> subprocess.Popen[bytes]:
        os.truncate(weights, weights.stat().st_size // 2)  # the header was read before
        return start_child(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "start_child", truncating)
        with pytest.raises(ConfigError, match=r"^m: .*safetensors") as raised:
            load(spec(broken))
    assert "\n" not in str(raised.value)


def instead(patch: pytest.MonkeyPatch, program: str) -> list[subprocess.Popen[bytes]]:
    """Start another program in place of the one that packs a model."""
    started = list[subprocess.Popen[bytes]]()

    def start(module: str, *arguments: int, descriptors: list[int]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", program, *map(str, arguments)]
        started.append(subprocess.Popen(command, pass_fds=descriptors))
        return started[-1]

    patch.setattr(packing, "start_child", start)
    return started


WRITES = "import os, pathlib, sys; pathlib.Path(r'{folder}', f'x.{{os.getpid()}}.new').touch();"
ENDS: dict[str, tuple[str, str]] = {
    "killed": ("os.kill(os.getpid(), 9)", r"ended by signal SIGKILL: there may be too little memory"),
    "ended": ("sys.exit(3)", "ended with exit code 3"),
    "told": (
        "import socket, struct, msgspec; s = socket.socket(fileno=int(sys.argv[1])); s.recv(10000);"
        "m = msgspec.msgpack.encode({{'failure': 'error', 'message': 'KeyError; the log says why'}});"
        "s.send(struct.pack('<I', len(m)) + m)",
        "m: its weights could not be packed: KeyError; the log says why",
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_child_that_fails_leaves_nothing(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, before = tmp_path / "cache", descriptors()
    program, message = ENDS[end]
    started = instead(monkeypatch, (WRITES + program).format(folder=cache))
    with pytest.raises(EngineDeadError, match=message):
        load(spec(weights_cache=str(cache)))
    assert started[0].poll() is not None
    assert not list(cache.glob("*.new")) and descriptors() <= before


def test_a_file_of_something_else_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    instead(
        monkeypatch,
        "import os, sys, socket, struct, msgspec; s = socket.socket(fileno=int(sys.argv[1])); s.recv(10000);"
        "m = msgspec.msgpack.encode({}); s.send(struct.pack('<I', len(m)) + m);"
        "socket.send_fds(s, [b'0'], [os.open('/etc/passwd', os.O_RDONLY)])",
    )
    with pytest.raises(ConfigError, match="cannot be mapped: the file is not a file of packed weights"):
        load(spec())


def test_a_load_that_is_given_up_ends_its_child(monkeypatch: pytest.MonkeyPatch) -> None:
    started = instead(monkeypatch, "import time; time.sleep(60)")
    packed = packing.packed_weights(packing_plan(), Part.MODEL)
    assert packed is not None
    child = packing._Child(PackOrder(spec(), Part.MODEL, 1, False, logging.INFO), packed)
    threading.Timer(0.3, child.stop).start()
    began = time.monotonic()
    with pytest.raises(EngineDeadError):
        child.run()
    assert time.monotonic() - began < 30.0
    assert started[0].poll() == -signal.SIGKILL
    child.stop()  # a second stop does nothing


def packing_plan() -> Any:
    from triptych.model.engine.network_plan import plan_network

    return plan_network(spec())


def test_a_child_ends_with_the_engine_while_it_waits_for_another(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path / "cache")
    order = PackOrder(spec(weights_cache=str(cache.folder)), Part.MODEL, 1, False, logging.INFO)
    ours, theirs = socket.socketpair()
    with cache.locked(), theirs:
        process = start_child("triptych.model.pack", theirs.fileno(), descriptors=[theirs.fileno()])
        theirs.close()
        frame = msgspec.msgpack.encode(order)
        ours.sendall(len(frame).to_bytes(4, "little") + frame)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(4.0)
        ours.close()
        assert process.wait(30.0) == 1


@pytest.mark.parametrize(
    ("refuse", "said"),
    [
        (lambda folder: folder.chmod(0o777), "may be written by others"),
        (lambda folder: (folder.rmdir(), folder.touch()), "it is no folder"),
    ],
    ids=["others may write", "no folder"],
)
def test_the_users_cache_is_left_out_where_it_cannot_be_used(
    refuse: Callable[[Path], object],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = EngineConfig(weights_cache=AUTO_CACHE)
    cache = open_cache(engine)
    assert cache is not None and cache.folder == tmp_path / "triptych" / "weights" and cache.max_bytes == 32 << 30
    refuse(cache.folder)
    with caplog.at_level(logging.INFO):
        assert open_cache(engine) is None
    assert said in caplog.text
    with pytest.raises(ConfigError, match=said):
        open_cache(EngineConfig(weights_cache=str(cache.folder)))
