"""`triptych doctor`, which checks the machine and the settings, and `triptych ps`, which asks a running service."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from triptych.model.errors import EngineError
from triptych.model.native import build
from triptych.model.system import cpu_threads
from triptych.service.cli import doctor, main, models
from triptych.service.cli.service_client import ServiceClient, started_service


def ran(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main.main(arguments)
    return int(end.value.code or 0), capsys.readouterr().out


def checks(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, dict[str, str]]]:
    code, out = ran("doctor", "--json", *flags, capsys=capsys)
    report = json.loads(out)
    assert report["ok"] == (code == 0)
    return code, {check["name"]: check for check in report["checks"]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("TRIPTYCH_")]:
        monkeypatch.delenv(name)
    return tmp_path


def test_a_sound_machine_is_ok_and_nothing_is_written_but_lines(
    capsys: pytest.CaptureFixture[str], own_cache: Path
) -> None:
    code, found = checks(capsys, "--port", "0")
    names = {"versions", "torch", "cpu", "kernels", "threads", "memory", "gpu", "ray", "port", "keys", "hub cache"}
    assert code == 0 and names <= found.keys()
    assert "compil" in found["kernels"]["found"] or "prebuilt" in found["kernels"]["found"]
    code, text = ran("doctor", "--port", "0", capsys=capsys)
    assert code == 0 and "\nok    memory         " in text and "GB available: fits models of about" in text
    assert not list(own_cache.rglob("*.so"))


def test_a_port_that_is_taken_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, found = checks(capsys, "--port", str(taken.getsockname()[1]))
    assert (code, found["port"]["status"]) == (1, "failure")
    assert "is not free: in use" in found["port"]["found"] and "--port" in found["port"]["advice"]


def test_settings_and_keys_are_looked_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, found = checks(capsys, "--port", "0", "--host", "0.0.0.0")
    assert (code, found["keys"]["status"]) == (0, "warning")
    file = tmp_path / "keys"
    file.write_text("secret\n")
    file.chmod(0o644)
    monkeypatch.setenv("TRIPTYCH_API_KEY_FILE", str(file))
    code, out = ran("doctor", "--port", "0", capsys=capsys)
    assert code == 0 and f"WARN  keys           api_key_file {file} can be read by everybody" in out
    assert "secret" not in out
    monkeypatch.setenv("TRIPTYCH_API_KEY_FILE", str(tmp_path / "none"))
    assert checks(capsys, "--port", "0")[0] == 1
    monkeypatch.delenv("TRIPTYCH_API_KEY_FILE")
    monkeypatch.setenv("TRIPTYCH_PROT", "1")
    code, found = checks(capsys, "--port", "0")
    assert code == 1 and "TRIPTYCH_PROT is not known; did you mean TRIPTYCH_PORT?" in found["settings"]["found"]


def test_without_kernels_and_compiler_there_is_a_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> tuple[str, str]:
        raise build.BuildError("no GCC is installed")

    monkeypatch.setattr(build, "prebuilt", lambda: None)
    monkeypatch.setattr(build, "_compiler", none)
    code, found = checks(capsys, "--port", "0")
    assert (code, found["kernels"]["status"], found["compiler"]["found"]) == (0, "warning", "no GCC is installed")
    assert "torch computes" in found["kernels"]["found"]


def test_a_cache_that_cannot_be_made_is_why_there_are_no_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    (own_cache / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache / "file"))
    monkeypatch.setattr(build, "prebuilt", lambda: None)
    monkeypatch.setattr(build, "_compiler", lambda: ("gcc", "gcc 12"))
    found = checks(capsys, "--port", "0")[1]
    assert found["kernels"]["status"] == "warning" and "no cache folder can be made" in found["kernels"]["found"]
    assert "XDG_CACHE_HOME" in found["kernels cache"]["advice"] and "HF_HOME" in found["hub cache"]["advice"]


def test_a_cache_below_a_folder_that_may_not_be_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: object) -> bool:
        raise PermissionError("as Path.exists does before Python 3.12")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", refused)
        patched.setattr(os, "access", lambda *_: False)
        assert "cannot be written" in doctor._cache("hub cache", tmp_path / "hub").found


def test_caches_that_others_can_write_are_named(capsys: pytest.CaptureFixture[str], own_cache: Path) -> None:
    (own_cache / "triptych").mkdir()
    (own_cache / "triptych" / "weights").mkdir()
    (own_cache / "triptych" / "weights").chmod(stat.S_IRWXU | stat.S_IRWXO)
    found = checks(capsys, "--port", "0")[1]["weights cache"]
    assert found["status"] == "warning" and "may be written by others (mode 707)" in found["found"]


def test_without_torch_the_other_checks_are_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "torch" else "1")
    code, found = checks(capsys, "--port", "0")
    assert (code, found["torch"]["status"]) == (1, "failure")
    assert {"threads", "memory", "port", "keys"} <= found.keys() and not {"kernels", "gpu"} & found.keys()


@pytest.mark.parametrize(("quota", "usable"), [(1.5, 1), (None, 2)])
def test_threads_are_compared_with_the_quota(
    quota: float | None, usable: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 5})
    for module in (doctor, cpu_threads):
        monkeypatch.setattr(module, "cpu_quota", lambda: quota)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert checks(capsys, "--port", "0")[1]["threads"]["status"] == "ok"
    found = checks(capsys, "--port", "0", "--threads", "64")[1]["threads"]
    assert found["status"] == "warning" and f"use --threads {usable}" in found["advice"]
    assert ("of a quota of 1.5 CPUs" in found["found"]) if quota else ("quota" not in found["found"])


METRICS = """\
# TYPE triptych_requests_running gauge
triptych_requests_running{model="a"} 3.0
triptych_requests_waiting{model="a"} 1.0
triptych_kv_cache_usage_ratio{model="a"} 0.25
triptych_model_memory_bytes{model="a"} 1.5e+09
triptych_requests_running{model="other"} 9.0
"""
MODELS = {
    "a": {"name": "a", "form": "decoder-only", "state": "loaded", "parameters": 134_515_008, "max_model_len": 8192},
    "b": {"name": "b", "form": "encoder-only", "state": "available"},
}


def test_ps_shows_each_model_with_what_it_computes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {"name": "triptych", "models": list(MODELS.values()), "resident_bytes": 566_000_000}
    monkeypatch.setattr(ServiceClient, "info", lambda self: info)
    monkeypatch.setattr(ServiceClient, "metrics", lambda self: METRICS)
    code, text = ran("ps", capsys=capsys)
    head, first, second, last = text.splitlines()
    assert last.startswith("In memory now: 566 MB.")
    assert code == 0 and head.split() == [
        "NAME",
        "FORM",
        "STATE",
        "PARAMETERS",
        "MEMORY",
        "CONTEXT",
        "DEVICE",
        "RUNNING",
        "WAITING",
        "KV",
        "CACHE",
    ]
    assert first.split() == ["a", "decoder-only", "loaded", "134.5", "M", "1,500", "MB", "8,192", "-", "3", "1", "25%"]
    assert second.split() == ["b", "encoder-only", "available", "-", "-", "-", "-", "-", "-", "-"]
    code, text = ran("ps", "--json", capsys=capsys)
    assert json.loads(text)["models"] == models.rows(MODELS, METRICS)
    assert json.loads(text)["resident_bytes"] == 566_000_000


def test_ps_without_a_service_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(("ps", "--url", "http://127.0.0.1:1"))
    assert end.value.code == 1 and "no service listens at http://127.0.0.1:1" in capsys.readouterr().err


def test_a_started_service_is_this_one_whatever_the_working_folder_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "triptych").mkdir()
    (tmp_path / "triptych" / "__init__.py").write_text("raise SystemExit('another package')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EngineError, match="no such folder"), started_service("m", str(tmp_path / "none"), []):
        pass
