"""Environment variables that must be set before Ray is imported, and the folder of a Ray session. Imports no Ray.

Ray and Serve read their settings once, on import, in this process and in all its descendants. A variable that the user
has set is kept, unless it is empty: without a token Ray would be open.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from triptych.model.errors import ConfigError
from triptych.service.core.state_folder import of_one_service
from triptych.service.http.connections import raise_descriptor_limit
from triptych.service.observability.metric_parts import MULTIPROCESS_FOLDER, make_folder
from triptych.service.runtimes.ray_serve import haproxy
from triptych.service.settings.serve_config import ServeConfig

EDGE_LIMITS: Final = "TRIPTYCH_EDGE_LIMITS"  # variable with the limits, as JSON, for Serve's processes
HA_PROXY: Final = "RAY_SERVE_ENABLE_HA_PROXY"
_MAX_TEMP_PATH = 16  # bytes; Ray and HAProxy append up to 85 for Unix sockets, whose paths have 107 at most


@contextmanager
def prepared(config: ServeConfig) -> Iterator[Path]:
    """Set the environment of a session, and yield its folder, private to this user and deleted at the end.

    Raises `ConfigError` if this folder or the folder of metrics cannot be made, if the paths of HAProxy's sockets would
    be too long, or if another service has the state folder.
    """
    folder = _session_folder()
    raise_descriptor_limit()  # HAProxy and all other processes of the session inherit it
    for name, value in variables(config, folder).items():
        os.environ[name] = os.environ.get(name) or value
    try:
        make_folder()
        if haproxy.is_used(config, os.environ):
            haproxy.prepare(config, folder)
        os.environ["PYTHONPATH"] = _python_path(os.environ.get("PYTHONPATH", ""))
        with of_one_service(config.settings.state_dir):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def variables(config: ServeConfig, folder: Path) -> dict[str, str]:
    """Return the settings of Ray and Serve for this service."""
    with_haproxy = haproxy.is_used(config, os.environ)
    settings = {
        HA_PROXY: str(int(with_haproxy)),
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": str(int(with_haproxy)),  # 1: replicas listen themselves; 0: a proxy does
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "triptych.service.runtimes.ray_serve.edge:middlewares",
        EDGE_LIMITS: msgspec.json.encode(config.settings.limits).decode(),
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # By default Serve kills a proxy that takes over 5 s to start, as on a busy machine, and then fails itself.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "45",
        # Ray's default is 15: replicas and engines would get a thirtieth of a CPU that another process uses too.
        "RAY_worker_niceness": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # despite its name, this makes Ray listen on 127.0.0.1 on Linux too
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # of this session; else Ray writes one into the home folder
        "RAY_USAGE_STATS_ENABLED": "0",  # sends no statistics
        "PYTHONSAFEPATH": "1",  # Ray's processes import nothing from the working directory
        MULTIPROCESS_FOLDER: str(folder / "metrics"),
    }
    return settings | (haproxy.variables(config, folder) if with_haproxy else {})


def _session_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="triptych-", dir=_temp_dir()))
    except OSError as error:
        where = f" as {error.filename}" if error.filename else ""
        raise ConfigError(
            f"no folder for Ray can be made{where}: {error.strerror}; set TMPDIR to a writable folder whose path has "
            f"at most {_MAX_TEMP_PATH} bytes, because it will contain Unix sockets"
        ) from None


def _temp_dir() -> str:
    """Return the usual folder for temporary files, or /tmp if the paths of sockets in it would be too long."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _MAX_TEMP_PATH else "/tmp"


def _python_path(current: str) -> str:
    """Add this package's folder to `current` in a source checkout, so that Ray's workers can import it."""
    root = str(Path(__file__).absolute().parents[4])
    installed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    paths = [path for path in current.split(os.pathsep) if path]
    return os.pathsep.join(paths if root in installed or root in paths else [root, *paths])
