"""The service over a model of two ranks, under each runtime: one rank's answers, and no process left."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from tests import checkpoints
from tests.engine.test_process_transport import is_alive
from tests.service.processes import ServiceProcess, eventually, running
from triptych.model.engine.builder import load
from triptych.model.errors import ConfigError
from triptych.service.settings import sources
from triptych.service.settings.resolve import resolve_config

EXACT = ["--device", "cpu", "--dtype", "float32", "--attention-backend", "sdpa"]


def reply(service: ServiceProcess) -> tuple[str, list[float]]:
    """A text and a vector."""
    body = {"model": "gen", "prompt": "def add(", "max_tokens": 24, "temperature": 0}
    text = httpx.post(f"{service.url}/generate", json=body, timeout=60).json()["choices"][0]["text"]
    encoded = httpx.post(f"{service.url}/encode", json={"model": "gen", "input": "def add("}, timeout=60).json()
    return text, encoded["data"][0]["embedding"]


@pytest.mark.slow
def test_two_ranks_under_each_runtime(tmp_path: Path) -> None:
    model = f"gen={checkpoints.llama(tmp_path / 'llama')}"
    with running([model, *EXACT, "--runtime", "local"]) as service:
        text, vector = reply(service)
        assert text
    for runtime in ("local", "ray"):
        with running([model, *EXACT, "--runtime", runtime, "--tensor-parallel-size", "2"]) as service:
            assert "each of 2 ranks from cpu on" in service.output
            (info,) = httpx.get(f"{service.url}/info").json()["models"]
            assert info["tensor_parallel_size"] == 2
            assert reply(service)[0] == text
            assert reply(service)[1] == pytest.approx(vector, rel=1e-4, abs=1e-5)
            started = service.descendants()
            assert sum("triptych.model.engine.rank_main" in line for line in started.values()) == 1
            service.signal(signal.SIGTERM)
            assert service.wait() == 0, service.output
            eventually(lambda pids=list(started): not any(map(is_alive, pids)), 10.0)  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "visible"),
    [
        (["--replicas", "2"], ["0", "1"]),
        (["--replicas", "2", "--gpus-per-replica", "0.5"], ["0", "0"]),
        (["--device", "cpu"], [""]),
    ],
)
def test_replicas_have_gpus_of_their_own_unless_they_share_one(
    options: list[str], visible: list[str], tmp_path: Path
) -> None:
    folder = checkpoints.llama(tmp_path / "llama")
    pretended = {"RAY_OVERRIDE_RESOURCES": '{"GPU": 2}'}
    with running([f"gen={folder}", "--runtime", "ray", *options], variables=pretended) as service:
        assert service.visible_gpus() == visible


def test_the_setting_comes_from_wherever_settings_come() -> None:
    assert sources.from_environment({"TRIPTYCH_TENSOR_PARALLEL_SIZE": "2"}) == {"tensor_parallel_size": 2}
    file = sources.from_mapping({"models": {"m": {"path": "x", "tensor-parallel-size": 4}}}, "file")
    assert file.models["m"]["tensor_parallel_size"] == 4
    config = resolve_config(file.models, {"tensor_parallel_size": 2})
    assert [spec.engine.tensor_parallel_size for spec in config.models] == [4]


def test_a_size_that_does_not_fit_is_a_configuration_error(tmp_path: Path) -> None:
    """As every one of those ends `triptych serve`, see test_lifetimes.py."""
    folder = checkpoints.llama(tmp_path / "llama")
    settings = {"device": "cpu", "dtype": "float32", "attention_backend": "sdpa", "tensor_parallel_size": 7}
    (spec,) = resolve_config({"gen": {"path": str(folder)}}, settings).models
    with pytest.raises(ConfigError, match="tensor_parallel_size 7 must divide the"):
        load(spec)
