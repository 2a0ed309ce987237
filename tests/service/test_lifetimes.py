"""Start and end of a service, and the effect of replicas, process groups and signals: each test starts its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.service.asking import LONG, PROMPT, RUNTIMES, generate, metric, post, read_all
from tests.service.processes import ServiceProcess, eventually, running
from triptych.service.runtimes.ray_serve.haproxy import free_port


def test_a_second_signal_ends_it_at_once(models: list[str]) -> None:
    """Whichever came first, as one handler has both: the exit code is of the last.

    The metrics port answers meanwhile.
    """
    port = free_port()
    with running([*models, *RUNTIMES["local"], "--metrics-port", str(port)]) as service:
        monitored = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{monitored}/readyz").json() == {"status": "ok"}
        connection = post(service.url, "/generate", {**LONG, "stream": True})
        eventually(lambda: metric(service.url, "requests_running", model="gen") > 0)
        with service.held():
            service.signal(signal.SIGINT)
            eventually(lambda: httpx.get(f"{service.url}/readyz").status_code == 503)
            assert httpx.get(f"{monitored}/readyz").json()["error"]["code"] == "draining"
            assert httpx.get(f"{monitored}/livez").status_code == 200
            service.signal(signal.SIGTERM)
        assert service.wait() == 128 + signal.SIGTERM, service.output
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
            while not second and time.monotonic() - began < 60:
                try:
                    second = connection.recv(1 << 16)
                except TimeoutError:
                    connection.sendall(b"X: a\r\n")
            assert second.startswith(b"HTTP/1.1 408 ")
            assert 0.9 < time.monotonic() - began < 20


def test_an_interrupt_that_drained_is_still_an_interrupt(models: list[str]) -> None:
    """With a log of JSON every line is JSON, from the first one on, the banner too."""
    with running([*models, *RUNTIMES["local"], "--log-format", "json"]) as service:
        service.signal(signal.SIGINT)
        assert service.wait() == 128 + signal.SIGINT, service.output
    told = [json.loads(line)["message"] for line in service.output.splitlines()]
    assert "loading gen, enc" in told[0] and any("ready in" in one for one in told)


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_model_that_does_not_load_is_one_line_and_exit_code_2(models: list[str], runtime: str) -> None:
    service = ServiceProcess([*models, *RUNTIMES[runtime], "--max-model-len", "99999"])
    assert service.wait() == 2, service.output
    assert service.output.splitlines()[-1] == "triptych: gen: max_model_len 99999 is beyond the model's 2048 positions"


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
def test_a_request_is_cancelled_whichever_replica_is_asked(models: list[str]) -> None:
    with running([*models, *RUNTIMES["ray"], "--replicas", "2"]) as service:
        for attempt in range(4):  # the balancer takes the idle replica
            body = {**LONG, "ignore_eos": True, "stream": True, "request_id": f"r{attempt}"}
            connection = post(service.url, "/generate", body)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            cancelled = httpx.delete(f"{service.url}/requests/r{attempt}")
            assert (cancelled.status_code, cancelled.json()["cancelled"]) == (200, 1)
            assert b'"finish_reason":"cancelled"' in read_all(connection)
        assert httpx.delete(f"{service.url}/requests/r0").status_code == 404


@pytest.mark.slow
def test_models_that_were_loaded_later_outlive_a_replica(models: list[str], tmp_path: Path) -> None:
    shutil.copytree(models[0].partition("=")[2], tmp_path / "more")
    later = ["--models-dir", str(tmp_path), "--admin-key", "key"]
    with (
        running([*models, *later, *RUNTIMES["ray"], "--replicas", "2"]) as service,
        httpx.Client(base_url=service.url, headers={"Authorization": "Bearer key"}, timeout=60) as operator,
    ):

        def replicas(name: str) -> dict[str, int]:
            found = operator.get("/models").json()
            return next((one["replicas"] for one in found.get("models", ()) if one["name"] == name), {})

        reply = operator.post("/models/load", json={"name": "new", "path": "more", "settings": {"max_num_seqs": 8}})
        assert reply.json()["replicas"] == {"loaded": 2}, reply.text
        assert operator.post("/models/unload", json={"name": "enc"}).status_code == 200
        [killed, _] = [pid for pid, line in service.descendants().items() if "ServeReplica" in line]
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: replicas("new") == {"loaded": 2} and replicas("enc") == {"unloaded": 2}, 90)
        assert {generate(service.url, model="new")["choices"][0]["text"] for _ in range(8)} == {
            generate(service.url)["choices"][0]["text"]
        }
        assert operator.post("/models/unload", json={"name": "new"}).status_code == 200
        assert replicas("new") == {}


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
        eventually(lambda: metric(service.url, "replicas", model="gen") == 2)
        quiet = asyncio.run(load(25, 1))
        assert set(quiet) == {200}
        eventually(lambda: metric(service.url, "replicas", model="gen") == 1)


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
        eventually(lambda: metric(f"{service.url}/text", "requests_running", model="gen") > 0)
        service.signal(signal.SIGTERM)
        assert b'"finish_reason":"length"' in read_all(connection)
        assert service.wait() == 0, service.output


@pytest.mark.slow
def test_a_signal_between_ready_and_the_banner_drains_too(models: list[str]) -> None:
    port = free_port()
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "signalled"), [("gcs/gcs_server", True), ("gcs/gcs_server", False), ("raylet/raylet", False)]
)
def test_a_service_whose_ray_is_killed_ends_and_leaves_nothing(
    models: list[str], process: str, signalled: bool
) -> None:
    """Without the global control store nothing of Ray's answers any more, and what it started would stay: an HAProxy
    that listens where the next service is to.
    """
    with running([*models, *RUNTIMES["ray"], "--log-format", "json"]) as service:
        connection = post(service.url, "/generate", {**LONG, "max_tokens": 200, "stream": True})
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        started = service.descendants()
        (pid,) = (pid for pid, line in started.items() if line.split()[0].endswith(process))
        os.kill(pid, signal.SIGKILL)
        if signalled:
            service.signal(signal.SIGTERM)
        rest = read_all(connection)
        assert process == "raylet/raylet" or b"data: [DONE]" in rest
        began = time.monotonic()
        assert service.wait() in ((0, 1) if signalled else (1,)), service.output
        assert time.monotonic() - began < 60
        eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started))
        address = urlsplit(service.url)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address.hostname or "", address.port or 0))
        if not signalled:
            assert f"{process.rpartition('/')[2]} has ended" in service.output
