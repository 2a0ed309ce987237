"""HAProxy as Ray Serve's ingress: settings, error pages, retries, time limits."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from tests.service.processes import ROOT
from triptych.model.api.messages import ModelSpec
from triptych.model.errors import ConfigError, EngineGoneError
from triptych.service.core.errors import ApiError, draining, engine_refusal, render, unavailable
from triptych.service.core.request_context import is_request_id
from triptych.service.runtimes.ray_serve import environment, haproxy
from triptych.service.settings.serve_config import Scaling, ServeConfig
from triptych.service.settings.service_settings import Limits, ServiceSettings

SPECS = (ModelSpec("gen", "/nowhere"),)


def test_haproxy_has_its_own_files_and_outlasts_every_request(no_ray_settings: pytest.MonkeyPatch) -> None:
    settings = ServiceSettings(limits=Limits(request_timeout_s=100))
    variables = environment.variables(ServeConfig(SPECS, settings), Path("/tmp/t"))
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert float(variables["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > 100
    # Serve's own 5 s are too few on a busy machine.
    assert float(variables["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"]) >= 30
    files = [value for name, value in variables.items() if name.endswith(("_LOC", "_PATH", "_FILE", "_BASE"))]
    assert [value for value in files if not value.startswith("/tmp/t/h")] == [
        "triptych.service.runtimes.ray_serve.edge:middlewares"
    ]


# HAProxy as Serve starts it, without a cluster: / goes to a replica that is gone, /two to a pair in which one closes
# connections unanswered or refuses, /alike to three that answer, and other paths to a single one, with Serve's own
# proxy as fallback. Health checks are too rare to notice those faults. It ends when its standard input closes.
HAPROXY = """
import asyncio, sys
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

async def main():
    options = HTTPOptions(host="127.0.0.1", port=int(sys.argv[1]))
    gone = BackendConfig("gone", "/", servers=[ServerConfig("gone", "127.0.0.1", 1)])
    servers = [ServerConfig(f"replica{port}", "127.0.0.1", int(port)) for port in sys.argv[2:]]
    staying, leaving, held, refused, *alike = servers
    backends = {"gone": gone, "two": BackendConfig("two", "/two", servers=[staying, leaving])}
    backends["alike"] = BackendConfig("alike", "/alike", servers=alike)
    for path, replica in {"held": held, "refused": refused}.items():
        backends[path] = BackendConfig(
            path, "/" + path, servers=[replica], fallback_server=staying, health_check_inter="600s"
        )
    api = HAProxyApi(HAProxyConfig(http_options=options), backends)
    await api.start()
    print("started", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await api.stop()

asyncio.run(main())
"""


class Staying(BaseHTTPRequestHandler):
    """A replica that answers."""

    protocol_version = "HTTP/1.1"
    asked = 0

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", "7")
        self.end_headers()
        self.wfile.write(b"success")

    def do_POST(self) -> None:
        type(self).asked += 1
        self.do_GET()

    def log_message(self, *_: object) -> None: ...


class Leaving(Staying):
    """A replica that closes its connection without a reply, or refuses, though it is healthy."""

    def do_POST(self) -> None:
        type(self).asked += 1
        if self.path.endswith("/failing"):
            self.send_error(500)
        elif self.path.endswith("/not-loaded"):
            self.send_error(503)
        elif self.asked % 2:
            self.send_error(haproxy.RETRIED_STATUS)
        self.close_connection = True


class Alike(Staying):
    """A replica that says which one it is. Requests that wait are held until the test lets all of them go."""

    wbufsize = -1  # a reply is one packet
    heads: ClassVar[deque[dict[str, str]]] = deque(maxlen=1)
    waiting = threading.Semaphore(0)
    go = threading.Event()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.heads.append(dict(self.headers.items()))
        if b"wait" in body:
            self.waiting.release()
            self.go.wait(60)
        said = f"{self.server.server_address[1]} {self.headers.get('x-request-id', '')}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)


class Last(Staying):
    """A replica that answers a limited number at a time, until it leaves and closes its connections."""

    at_once = threading.Barrier(6)
    leaves = False

    def do_POST(self) -> None:
        if self.leaves:
            self.close_connection = True
        else:
            self.at_once.wait(60)
            self.do_GET()


@pytest.fixture(scope="module")
def replicas() -> Iterator[dict[str, ThreadingHTTPServer]]:
    kinds = {"staying": Staying, "leaving": Leaving, "held": Last, "refused": Staying}
    kinds |= dict.fromkeys(("a", "b", "c"), Alike)
    with ExitStack() as stack:
        found = {n: stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), kind)) for n, kind in kinds.items()}
        for replica in found.values():
            threading.Thread(target=replica.serve_forever, daemon=True).start()
            stack.callback(replica.shutdown)
        yield found


@pytest.fixture(scope="module")
def haproxy_address(replicas: dict[str, ThreadingHTTPServer]) -> Iterator[tuple[str, int]]:
    """Its address, with heads of 1 s and 64 KiB."""
    port = haproxy.free_port()  # seconds pass until HAProxy has it
    before = dict(os.environ)
    settings, scaling = ServiceSettings(limits=Limits(receive_s=1.0)), Scaling(2, 2)
    with environment.prepared(ServeConfig(SPECS, settings, scaling=scaling)):
        ports = (str(port), *(str(replica.server_port) for replica in replicas.values()))
        command = [sys.executable, "-W", "ignore", "-c", HAPROXY, *ports]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == b"started\n"
            yield "127.0.0.1", port
        finally:
            process.stdin.close()
            process.wait(60)
            os.environ.clear()
            os.environ.update(before)


@pytest.mark.parametrize(
    ("begin", "more", "said"),
    [
        (b"GET /info HTTP/1.1\r\nHost: x\r\n", b"X: a\r\n", b"HTTP/1.1 408 Request Time-out\r\n"),
        (b"GET /info HTTP/1.1\r\nHost: x\r\n", b"", b"HTTP/1.1 408 Request Time-out\r\n"),
        (b"", b"", b""),  # nothing was asked, so nothing is answered
        (b"GET /info HTTP/1.1\r\nX: " + b"a" * (1 << 17), b"", b"HTTP/1.1 400 Bad request\r\n"),
    ],
    ids=["dribbles", "stops", "nothing", "large"],
)
def test_haproxy_bounds_a_head(haproxy_address: tuple[str, int], begin: bytes, more: bytes, said: bytes) -> None:
    began, reply = time.monotonic(), b""
    with socket.create_connection(haproxy_address) as connection:
        connection.settimeout(0.2)
        connection.sendall(begin)
        while time.monotonic() - began < 60:
            try:
                part = connection.recv(1 << 16)
                reply += part
                if not part:
                    break
            except TimeoutError:
                with suppress(ConnectionError):
                    connection.sendall(more)
            except ConnectionError:  # closed before it had read what was sent meanwhile
                break
        else:
            pytest.fail(f"not closed, after {reply!r}")
    assert time.monotonic() - began < 20
    assert reply.startswith(said) and bool(reply) == bool(said)


def test_haproxy_replies_in_the_error_shape_without_a_replica(haproxy_address: tuple[str, int]) -> None:
    reply = httpx.get("http://{}:{}/info".format(*haproxy_address))
    assert (reply.status_code, reply.headers["content-type"]) == (503, "application/json")
    assert reply.json()["error"]["code"] == "not_ready"
    assert int(reply.headers["retry-after"]) > 0


def test_haproxy_replies_in_the_error_shape_to_a_late_body(haproxy_address: tuple[str, int]) -> None:
    with socket.create_connection(haproxy_address) as connection:
        connection.settimeout(60)
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc")
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert json.loads(body)["error"]["code"] == "request_too_slow"


def test_haproxy_retries_on_another_replica_after_an_empty_response_or_a_503(haproxy_address: tuple[str, int]) -> None:
    with httpx.Client(base_url="http://{}:{}/two".format(*haproxy_address)) as client:
        while client.get("/info").status_code != 200:  # until both are seen to be well
            time.sleep(0.1)
        before = Staying.asked
        replies = [client.post("/generate", json={"prompt": f"{n}" * 1000}) for n in range(12)]
        assert [reply.status_code for reply in replies] == [200] * 12
        assert Leaving.asked > 1 and Staying.asked == before + 12
        before = Staying.asked, Leaving.asked
        replies = [client.post("/failing", json={}) for _ in range(6)]
        replies += [client.post("/not-loaded", json={}) for _ in range(6)]
    assert {reply.status_code for reply in replies} == {200, 500, 503}
    assert Staying.asked + Leaving.asked == sum(before) + 12  # what a replica has tried is not sent again


def test_a_replica_asks_haproxy_to_send_on_what_it_has_not_begun() -> None:
    def refuse(error: ApiError) -> int:
        return TestClient(Sending(render(error))).get("/").status_code

    assert refuse(draining()) == haproxy.RETRIED_STATUS
    assert refuse(engine_refusal(EngineGoneError("gone"))) == haproxy.RETRIED_STATUS
    assert refuse(unavailable("a model could not be loaded", "model_failed")) == 503  # maybe it has ended the engine


class Sending:
    """An application as a replica runs it for HAProxy."""

    def __init__(self, reply: Response) -> None:
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._reply(scope, receive, haproxy.retried(send))


def chat(*texts: str, system: str = "", **others: object) -> dict[str, object]:
    """A conversation's body: turns of the user and the assistant."""
    roles = ("user", "assistant") * len(texts)
    messages = [{"content": text, "role": role} for text, role in zip(texts, roles, strict=False)]
    return {**others, "messages": [{"role": "system", "content": system}] * bool(system) + messages}


@pytest.fixture
def alike(haproxy_address: tuple[str, int]) -> Iterator[Callable[..., str]]:
    """Send a body to one of three replicas; which one it was, and the request's id, come back."""
    with httpx.Client(base_url="http://{}:{}/alike".format(*haproxy_address)) as client:

        def ask(body: object, path: str = "/v1/chat/completions", **headers: str) -> str:
            reply = client.post(path, json=body, headers=headers)
            assert reply.status_code == 200
            return reply.text

        yield ask


def test_haproxy_says_when_it_had_the_head_of_a_request_whatever_the_client_says(
    haproxy_address: tuple[str, int],
) -> None:
    before = time.time()
    with socket.create_connection(haproxy_address) as connection:
        head = b"POST /alike/generate HTTP/1.1\r\nHost: x\r\nX-Request-Start: t=1\r\nContent-Length: 4\r\n\r\n"
        connection.sendall(head)
        time.sleep(0.3)  # it waits for the body
        connection.sendall(b"body")
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 200")
    headers = [(name.lower().encode(), value.encode()) for name, value in Alike.heads[-1].items()]
    assert [name for name, _ in headers].count(b"x-request-start") == 1
    seconds = haproxy.seconds_in_proxy({"headers": headers})
    assert seconds is not None and 0.29 < seconds <= time.time() - before


@pytest.mark.parametrize("told", ["", "t=", "t=-1", "t=1e9", "t=" + "9" * 40, "t=\xb2", "1", "later", "t=1"])
def test_a_time_in_haproxy_that_cannot_be_is_not_known(told: str) -> None:
    assert haproxy.seconds_in_proxy({"headers": [(b"x-request-start", told.encode("latin-1"))]}) is None
    future = f"t={(time.time() + 60) * 1e6:.0f}"
    assert haproxy.seconds_in_proxy({"headers": [(b"x-request-start", future.encode())]}) is None
    assert haproxy.seconds_in_proxy({"headers": []}) is None


def where(answers: Iterable[str]) -> set[str]:
    return {answer.split(" ")[0] for answer in answers}


def test_turns_of_a_conversation_reach_one_replica(alike: Callable[..., str]) -> None:
    """Check texts with everything that JSON escapes, and conversations that share a long system prompt."""
    for begin in ('hi "all"\\', "x" * 300, 'role": "user', "{[" * 50, "ü\n"):
        turns = [begin, "yes", "and then?", "no"]
        for others in ({}, {"system": "be brief " * 40}, {"model": "m", "tools": [{"role": "user", "a": [[{}]]}]}):
            assert len(where(alike(chat(*turns[:end], **others)) for end in (1, 3, 3, 1))) == 1  # type: ignore[arg-type]
    conversations = [chat(f"question {number}", system="You answer. " * 100) for number in range(9)]
    homes = [where(alike(body) for _ in range(4)) for body in conversations]
    assert all(len(home) == 1 for home in homes)


def test_a_name_of_the_client_or_the_previous_response_chooses_the_replica(alike: Callable[..., str]) -> None:
    for number in range(6):
        named = [{"prompt": f"{number} {turn}", "prompt_cache_key": f"c{number}"} for turn in range(4)]
        assert len(where(alike(body, "/v1/completions") for body in named)) == 1
        asked = [alike({"prompt": f"s{turn}"}, "/generate", **{"X-Session-Id": f"s{number}"}) for turn in range(4)]
        assert len(where(asked)) == 1
        answers = [alike({"input": f"q {number}"}, "/v1/responses")]
        for turn in range(4):
            previous = "resp_" + answers[-1].split(" ")[1]
            answers.append(alike({"input": f"more {turn}", "previous_response_id": previous}, "/v1/responses"))
        assert len(where(answers)) == 1
        assert len(set(answers)) == len(answers) and all(is_request_id(one.split(" ")[1]) for one in answers)
    assert alike({"input": "q"}, "/v1/responses", **{"X-Request-Id": "mine"}).endswith(" mine")


def test_requests_without_a_text_go_round(alike: Callable[..., str]) -> None:
    for body in ({"input": ["a", "b"]}, {"texts": "a"}, [1], "messages", {}):
        assert len(where(alike(body, "/v1/embeddings") for _ in range(9))) == 3


def test_a_busier_replica_gives_a_conversation_away(alike: Callable[..., str]) -> None:
    """Check that no replica has much more to do than the others, though all requests begin alike."""
    Alike.go.clear()
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(alike, chat("wait", str(number), "now")) for number in range(12)]
        for _ in asked:
            assert Alike.waiting.acquire(timeout=60)
        home = where([alike(chat("another", system="wait " * 0))])
        Alike.go.set()
        counts = Counter(answer.result().split(" ")[0] for answer in asked)
    assert len(counts) == 3 and max(counts.values()) <= 7 and len(home) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"messages"',
        b'{"messages": [{"role": "user"',
        b'{"messages": [{"content": "\\',
        b'{"a": [[[[}}}}, "prompt": "x"}',
        b'{"prompt": 7}',
        b"[" * 5000,
        b'{"messages": [' + b'{"role": "system", "content": "a"},' * 3000,
        b'{"messages": [{"role": "user", "content": "' + b"a" * 500_000 + b'"}]}',
        b"\x00\xff" * 100,
    ],
)
def test_any_body_reaches_a_replica(haproxy_address: tuple[str, int], body: bytes) -> None:
    url = "http://{}:{}/alike/v1/chat/completions".format(*haproxy_address)
    began = time.monotonic()
    assert httpx.post(url, content=body).status_code == 200
    assert time.monotonic() - began < 2.0


def test_haproxy_falls_back_to_serves_proxy_when_the_only_replica_closes_its_connections(
    haproxy_address: tuple[str, int], replicas: dict[str, ThreadingHTTPServer]
) -> None:
    """A leaving replica stops listening, then closes its connections: each one that HAProxy kept may cost a try."""
    ask = partial(httpx.Client.post, url="http://{}:{}/held/generate".format(*haproxy_address), json={"prompt": "a"})
    with ExitStack() as stack, ThreadPoolExecutor(Last.at_once.parties) as pool:
        clients = [stack.enter_context(httpx.Client()) for _ in range(Last.at_once.parties)]
        assert [reply.status_code for reply in pool.map(ask, clients)] == [200] * len(clients)
        replicas["held"].shutdown()
        replicas["held"].server_close()
        Last.leaves = True
        assert [ask(client).status_code for client in clients] == [200] * len(clients)


def test_haproxy_marks_a_replica_down_after_one_refused_connection(
    haproxy_address: tuple[str, int], replicas: dict[str, ThreadingHTTPServer]
) -> None:
    url = "http://{}:{}/refused/generate".format(*haproxy_address)
    replicas["refused"].shutdown()
    replicas["refused"].server_close()
    assert httpx.post(url, json={"prompt": "a"}).status_code == 200
    assert refusals("refused", replicas["refused"].server_port) <= 1  # HAProxy waits a second after each


def refusals(backend: str, port: int) -> int:
    """How many tries HAProxy has lost on the replica."""
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"])
        control.sendall(b"show stat\n")
        told = control.makefile(encoding="utf-8").read().removeprefix("# ")
    rows = csv.DictReader(io.StringIO(told))
    (row,) = (row for row in rows if (row["pxname"], row["svname"]) == (backend, f"replica{port}"))
    return int(row["wretr"]) + int(row["wredis"])


@pytest.mark.parametrize("why", ["asked for", "told Ray", "no binary", "address"])
def test_serves_own_proxy_listens_without_haproxy(no_ray_settings: pytest.MonkeyPatch, why: str) -> None:
    if why == "no binary":
        no_ray_settings.setitem(os.environ, "RAY_SERVE_HAPROXY_BINARY_PATH", "/no/such/file")
    if why == "told Ray":
        no_ray_settings.setitem(os.environ, "RAY_SERVE_ENABLE_HA_PROXY", "0")
    settings = ServiceSettings(host="::" if why == "address" else "127.0.0.1")
    config = ServeConfig(SPECS, settings, haproxy=why != "asked for")
    variables = environment.variables(config, Path("/tmp/t"))
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == variables["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == "0"
    assert not any("HAPROXY" in name for name in variables)


def test_until_an_application_runs_haproxy_sends_the_services_503(
    no_ray_settings: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Serve's own configuration has a 404 in plain text there, which is no sign of loading."""
    found = importlib.util.find_spec("ray")
    assert found is not None and found.origin is not None
    template = (Path(found.origin).parent / "serve" / "_private" / "haproxy_templates.py").read_text()
    (refusal,) = re.findall(r"^ *http-request return status 404 content-type text/plain .*$", template, re.MULTILINE)
    with environment.prepared(ServeConfig(SPECS)) as folder:
        written = tmp_path / "haproxy.cfg"
        page = f"    errorfile 503 {folder}/h/503.http\n    mode http\n"
        times = "".join(f"    timeout {what} 1s\n" for what in ("connect", "client", "server"))
        own, clients = "frontend f\n    bind *:20000\n", "frontend http_frontend\n    bind *:20001\n"
        config = f"defaults\n{page}{times}{own}{refusal}\n{clients}frontend g\n    bind :20002\n"
        written.write_text(config.replace("\\'", "'"))
        script = os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"]
        ran = subprocess.run([script, "-c", "-f", str(written)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "    http-request return status 503 default-errorfiles\n" in written.read_text()
    assert re.findall(r"bind (\S+)", written.read_text()) == ["127.0.0.1:20000", "*:20001", "127.0.0.1:20002"]


def test_a_socket_with_too_long_a_path_is_an_error_before_haproxy_starts(no_ray_settings: pytest.MonkeyPatch) -> None:
    no_ray_settings.setitem(os.environ, "RAY_SERVE_HAPROXY_SOCKET_PATH", "/tmp/" + "x" * 93)
    with (
        pytest.raises(ConfigError, match=r"RAY_SERVE_HAPROXY_SOCKET_PATH: .* 97 bytes, found 98"),
        environment.prepared(ServeConfig(SPECS)),
    ):
        pass


def test_ports_of_haproxy_are_outside_the_ephemeral_range(monkeypatch: pytest.MonkeyPatch) -> None:
    first = haproxy._first_ephemeral_port()
    ports = {haproxy.free_port() for _ in range(50)}
    assert len(ports) > 25  # sessions that start together choose differently
    assert all(haproxy._FIRST_PORT <= port < first for port in ports)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports.pop()))
        monkeypatch.setattr(haproxy, "_FIRST_PORT", taken.getsockname()[1])
        monkeypatch.setattr(haproxy, "_first_ephemeral_port", lambda: taken.getsockname()[1] + 1)
        assert haproxy.free_port() not in (0, taken.getsockname()[1])


def test_a_folder_that_executes_nothing_is_said(no_ray_settings: pytest.MonkeyPatch) -> None:
    lines, access = list[str](), os.access
    no_ray_settings.setattr(haproxy.logger, "warning", lambda text, *values: lines.append(text % values))
    no_ray_settings.setattr(os, "access", lambda path, mode: Path(path).parent.name != "h" and access(path, mode))
    with environment.prepared(ServeConfig(SPECS)) as folder:
        (line,) = lines
        assert "RAY_SERVE_HAPROXY_BINARY_PATH" not in os.environ
    assert line.startswith(f"files in {folder}/h cannot be executed") and line.endswith("mount /tmp with exec")
