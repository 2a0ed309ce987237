"""The service as a person starts it, under each runtime: the same requests get the same answers.

All tests of a runtime share one service; the last test ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from lab.worst_bodies import many_tokens, worst_bodies
from tests.service.asking import (
    LONG,
    PROMPT,
    RUNTIMES,
    SAID,
    SPEECH,
    generate,
    long_transcription,
    metric,
    post,
    read_all,
    stream,
    transcribe,
)
from tests.service.http_conformance.cases import CASES
from tests.service.http_conformance.checks import failures
from tests.service.processes import ServiceProcess, eventually, running, strange_folder

PRETENDED_GPUS = {"RAY_OVERRIDE_RESOURCES": '{"GPU": 2}'}  # that Ray schedules by; torch finds none and uses the CPU
STACK = re.compile(r'(Current t|T)hread 0x|  File |.*\.py", line \d+ in ')  # what SIGUSR1 prints; pipes part lines


@pytest.fixture(
    scope="module",
    params=[
        "local",
        "ray",
        pytest.param("ray-default-proxy", marks=pytest.mark.slow),
    ],
)
def service(
    request: pytest.FixtureRequest, models: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("later")
    shutil.copytree(models[0].partition("=")[2], folder / "lazy")
    later = ["--models-dir", str(folder), "--admin-key", "of-an-operator"]
    # float32: in torch's bfloat16 and that of AMX tiles sums depend on the others in the batch.
    # Other tests may make the machine thirty times slower: running requests still get the time to end.
    options = [*later, *RUNTIMES[request.param], "--log-format", "json", "--dtype", "float32", "--drain-timeout", "100"]
    elsewhere = strange_folder(tmp_path_factory.mktemp("elsewhere"))
    with running([*models, SPEECH, *options], elsewhere, PRETENDED_GPUS) as started:
        yield started
    assert not (elsewhere / "imported").exists()


def order(base_url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    """What an operator posts."""
    return httpx.post(base_url + path, json=body, headers={"Authorization": "Bearer of-an-operator"}, timeout=60)


@pytest.fixture
def base_url(service: ServiceProcess) -> str:
    return service.url


def test_each_request_gets_its_reply_whatever_it_offers(
    service: ServiceProcess, request: pytest.FixtureRequest
) -> None:
    proxied = request.node.callspec.params["service"] == "ray"  # HAProxy is in front
    port = urlsplit(service.url).port
    assert port is not None and failures(port, CASES, proxied=proxied) == []


def test_many_idle_connections_leave_room_for_clients(base_url: str) -> None:
    target = urlsplit(base_url)
    opened = [socket.create_connection((target.hostname, target.port), 5) for _ in range(1_500)]
    try:
        assert httpx.get(f"{base_url}/livez", timeout=30).status_code == 200
    finally:
        for one in opened:
            one.close()


@pytest.mark.slow
def test_no_body_keeps_others_from_their_replies(base_url: str) -> None:
    slowest, done = 0.0, threading.Event()

    def ask() -> None:
        nonlocal slowest
        with httpx.Client(timeout=60) as client:
            while not done.wait(0.02):
                began = time.monotonic()
                assert client.get(f"{base_url}/v1/models").status_code == 200
                slowest = max(slowest, time.monotonic() - began)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        with httpx.Client(timeout=120, headers={"Content-Type": "application/json"}) as client:
            for worst in (*worst_bodies(), *many_tokens()):
                for values in (2_000_000, 49_900):
                    body = worst.of_model("enc" if b'"enc"' in worst.before else "gen").body(values=values)
                    reply = client.post(base_url + worst.route, content=body)
                    assert reply.status_code < 500, (worst.name, reply.text[:300])
    finally:
        done.set()
        asking.join()
    assert slowest < 1.0  # a machine that does other things


def test_it_is_ready_and_says_what_it_serves(base_url: str) -> None:
    for path in ("/livez", "/readyz", "/health"):
        assert httpx.get(f"{base_url}{path}").json() == {"status": "ok"}
    info = httpx.get(f"{base_url}/info").json()
    assert [(model["name"], model["state"]) for model in info["models"]] == [
        *(("gen", "loaded"), ("enc", "loaded"), ("speech", "loaded"), ("lazy", "available"))
    ]


def test_its_processes_have_the_niceness_that_it_was_started_with(service: ServiceProcess) -> None:
    """Ray's workers would have 15: next to a busy program the engine would get a thirtieth of a CPU."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    ours = [
        pid
        for pid, line in service.descendants().items()
        if "ServeReplica" in line or "-m triptych.model.engine " in line
    ]
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in ours} == {own}


def test_a_replica_has_a_gpu_of_its_own(service: ServiceProcess, request: pytest.FixtureRequest) -> None:
    assert service.visible_gpus() == [None if "local" in request.node.callspec.id else "0"]


def test_sigusr1_prints_the_stacks_of_front_and_engine(service: ServiceProcess) -> None:
    service.signal(signal.SIGUSR1)
    eventually(lambda: "cli/serve.py" in service.output and "engine/loop.py" in service.output)
    assert service.is_running


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
                call(b"", timeout=60)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_joined_deltas_are_the_unstreamed_text(base_url: str) -> None:
    whole = generate(base_url, max_tokens=60)
    events = [data for _, data in stream(base_url, {**PROMPT, "max_tokens": 60})]
    assert events[-1] == "[DONE]"
    parsed = [json.loads(data) for data in events[:-1]]
    assert "".join(event["choices"][0]["text"] for event in parsed) == whole["choices"][0]["text"]
    assert parsed[-1]["usage"] == whole["usage"]


def test_a_stream_arrives_as_it_is_made(base_url: str) -> None:
    for _ in range(10):  # what comes while this process or a proxy gets no CPU comes in one piece
        began = time.monotonic()
        arrivals = [at - began for at, _ in stream(base_url, {**PROMPT, "max_tokens": 300})]
        if arrivals[0] < arrivals[-1] / 3 and len(set(arrivals)) > 30:
            break
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
    connection = post(base_url, "/generate", {**LONG, "n": 8, "stream": streamed})  # seconds
    eventually(lambda: metric(base_url, "requests_running", model="gen") > 0)
    connection.close()
    eventually(lambda: metric(base_url, "requests_total", task="generate", outcome="cancelled") == cancelled + 1)
    eventually(lambda: metric(base_url, "requests_running") == 0)


def test_speech_is_transcribed_whole_and_as_a_stream(base_url: str) -> None:
    for asked in ({}, {"stream": "true"}, {"num_beams": "3"}):
        assert transcribe(base_url, **asked) == SAID
    cancelled = metric(base_url, "requests_total", task="generate", outcome="cancelled")
    connection = post(base_url, "/generate", long_transcription())
    head = b""
    while b"data: " not in head:
        part = connection.recv(1 << 16)
        assert part, head
        head += part
    connection.close()
    eventually(lambda: metric(base_url, "requests_total", task="generate", outcome="cancelled") == cancelled + 1)
    eventually(lambda: metric(base_url, "requests_running", model="speech") == 0)


def test_models_come_and_go_while_others_are_served(base_url: str) -> None:
    assert generate(base_url, model="lazy")["choices"] == generate(base_url)["choices"]
    connection = post(base_url, "/generate", {**LONG, "stream": True, "ignore_eos": True})
    reply = order(base_url, "/models/load", {"name": "new", "path": "lazy", "settings": {"quantization": "int8"}})
    assert (reply.status_code, reply.json()["replicas"]) == (200, {"loaded": 1}), reply.text
    assert b'"finish_reason":"length"' in read_all(connection)
    connection = post(base_url, "/generate", {**LONG, "model": "new", "n": 8, "stream": True, "ignore_eos": True})
    eventually(lambda: metric(base_url, "requests_running", model="new") > 0)
    reply = order(base_url, "/models/unload", {"name": "new", "drain_s": 0})
    assert (reply.status_code, reply.json()["state"]) == (200, "unloaded"), reply.text
    assert b'"finish_reason":"cancelled"' in read_all(connection)
    assert httpx.post(f"{base_url}/generate", json={**PROMPT, "model": "new"}).status_code == 404
    assert order(base_url, "/models/load", {"name": "new", "path": "../lazy"}).status_code == 400
    assert httpx.get(f"{base_url}/readyz").status_code == 200
    eventually(lambda: metric(base_url, "replicas", model="new") == 0)


def test_the_time_in_haproxy_is_told(service: ServiceProcess, request: pytest.FixtureRequest) -> None:
    def told() -> float:
        return metric(service.url, "proxy_seconds_count", model="gen")

    before, proxied = told(), request.node.callspec.params["service"] == "ray"
    generate(service.url)
    assert told() == before + proxied
    lines = [line for line in service.output.splitlines() if '"path":"/generate"' in line]
    assert (json.loads(lines[-1]).get("proxy_ms", -1) >= 0) == proxied


def test_accounts_add_up(base_url: str) -> None:
    eventually(lambda: metric(base_url, "requests_running") == 0)
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
    for name in ("X-Session-Id", "Serve-Multiplexed-Model-Id"):
        reply = httpx.post(f"{base_url}/generate", json=PROMPT, headers={name: b"\xff"}, timeout=60)  # type: ignore[dict-item]
        assert reply.status_code == 200, name


def test_a_killed_engine_fails_its_requests_and_comes_back(service: ServiceProcess) -> None:
    connection = post(service.url, "/generate", {**LONG, "n": 8, "stream": True})  # seconds
    eventually(lambda: metric(service.url, "requests_running", model="gen") > 0)
    os.kill(service.engine_pid(), signal.SIGKILL)
    reply = read_all(connection)
    assert b'"engine_failed"' in reply
    assert b"data: [DONE]" in reply
    assert httpx.get(f"{service.url}/readyz").status_code == 503
    assert httpx.get(f"{service.url}/livez").status_code == 200
    eventually(lambda: httpx.get(f"{service.url}/readyz").status_code == 200)
    generate(service.url)
    generate(service.url, model="lazy")
    eventually(lambda: metric(service.url, "engine_restarts_total", model="gen") == 1)


def test_sigterm_lets_what_runs_end_and_refuses_the_rest(service: ServiceProcess) -> None:
    started = set(service.descendants())
    connection = post(service.url, "/generate", {**LONG, "stream": True})
    eventually(lambda: metric(service.url, "requests_running", model="gen") > 0)
    with service.held():
        service.signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{service.url}/readyz").status_code == 503, 20)
        refused = httpx.post(f"{service.url}/generate", json=PROMPT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert "retry-after" in refused.headers
    reply = read_all(connection)
    assert b'"finish_reason":"length"' in reply
    assert b"data: [DONE]" in reply
    assert service.wait() == 0, service.output
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started))
    for line in service.output.rpartition("curl ")[2].splitlines()[1:]:
        if line and not STACK.match(line):
            assert json.loads(line)["message"], line  # nothing but our own log lines
