"""The service as a person starts it, under each runtime: the same requests get the same answers.

One service for all tests of a runtime until a test ends it; those behind start their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from tests import checkpoints
from tests.service.processes import ServiceProcess, eventually, running

RUNTIMES = {
    "local": ["--runtime", "local"],
    "ray": ["--runtime", "ray"],
    "ray-default-proxy": ["--runtime", "ray", "--haproxy", "off"],
}
PROMPT = {"model": "gen", "prompt": "def add(", "max_tokens": 12}
LONG = {**PROMPT, "max_tokens": 1500}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [f"gen={checkpoints.llama(folder / 'llama')}", f"enc={checkpoints.bert(folder / 'bert')}"]


@pytest.fixture(
    scope="module",
    params=["local", "ray", pytest.param("ray-default-proxy", marks=pytest.mark.slow)],
)
def service(request: pytest.FixtureRequest, models: list[str]) -> Iterator[ServiceProcess]:
    with running([*models, *RUNTIMES[request.param], "--log-format", "json"]) as started:
        yield started


@pytest.fixture
def base_url(service: ServiceProcess) -> str:
    return service.url


def generate(base_url: str, **fields: Any) -> dict[str, Any]:
    reply = httpx.post(f"{base_url}/generate", json={**PROMPT, **fields}, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def stream(base_url: str, body: dict[str, Any]) -> list[tuple[float, str]]:
    """Time of arrival and data of every event."""
    with httpx.stream("POST", f"{base_url}/generate", json={**body, "stream": True}, timeout=60) as reply:
        assert reply.status_code == 200
        lines = ((time.monotonic(), line) for line in reply.iter_lines())
        return [(at, line.removeprefix("data: ")) for at, line in lines if line.startswith("data: ")]


def metric(base_url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    samples = [
        line for line in httpx.get(f"{base_url}/metrics").text.splitlines() if line.startswith(f"triptych_{name}")
    ]
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(line.rpartition(" ")[2]) for line in samples if all(label in line for label in wanted))


def test_it_is_ready_and_says_what_it_serves(base_url: str) -> None:
    assert httpx.get(f"{base_url}/livez").json() == {"status": "ok"}
    assert httpx.get(f"{base_url}/readyz").json() == {"status": "ok"}
    info = httpx.get(f"{base_url}/info").json()
    assert [model["name"] for model in info["models"]] == ["gen", "enc"]


def test_it_listens_on_this_machine_alone(service: ServiceProcess) -> None:
    """But for a port of each replica under Ray, over which Serve's handles call it: with the session's token only."""
    found = service.listeners()
    assert ("127.0.0.1", urlsplit(service.url).port) in {(address, port) for address, port, _ in found}
    elsewhere = [(port, pid) for address, port, pid in found if address not in ("127.0.0.1", "::1")]
    processes = service.descendants()
    assert all("ServeReplica" in processes[pid] for _, pid in elsewhere), elsewhere
    assert len(elsewhere) == sum("ServeReplica" in line for line in processes.values())
    for port, _ in elsewhere:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_joined_deltas_are_the_unstreamed_text(base_url: str) -> None:
    whole = generate(base_url, max_tokens=60)
    events = [data for _, data in stream(base_url, {**PROMPT, "max_tokens": 60})]
    assert events[-1] == "[DONE]"
    parsed = [json.loads(data) for data in events[:-1]]
    assert "".join(event["choices"][0]["text"] for event in parsed) == whole["choices"][0]["text"]
    assert parsed[-1]["usage"] == whole["usage"]


def test_a_stream_arrives_as_it_is_made(base_url: str) -> None:
    began = time.monotonic()
    arrivals = [at - began for at, _ in stream(base_url, {**PROMPT, "max_tokens": 300})]
    assert arrivals[0] < arrivals[-1] / 3
    assert len(set(arrivals)) > 30


def test_encode_gives_the_same_vector_alone_and_among_others(base_url: str) -> None:
    def encode(texts: list[str]) -> list[list[float]]:
        reply = httpx.post(f"{base_url}/encode", json={"model": "enc", "input": texts}, timeout=60)
        return [item["embedding"] for item in reply.json()["data"]]

    texts = ["import os", "def add(left, right)", "12"]
    for one, among in zip(texts, encode(texts), strict=True):
        assert encode([one])[0] == pytest.approx(among, abs=1e-5)


def test_many_at_once_get_what_each_gets_alone(base_url: str) -> None:
    prompts = [f"def f{number}(" for number in range(32)]

    async def all_at_once() -> list[str]:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=32)) as client:
            posts = [client.post(f"{base_url}/generate", json={**PROMPT, "prompt": prompt}) for prompt in prompts]
            return [reply.json()["choices"][0]["text"] for reply in await asyncio.gather(*posts)]

    assert asyncio.run(all_at_once()) == [generate(base_url, prompt=p)["choices"][0]["text"] for p in prompts]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_aborts_its_request(base_url: str, streamed: bool) -> None:
    cancelled = metric(base_url, "requests_total", task="generate", outcome="cancelled")
    connection = post(base_url, "/generate", {**LONG, "stream": streamed})
    eventually(lambda: metric(base_url, "requests_running", model="gen") > 0, 10)
    connection.close()
    eventually(lambda: metric(base_url, "requests_total", task="generate", outcome="cancelled") == cancelled + 1, 2)
    eventually(lambda: metric(base_url, "requests_running") == 0, 2)


def test_accounts_add_up(base_url: str) -> None:
    eventually(lambda: metric(base_url, "requests_running") == 0, 10)
    received = metric(base_url, "requests_received_total")
    httpx.post(f"{base_url}/generate", json={**PROMPT, "max_tokens": 0})
    generate(base_url)
    assert metric(base_url, "requests_received_total") == received + 2
    accepted = metric(base_url, "requests_accepted_total")
    assert received + 2 == accepted + metric(base_url, "rejections_total")
    assert accepted == metric(base_url, "requests_total")


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", "/generate", b"{", 400, "invalid_json"),
        ("POST", "/generate", b'{"prompt": "a", "model": "no"}', 404, "model_not_found"),
        ("POST", "/generate", b'{"prompt": "' + b"a" * 2_100_000 + b'"}', 413, "body_too_large"),
        ("GET", "/generate", b"", 405, "method_not_allowed"),
        ("GET", "/nothing/here", b"", 404, "not_found"),
    ],
)
def test_errors_have_the_one_shape(
    base_url: str, method: str, path: str, content: bytes, status: int, code: str
) -> None:
    headers = {"Content-Type": "application/json"}
    reply = httpx.request(method, base_url + path, content=content, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert reply.headers["content-type"] == "application/json"


def test_large_headers_are_refused(base_url: str) -> None:
    reply = httpx.get(f"{base_url}/info", headers={"X-Large": "a" * 17_000})
    assert (reply.status_code, reply.json()["error"]["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize("request_id", ["mine-1", "not a valid one", None])
def test_a_reply_has_one_request_id(base_url: str, request_id: str | None) -> None:
    reply = httpx.get(f"{base_url}/info", headers={"X-Request-Id": request_id} if request_id else {})
    (echoed,) = reply.headers.get_list("x-request-id")
    assert (echoed == request_id) == (request_id == "mine-1")
    body = {**PROMPT, "request_id": "of-the-body"}
    reply = httpx.post(f"{base_url}/generate", json=body, headers={"X-Request-Id": "of-the-header"})
    assert reply.headers.get_list("x-request-id") == ["of-the-body"]
    assert reply.json()["id"] == "of-the-body"


def test_no_header_steers_the_layers_in_front(base_url: str) -> None:
    headers = {"x-request-timeout-seconds": "0.01", "x-request-disconnect-disabled": "?1"}
    reply = httpx.post(f"{base_url}/generate", json={**PROMPT, "max_tokens": 100}, headers=headers, timeout=60)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 100


def test_a_killed_engine_fails_its_requests_and_comes_back(service: ServiceProcess) -> None:
    connection = post(service.url, "/generate", {**LONG, "stream": True})
    eventually(lambda: metric(service.url, "requests_running", model="gen") > 0, 10)
    os.kill(service.engine_pid(), signal.SIGKILL)
    reply = read_all(connection)
    assert b'"engine_failed"' in reply
    assert b"data: [DONE]" in reply
    assert httpx.get(f"{service.url}/readyz").status_code == 503
    assert httpx.get(f"{service.url}/livez").status_code == 200
    eventually(lambda: httpx.get(f"{service.url}/readyz").status_code == 200, 60)
    generate(service.url)
    eventually(lambda: metric(service.url, "engine_restarts_total", model="gen") == 1, 5)


def test_sigterm_lets_what_runs_end_and_refuses_the_rest(service: ServiceProcess) -> None:
    started = set(service.descendants())
    connection = post(service.url, "/generate", {**LONG, "max_tokens": 200, "stream": True})
    eventually(lambda: metric(service.url, "requests_running", model="gen") > 0, 10)
    service.signal(signal.SIGTERM)
    eventually(lambda: httpx.get(f"{service.url}/readyz").status_code == 503, 2)
    refused = httpx.post(f"{service.url}/generate", json=PROMPT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert "retry-after" in refused.headers
    reply = read_all(connection)
    assert b'"finish_reason":"length"' in reply
    assert b"data: [DONE]" in reply
    assert service.wait() == 0, service.output
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started), 10)
    for line in service.output.partition("curl ")[2].splitlines()[1:]:
        assert not line or json.loads(line)["message"], line  # nothing but our own log lines


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(models: list[str], first: signal.Signals) -> None:
    with running([*models, *RUNTIMES["local"]]) as service:
        connection = post(service.url, "/generate", {**LONG, "stream": True})
        eventually(lambda: metric(service.url, "requests_running", model="gen") > 0, 10)
        service.signal(first)
        eventually(lambda: httpx.get(f"{service.url}/readyz").status_code == 503, 2)
        service.signal(signal.SIGTERM)
        assert service.wait(20) == 128 + signal.SIGTERM, service.output
        connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_head_has_its_seconds_and_a_generation_is_not_measured_by_them(models: list[str], runtime: str) -> None:
    with running([*models, *RUNTIMES[runtime], "--receive-s", "1"]) as service, httpx.Client(timeout=60) as client:
        for stream in (False, True):  # on one connection
            began = time.monotonic()
            body = {**LONG, "ignore_eos": True, "stream": stream}
            reply = client.post(f"{service.url}/generate", json=body)
            assert reply.status_code == 200 and b'"length"' in reply.content
            assert time.monotonic() - began > 1.2, "ask for more"
        address = urlsplit(service.url)
        with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
            connection.settimeout(0.2)
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            first = b""
            while b"ok" not in first:
                first += connection.recv(1 << 16)
            began, second = time.monotonic(), b""
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n")
            while not second and time.monotonic() - began < 10:
                try:
                    second = connection.recv(1 << 16)
                except TimeoutError:
                    connection.sendall(b"X: a\r\n")
            assert second.startswith(b"HTTP/1.1 408 ")
            assert 0.9 < time.monotonic() - began < 3


def test_an_interrupt_that_drained_is_still_an_interrupt(models: list[str]) -> None:
    with running([*models, *RUNTIMES["local"]]) as service:
        service.signal(signal.SIGINT)
        assert service.wait() == 128 + signal.SIGINT, service.output


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_model_that_does_not_load_is_one_line_and_exit_code_2(models: list[str], runtime: str) -> None:
    service = ServiceProcess([*models, *RUNTIMES[runtime], "--max-model-len", "99999"])
    assert service.wait() == 2, service.output
    assert service.output.splitlines()[-1] == "triptych: max_model_len 99999 is beyond the model's 2048 positions"


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seconds", [4, 8])
def test_a_signal_ends_it_while_it_starts(models: list[str], runtime: str, seconds: float) -> None:
    service = ServiceProcess([*models, *RUNTIMES[runtime]])
    try:
        time.sleep(seconds if runtime == "ray" else seconds / 8)  # it is ready in less than two
        started = service.descendants()
        service.signal(signal.SIGTERM)
        codes = (128 + signal.SIGTERM, -signal.SIGTERM)  # the latter, the same to a shell, before there are handlers
        assert service.wait() in codes, service.output
        assert "Traceback" not in service.output
        eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started), 60)
    finally:
        service.stop()


def post(base_url: str, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which the request has been sent and nothing been read."""
    address = urlsplit(base_url)
    assert address.hostname is not None
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection((address.hostname, address.port), timeout=60)
    connection.sendall(head.encode() + content)
    return connection


def read_all(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.slow
def test_any_of_several_replicas_shows_the_figures_of_all(models: list[str]) -> None:
    with running([*models, *RUNTIMES["ray"], "--replicas", "2", "--log-format", "json"]) as service:
        url = service.url

        def shows(replicas: int) -> bool:
            try:
                return metric(url, "replicas", model="gen") == replicas
            except httpx.RemoteProtocolError:  # HAProxy had a connection to the replica that was killed
                return False

        for _ in range(40):  # each on a connection of its own: both replicas get some
            generate(url)
        scrapes = [metric(url, "requests_total", model="gen", outcome="length") for _ in range(10)]
        assert scrapes == [40] * 10
        eventually(lambda: [metric(url, "replicas", model="gen") for _ in range(5)] == [2] * 5, 10)
        replicas = [pid for pid, line in service.descendants().items() if "ServeReplica" in line]
        assert len(replicas) == 2
        os.kill(replicas[0], signal.SIGKILL)
        eventually(lambda: shows(1), 10)
        eventually(lambda: shows(2), 60)
        assert metric(url, "requests_total", model="gen", outcome="length") >= 40
        generate(url)


@pytest.mark.slow
def test_replicas_come_with_the_work_and_go_without_losing_a_request(models: list[str]) -> None:
    scaling = ["--replicas", "1-2", "--max-num-seqs", "4", "--scale-up-delay", "1", "--scale-down-delay", "3"]
    with running([*models, *RUNTIMES["ray"], *scaling, "--log-format", "json"]) as service:

        async def load(seconds: float, clients: int) -> list[int]:
            statuses: list[int] = []
            end = time.monotonic() + seconds

            async def ask(client: httpx.AsyncClient) -> None:
                while time.monotonic() < end:
                    reply = await client.post(f"{service.url}/generate", json={**PROMPT, "max_tokens": 200})
                    statuses.append(reply.status_code)
                    assert reply.status_code != 200 or reply.json()["choices"][0]["finish_reason"] == "length"

            async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=clients)) as client:
                await asyncio.gather(*(ask(client) for _ in range(clients)))
            return statuses

        busy = asyncio.run(load(25, 12))
        assert set(busy) == {200}
        eventually(lambda: metric(service.url, "replicas", model="gen") == 2, 20)
        quiet = asyncio.run(load(25, 1))
        assert set(quiet) == {200}
        eventually(lambda: metric(service.url, "replicas", model="gen") == 1, 30)


@pytest.mark.slow
def test_groups_of_models_answer_below_their_routes(models: list[str], tmp_path: Path) -> None:
    paths = dict(model.split("=") for model in models)
    file = tmp_path / "triptych.yaml"
    file.write_text(
        f"models: {{enc: {paths['enc']}}}\n"
        f"groups: {{text: {{route: /text, replicas: 2, models: {{gen: {paths['gen']}}}}}}}\n"
    )
    with running(["--config", str(file), *RUNTIMES["ray"], "--log-format", "json"]) as service:
        assert len(generate(f"{service.url}/text")["choices"]) == 1
        vectors = httpx.post(f"{service.url}/encode", json={"input": "x"}).json()
        assert vectors["model"] == "enc"
        missed = httpx.post(f"{service.url}/generate", json=PROMPT)
        assert (missed.status_code, missed.json()["error"]["code"]) == (404, "model_not_found")
        assert "served below /text" in missed.json()["error"]["message"]
        assert httpx.get(f"{service.url}/info").json()["elsewhere"] == {"gen": "/text"}
        assert metric(service.url, "replicas", model="gen") == 2
        assert "gen below /text" in service.output
        connection = post(service.url, "/text/generate", {**LONG, "stream": True})
        eventually(lambda: metric(f"{service.url}/text", "requests_running", model="gen") > 0, 10)
        service.signal(signal.SIGTERM)
        assert b'"finish_reason":"length"' in read_all(connection)
        assert service.wait() == 0, service.output


@pytest.mark.slow
def test_a_signal_between_ready_and_the_banner_drains_too(models: list[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    service = ServiceProcess([*models, *RUNTIMES["ray"], "--port", str(port)])
    try:
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            try:
                return httpx.get(f"{url}/readyz").status_code == 200
            except httpx.HTTPError:
                return False

        eventually(ready, 60)
        connection = post(url, "/generate", {**LONG, "max_tokens": 200, "stream": True})
        service.signal(signal.SIGTERM)
        assert b'"finish_reason":"length"' in read_all(connection)
        assert service.wait() in (0, 128 + signal.SIGTERM), service.output
    finally:
        service.stop()
