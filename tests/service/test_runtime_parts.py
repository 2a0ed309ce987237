"""What a runtime is put together from, each part alone: configuration, Ray's environment, the log pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from model.config import ConfigError
from model.engine.protocol import ModelSpec
from service import ray_environment
from service.config import Limits, ServiceSettings
from service.runtime import ServeConfig, base_url, listening
from service.scaling import Scaling
from tests.service.processes import ROOT

SPECS = (ModelSpec("gen", "/nowhere"),)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without settings of Ray, put back as it was afterwards."""
    monkeypatch.setattr(os, "environ", {name: v for name, v in os.environ.items() if not name.startswith("RAY_")})
    return monkeypatch


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


def test_haproxy_gets_files_of_its_own_and_outlasts_every_request(clean: pytest.MonkeyPatch) -> None:
    settings = ServiceSettings(limits=Limits(request_timeout_s=100))
    variables = ray_environment.variables(ServeConfig(SPECS, settings), Path("/tmp/t"))
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert float(variables["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > 100
    files = [value for name, value in variables.items() if name.endswith(("_LOC", "_PATH", "_FILE", "_BASE"))]
    assert [value for value in files if not value.startswith("/tmp/t/h")] == ["service.edge:middlewares"]


@pytest.mark.parametrize("why", ["asked for", "told Ray", "no binary", "address"])
def test_without_haproxy_serves_own_proxy_listens(clean: pytest.MonkeyPatch, why: str) -> None:
    if why == "no binary":
        clean.setitem(os.environ, "RAY_SERVE_HAPROXY_BINARY_PATH", "/no/such/file")
    if why == "told Ray":
        clean.setitem(os.environ, "RAY_SERVE_ENABLE_HA_PROXY", "0")
    settings = ServiceSettings(host="::" if why == "address" else "127.0.0.1")
    config = ServeConfig(SPECS, settings, haproxy=why != "asked for")
    variables = ray_environment.variables(config, Path("/tmp/t"))
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == variables["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == "0"
    assert not any("HAPROXY" in name for name in variables)


def test_a_variable_that_the_user_has_set_stays(clean: pytest.MonkeyPatch) -> None:
    clean.setitem(os.environ, "RAY_SERVE_THROUGHPUT_OPTIMIZED", "0")
    with ray_environment.prepared(ServeConfig(SPECS)) as folder:
        assert os.environ["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "0"
        assert os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(str(folder)) < 30
    assert not folder.exists()


def test_the_log_pipe_joins_stderr_of_other_processes() -> None:
    child = "import sys; from pathlib import Path; from service import log_pipe; log_pipe.adopt(Path(sys.argv[1])); "
    child += "import os; os.write(2, b'from the child\\n')"
    parent = f"""
import subprocess, sys, tempfile
from pathlib import Path
from service import log_pipe
with tempfile.TemporaryDirectory() as folder, log_pipe.printing(Path(folder, "log")):
    for _ in range(3):
        subprocess.run([sys.executable, "-c", {child!r}, str(Path(folder, "log"))], check=True)
"""
    done = subprocess.run([sys.executable, "-c", parent], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "from the child\n" * 3)


def test_a_full_disk_for_logs_does_not_block_who_writes_them() -> None:
    parent = """
import os, tempfile
from pathlib import Path
from service import log_pipe
with tempfile.TemporaryDirectory() as folder, log_pipe.printing(Path(folder, "log")):
    pipe = os.open(Path(folder, "log"), os.O_WRONLY)
    for _ in range(1000):
        os.write(pipe, b"a" * 1000)  # together more than a pipe holds
"""
    with open("/dev/full", "w") as full:
        subprocess.run([sys.executable, "-c", parent], cwd=ROOT, stderr=full, timeout=60, check=True)
