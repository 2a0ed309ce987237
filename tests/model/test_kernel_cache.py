"""The folder of compiled kernels belongs to the user who runs the service, and no other can put code there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.engine import network_plan
from triptych.model.errors import ConfigError
from triptych.model.system import kernel_cache
from triptych.model.system.kernel_cache import TRITONS, VARIABLE, use_kernel_cache


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in (VARIABLE, TRITONS):
        monkeypatch.setenv(name, "")  # so that it is put back at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(kernel_cache.tempfile, "tempdir", str(tmp_path))
    kernel_cache.kernel_cache.cache_clear()
    yield
    kernel_cache.kernel_cache.cache_clear()


def mode(folder: str | Path) -> int:
    return stat.S_IMODE(Path(folder).stat().st_mode)


def test_the_default_is_in_the_user_s_cache_for_its_owner_alone(tmp_path: Path) -> None:
    folder = use_kernel_cache()
    assert folder == tmp_path / "home/triptych/kernels"
    assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")
    assert mode(folder) == mode(folder / "triton") == 0o700


def test_a_named_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kernels"))
    assert use_kernel_cache() == tmp_path / "kernels"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "kernels/triton")


@pytest.mark.parametrize("loose", [0o777, 0o770, 0o1777])
def test_a_named_folder_that_others_may_write_is_refused(
    loose: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(loose)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kernels"))
    with pytest.raises(ConfigError, match=rf"{VARIABLE} .*/kernels: it may be written by others \(mode .*put code"):
        use_kernel_cache()


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kernels"))
    real = os.stat_result
    theirs = (tmp_path / "kernels").stat()
    other = real([*theirs[:4], 4242, *theirs[5:]])
    monkeypatch.setattr(Path, "stat", lambda self, **_: other)
    with pytest.raises(ConfigError, match="belongs to user 4242, not to"):
        use_kernel_cache()


def test_a_user_s_cache_that_others_may_write_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "home/triptych/kernels").mkdir(parents=True)
    (tmp_path / "home/triptych/kernels").chmod(0o777)
    folder = use_kernel_cache()
    assert folder.parent == tmp_path and folder.name.startswith("triptych-kernels-") and mode(folder) == 0o700
    assert "compiled kernels are not kept" in caplog.text and VARIABLE in caplog.text


def test_a_folder_that_cannot_be_made_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file/kernels"))
    assert use_kernel_cache().name.startswith("triptych-kernels-")
    assert "Not a directory" in caplog.text


def test_triton_s_own_variable_stays_with_a_warning_if_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(0o777)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "theirs"))
    use_kernel_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "theirs")
    assert "TRITON_CACHE_DIR" in caplog.text and "put code there" in caplog.text


def test_a_model_on_a_gpu_uses_it_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Reached(Exception):
        pass

    def plan(device: str) -> None:
        monkeypatch.setattr(network_plan, "resolve_device", lambda name: torch.device(name))
        monkeypatch.setattr(network_plan, "read_checkpoint", lambda *_, **__: None)
        monkeypatch.setattr(network_plan, "use_kernel_cache", reached)
        network_plan.plan_network(ModelSpec("m", "m", EngineConfig(device=device)))

    def reached() -> None:
        raise Reached

    with pytest.raises(Reached):
        plan("cuda")
    with pytest.raises(AttributeError):  # goes on with the folder, which is none
        plan("cpu")


def test_triton_keeps_its_kernels_there() -> None:
    triton = pytest.importorskip("triton")
    assert str(use_kernel_cache() / "triton") == triton.knobs.cache.dir
