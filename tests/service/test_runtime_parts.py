"""Parts of the runtimes: configuration, the listening socket, Ray's environment, signals, descendants."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.service.processes import ROOT
from tests.service.support import info
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.errors import ConfigError
from triptych.model.pretrained import embedded_models
from triptych.service.cli.banner import banner
from triptych.service.observability.metric_parts import MULTIPROCESS_FOLDER
from triptych.service.runtimes.assembly import base_url, build_models, listening, tune_garbage_collector
from triptych.service.runtimes.ray_serve import environment
from triptych.service.runtimes.ray_serve.main_process import time_limit
from triptych.service.settings.serve_config import Ready, Scaling, ServeConfig
from triptych.service.settings.service_settings import ServiceSettings

SPECS = (ModelSpec("gen", "/nowhere"),)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"models": ()}, "no model"),
        ({"models": SPECS, "scaling": Scaling(1, 2), "runtime": "local"}, "use --runtime ray"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("models", "settings", "message"),
    [
        (["normalize", "embed"], {}, "normalize is encoder-decoder, embed is encoder-only"),
        (["embed"], {"admin_keys": ("a",)}, None),  # which loads others later
        (["embed", "code"], {}, None),
    ],
)
def test_a_draft_model_that_is_of_no_use_to_any_model_is_refused(
    models: list[str], settings: dict[str, Any], message: str | None
) -> None:
    paths, shared = embedded_models(), EngineConfig(num_speculative_tokens=4, draft_model="/d", draft_model_shared=True)
    specs = tuple(ModelSpec(name, str(paths[name]), shared) for name in models)
    config = ServeConfig(specs, ServiceSettings(**settings))
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        assert [model.name for model in build_models(config)] == models


def test_the_banner_tells_slots_of_recurrent_states_where_there_are_any() -> None:
    for slots, told in ((40, ["recurrent states 40 slots (80 MB): two for each running sequence"]), (0, [])):
        model = info("gen", "decoder-only", state_slots=slots, state_slot_bytes=2_000_000)
        lines = banner(Ready("http://x", "uvicorn", {"gen": model}), ServeConfig(SPECS), 1.0).splitlines()
        assert [line.strip().partition(",")[0] for line in lines if "recurrent" in line] == told


def test_loaded_objects_are_exempt_from_garbage_collection() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    loaded = [[at] for at in range(10_000)]
    gc.set_threshold(700, 10, 10)  # a deployment that ran in this process before has raised it
    try:
        tune_garbage_collector()
        assert gc.get_freeze_count() > frozen + len(loaded)
        assert gc.isenabled()
        assert gc.get_threshold()[0] > 700
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def test_a_port_that_is_taken_is_a_configuration_error() -> None:
    with listening(ServiceSettings(port=0)) as listener:
        port = listener.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: "),
            listening(ServiceSettings(port=port)),
        ):
            pass


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:1"), ("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1")],
)
def test_the_url_is_one_that_a_client_here_can_use(host: str, url: str) -> None:
    assert base_url(host, 1) == url


def test_a_variable_that_the_user_has_set_stays(no_ray_settings: pytest.MonkeyPatch) -> None:
    no_ray_settings.setitem(os.environ, "RAY_SERVE_THROUGHPUT_OPTIMIZED", "0")
    with environment.prepared(ServeConfig(SPECS)) as folder:
        assert os.environ["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "0"
        assert os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(str(folder)) < 30
    assert not folder.exists()


def test_an_empty_variable_does_not_open_ray(no_ray_settings: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        no_ray_settings.setitem(os.environ, name, "")
    with environment.prepared(ServeConfig(SPECS)):
        assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64


def test_a_folder_for_metrics_that_cannot_be_made_is_an_error_and_nothing_is_left(
    no_ray_settings: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sessions, file = tmp_path_factory.mktemp("s"), tmp_path / "file"  # a short name: sockets are below it
    file.touch()
    no_ray_settings.setattr(environment, "_temp_dir", lambda: str(sessions))
    no_ray_settings.setitem(os.environ, MULTIPROCESS_FOLDER, str(file / "below"))
    with (
        pytest.raises(ConfigError, match=f"{MULTIPROCESS_FOLDER} {file}/below: Not a directory"),
        environment.prepared(ServeConfig(SPECS)),
    ):
        pass
    assert not list(sessions.iterdir())
    no_ray_settings.setitem(os.environ, MULTIPROCESS_FOLDER, str(tmp_path / "not" / "there"))
    with environment.prepared(ServeConfig(SPECS)):
        assert (tmp_path / "not" / "there").is_dir()


def test_two_services_under_ray_do_not_share_what_survives_a_restart(
    no_ray_settings: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, other = (ServeConfig(SPECS, ServiceSettings(state_dir=str(tmp_path / name))) for name in ("a", "b"))
    no_ray_settings.setitem(os.environ, MULTIPROCESS_FOLDER, str(tmp_path / "metrics"))  # else made in /tmp again
    with environment.prepared(one):
        with environment.prepared(other):
            pass
        with (
            pytest.raises(ConfigError, match=r"state_dir .*a: another service uses this folder"),
            environment.prepared(one),
        ):
            pass
    with environment.prepared(one):
        pass


def test_a_session_folder_that_cannot_be_made_is_an_error(no_ray_settings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_ray_settings.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 9)))  # too long for sockets
    with environment.prepared(ServeConfig(SPECS)) as folder:
        assert folder.parent == Path("/tmp")
    no_ray_settings.setattr(tempfile, "tempdir", "/proc")  # no folder can be made there
    with (
        pytest.raises(
            ConfigError, match=r"no folder for Ray can be made as /proc/triptych-.*; set TMPDIR to a writable folder"
        ),
        environment.prepared(ServeConfig(SPECS)),
    ):
        pass
    no_ray_settings.setattr(tempfile, "tempdir", "/" + "é" * 12)
    assert environment._temp_dir() == "/tmp"  # bytes count, not characters


_ORPHANS = """
import subprocess, time
from triptych.model.system.stacks import descendants
from triptych.service.runtimes.ray_serve.main_process import _name, adopt_orphans, end_descendants
adopt_orphans()
subprocess.run(["sh", "-c", "sleep 61 & (trap '' TERM; sleep 62) &"])  # which ends and leaves them
while [_name(pid) for pid in descendants()].count("sleep") < 2:  # on a busy machine they begin later than it ends
    time.sleep(0.01)
left = end_descendants(0.0)
assert left.count("sleep") == 2, left
ending = subprocess.Popen(["sleep", "0.1"])
assert end_descendants(30.0) == []
"""


def test_orphans_are_found_and_ended() -> None:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", _ORPHANS], check=True, timeout=60, cwd=ROOT)
    assert time.monotonic() - began < 30


def test_the_time_limit_interrupts_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError), time_limit(0.05):
        time.sleep(60)
    with time_limit(60.0):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)  # nothing is left of it
    assert signal.getsignal(signal.SIGALRM) is before
