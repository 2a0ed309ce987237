"""Several front processes over one engine, as a person starts them: one service, which the last test ends.

What one front process does, `test_runtimes` asks of several too.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvloop

from model.api.stats import Health
from model.client.async_engine import AsyncEngine
from model.client.counts import SharedTable
from model.client.relay import Relay, RelayClient
from model.errors import ConfigError
from service.app import create_app
from service.core.errors import ApiError
from service.core.model_registry import ServedModel
from service.runtimes.fronts import hub as hub_module
from service.runtimes.fronts import messages as m
from service.runtimes.fronts.connections import ConnectionGiver
from service.runtimes.fronts.front import Front
from service.runtimes.fronts.hub import Hub
from service.runtimes.fronts.link import Link
from service.runtimes.fronts.messages import Stop, ToWorker
from service.runtimes.fronts.mirror import MirroredRegistry
from service.runtimes.fronts.worker import HubClient, Worker
from service.settings.resolve import resolve_config
from tests.service.asking import (
    LONG,
    PROMPT,
    SAID,
    SPEECH,
    generate,
    long_transcription,
    metric,
    post,
    read_all,
    transcribe,
)
from tests.service.processes import ServiceProcess, eventually, running
from tests.service.support import served

_MOST = 6  # requests that are admitted: 4 run, 2 wait
_ENDLESS = {**LONG, "stream": True, "ignore_eos": True}
_ADMIN = {"Authorization": "Bearer of-an-operator"}
_FRONTS = ["--runtime", "local", "--front-processes", "2", "--log-format", "json", "--dtype", "float32"]


@pytest.fixture(scope="module")
def service(models: list[str]) -> Iterator[ServiceProcess]:
    limits = ["--max-num-seqs", "4", "--max-queued-requests", "2", "--request-timeout-s", "120"]
    with running([*models, SPEECH, *_FRONTS, *limits, "--admin-key", "of-an-operator"]) as started:
        yield started


@pytest.fixture
def base_url(service: ServiceProcess) -> Iterator[str]:
    yield service.url
    if service.is_running:
        eventually(lambda: metric(service.url, "requests_running") == 0)
        eventually(lambda: metric(service.url, "kv_blocks", state="used") == 0)


def front_pids(service: ServiceProcess) -> list[int]:
    return [pid for pid, line in service.descendants().items() if "fronts.worker" in line]


def order(base_url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(base_url + path, json=body, headers=_ADMIN, timeout=60)


def status(connection: socket.socket) -> int:
    """The status of a reply whose head has come, or will."""
    return int(connection.recv(12, socket.MSG_PEEK | socket.MSG_WAITALL).split()[1])


def is_answered(connection: socket.socket) -> bool:
    try:
        return bool(read_all(connection))
    except ConnectionResetError:  # its front has gone with a request that it had not read
        return False


def start_streams(base_url: str, count: int) -> list[socket.socket]:
    """As many streams that run; each front process has every other one."""
    time.sleep(0.3)  # until it is known that the connections before are closed
    connections = [post(base_url, "/generate", _ENDLESS) for _ in range(count)]
    eventually(lambda: metric(base_url, "requests_running", model="gen") == count)
    return connections


def test_all_fronts_give_the_same_answers(service: ServiceProcess, base_url: str) -> None:
    texts = [generate(base_url, request_id=f"same-{i}")["choices"][0]["text"] for i in range(4)]
    assert texts == [texts[0]] * 4
    lines = [line for line in service.output.splitlines() if '"request_id":"same-' in line]
    assert {'"front":1' in line for line in lines} == {True, False}
    info = httpx.get(f"{base_url}/info").json()
    assert (info["front_processes"], [model["name"] for model in info["models"]]) == (2, ["gen", "enc", "speech"])
    assert metric(base_url, "requests_accepted_total", model="gen") == 4


def test_all_fronts_transcribe(service: ServiceProcess, base_url: str) -> None:
    assert [transcribe(base_url, request_id=f"said-{i}") for i in range(4)] == [SAID] * 4
    lines = [line for line in service.output.splitlines() if '"request_id":"said-' in line]
    assert {'"front":1' in line for line in lines} == {True, False}
    words = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    assert [transcribe(base_url, **words) for _ in range(2)] == [SAID] * 2
    connections = [post(base_url, "/generate", long_transcription(4)) for _ in range(4)]
    ends = [read_all(connection) for connection in connections]
    texts = {b"".join(re.findall(rb'"text":"([^"]*)"', end)) for end in ends}
    assert len(texts) == 1 and all(b'"finish_reason":"stop"' in end for end in ends)


def test_requests_are_admitted_up_to_the_limit_of_all_fronts_together(service: ServiceProcess, base_url: str) -> None:
    with service.held():
        connections = [post(base_url, "/generate", {**_ENDLESS, "max_tokens": 20}) for _ in range(_MOST + 3)]
        assert Counter(map(status, connections)) == {200: _MOST, 429: 3}
    replies = [read_all(connection) for connection in connections]
    assert sum(b'"finish_reason":"length"' in reply for reply in replies) == _MOST
    assert metric(base_url, "rejections_total", model="gen", reason="queue_requests") == 3
    generate(base_url)


def test_a_request_is_cancelled_by_way_of_any_front(base_url: str) -> None:
    for _ in range(2):  # the one that has the request, and the other one
        connection = post(base_url, "/generate", {**_ENDLESS, "request_id": "to-cancel"})
        eventually(lambda: metric(base_url, "requests_running", model="gen") == 1)
        reply = httpx.delete(f"{base_url}/requests/to-cancel")
        assert (reply.status_code, reply.json()["cancelled"]) == (200, 1)
        assert b'"finish_reason":"cancelled"' in read_all(connection)
    assert httpx.delete(f"{base_url}/requests/to-cancel").status_code == 404


def test_models_come_and_go_in_all_fronts(base_url: str) -> None:
    def statuses() -> list[int]:
        asked = {"model": "enc", "input": "x"}
        return [httpx.post(f"{base_url}/encode", json=asked, timeout=60).status_code for _ in range(4)]

    assert statuses() == [200] * 4
    assert order(base_url, "/models/unload", name="enc").json()["state"] == "unloaded"
    assert statuses() == [404] * 4
    assert order(base_url, "/models/load", name="enc").json()["state"] == "loaded"
    assert statuses() == [200] * 4
    assert httpx.get(f"{base_url}/models").status_code == 401
    assert order(base_url, "/models/load", name="enc", extra=1).status_code == 400


def test_unloading_ends_the_requests_of_all_fronts(base_url: str) -> None:
    connections = start_streams(base_url, 2)
    assert order(base_url, "/models/unload", name="gen", drain_s=0).status_code == 200
    for connection in connections:
        assert b'"finish_reason":"cancelled"' in read_all(connection)
    assert order(base_url, "/models/load", name="gen").status_code == 200
    generate(base_url)


def test_a_killed_front_loses_its_own_streams_and_is_replaced(service: ServiceProcess, base_url: str) -> None:
    eventually(lambda: metric(base_url, "requests_accepted_total") == metric(base_url, "requests_total"))
    tokens = metric(base_url, "generation_tokens_total")
    connections = start_streams(base_url, 4)
    killed, other = front_pids(service)
    with service.held():
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: killed not in front_pids(service))
    replies = [read_all(connection) for connection in connections]
    whole = [b'"finish_reason":"length"' in reply and b"data: [DONE]" in reply for reply in replies]
    assert sorted(whole) == [False, False, True, True]
    assert not any(b"[DONE]" in reply for reply, ended in zip(replies, whole, strict=True) if not ended)
    assert metric(base_url, "requests_total", model="gen", outcome="error") == 2
    assert metric(base_url, "requests_accepted_total") == metric(base_url, "requests_total")
    assert metric(base_url, "generation_tokens_total") >= tokens + 2 * _ENDLESS["max_tokens"]
    eventually(
        lambda: (
            "front process 1 serves" in service.output.rpartition("by signal SIGKILL")[2]
            or "front process 2 serves" in service.output.rpartition("by signal SIGKILL")[2]
        )
    )
    assert other in front_pids(service)
    assert len(front_pids(service)) == 2
    for _ in range(_MOST):  # as many as ever are admitted
        generate(base_url)


def test_a_killed_front_loses_its_own_transcriptions(service: ServiceProcess, base_url: str) -> None:
    eventually(lambda: metric(base_url, "requests_accepted_total") == metric(base_url, "requests_total"))
    accepted = metric(base_url, "requests_accepted_total", model="speech")
    time.sleep(0.3)  # until it is known that the connections before are closed
    with service.held():
        connections = [post(base_url, "/generate", long_transcription(4)) for _ in range(4)]
        eventually(lambda: metric(base_url, "requests_accepted_total", model="speech") == accepted + 4)
        killed = front_pids(service)[0]
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: killed not in front_pids(service))
    replies = [read_all(connection) for connection in connections]
    assert sorted(b"data: [DONE]" in reply for reply in replies) == [False, False, True, True]
    assert metric(base_url, "requests_total", model="speech", outcome="error") == 2
    eventually(lambda: metric(base_url, "requests_accepted_total") == metric(base_url, "requests_total"))
    eventually(lambda: len(front_pids(service)) == 2)
    assert transcribe(base_url) == SAID


def test_sigterm_lets_the_streams_of_all_fronts_end(service: ServiceProcess, base_url: str) -> None:
    started = set(service.descendants())
    connections = start_streams(base_url, 2)
    with service.held():
        service.signal(signal.SIGTERM)
        eventually(lambda: {httpx.get(f"{base_url}/readyz").status_code for _ in range(2)} == {503})
    for connection in connections:
        assert b'"finish_reason":"length"' in read_all(connection)
    assert service.wait() == 0, service.output
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started))


@pytest.mark.slow  # 20 s
def test_a_front_that_hangs_is_ended_and_replaced(models: list[str]) -> None:
    with running([*models, *_FRONTS, "--stall-timeout", "4"]) as service:
        hung, other = front_pids(service)
        os.kill(hung, signal.SIGSTOP)
        connections = [post(service.url, "/generate", PROMPT) for _ in range(2)]
        eventually(lambda: "has given no sign for 4 s" in service.output)
        assert sorted(map(is_answered, connections)) == [False, True]
        eventually(lambda: len(front_pids(service)) == 2 and hung not in front_pids(service))
        assert other in front_pids(service)
        generate(service.url)


@pytest.mark.slow  # 15 s
def test_an_engine_that_is_killed_fails_the_requests_of_all_fronts(models: list[str]) -> None:
    with running([*models, *_FRONTS]) as service:
        connections = start_streams(service.url, 2)
        os.kill(service.engine_pid(), signal.SIGKILL)
        for connection in connections:
            reply = read_all(connection)
            assert b'"engine_failed"' in reply and b"data: [DONE]" in reply
        eventually(lambda: [httpx.get(f"{service.url}/readyz").status_code for _ in range(4)] == [200] * 4)
        for _ in range(2):
            generate(service.url)


def test_ray_has_replicas_instead() -> None:
    with pytest.raises(ConfigError, match="front_processes must be 1 with the Ray runtime, found 2; use --replicas"):
        resolve_config({"a": {"path": "/a"}}, {"front_processes": 2})
    with pytest.raises(ConfigError, match="front_processes must be 1 to 64, found 0"):
        resolve_config({"a": {"path": "/a"}}, {"front_processes": 0, "runtime": "local"})


def test_a_message_to_a_process_that_has_gone_is_lost() -> None:
    """It once broke the reading of the engine's frames: uvloop raises where asyncio does not."""

    async def send_late() -> None:
        own, other = socket.socketpair()
        link = await Link.over(own, ToWorker)
        link.send(Stop())
        other.close()
        async for _ in link.receive():
            raise AssertionError
        for _ in range(3):
            link.send(Stop())
            await asyncio.sleep(0.01)
        assert link.unsent_bytes == 0
        link.close()
        link.send(Stop())

    uvloop.run(send_late())


# -- parts, without processes

_CONFIG = resolve_config({"a": {"path": "/a"}}, {"front_processes": 2, "runtime": "local"})


def make_hub(*models: ServedModel) -> Hub:
    """A hub with models that it has not loaded; no process is started."""
    table = SharedTable(3, 0)
    registry = MirroredRegistry(models, {}, table.row_of, pickle=False)
    app = create_app(AsyncEngine([], lambda: pytest.fail("an engine is started"), {}), registry, _CONFIG.settings)
    return Hub(_CONFIG, app, registry, Relay(), table)


async def make_worker(
    link: socket.socket, connections: socket.socket, number: int = 1, table: SharedTable | None = None
) -> Worker:
    hello = m.Hello(_CONFIG, number, 3, b"secret")
    descriptor = (table or SharedTable(3, 0)).descriptor
    return Worker(hello, await Link.over(link, ToWorker), connections, descriptor)


async def until(what: Any) -> None:
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.01)


def test_a_worker_serves_again_after_a_loss_of_the_engine_that_a_change_of_models_meets() -> None:
    async def run() -> None:
        own, other = socket.socketpair()
        worker = await make_worker(own, socket.socket())
        works = [asyncio.create_task(work) for work in (worker._follower.run(), worker._announce())]
        worker._receive(m.AllSent())
        worker._receive(m.EngineHealth(Health(live=True, ready=True)))
        worker._receive(m.EngineReady(1))
        await until(lambda: worker._engine.health().ready)
        worker._receive(m.EngineLost("it ended"))
        assert not worker._engine.health().ready
        worker._receive(m.Available("b", None, "/nowhere", pickle=False))
        worker._receive(m.EngineReady(2))  # while the folder is being read
        await until(worker._follower.applied.is_set)
        assert worker._engine.health().ready
        for work in works:
            work.cancel()
        other.close()

    asyncio.run(run())


def test_workers_hold_audio_within_one_limit() -> None:
    async def run() -> None:
        table, limits, links = SharedTable(3, 0), _CONFIG.settings.limits, [socket.socketpair() for _ in range(2)]
        workers = [await make_worker(own, socket.socket(), at, table) for at, (own, _) in enumerate(links, 1)]
        first, second = (worker._service.speech_planner.room for worker in workers)
        large = first.enter()
        large.hold(limits.max_audio_held_bytes)
        with pytest.raises(ApiError, match="bytes"):
            second.enter(1)
        with pytest.raises(ApiError, match="bytes"):
            second.enter().hold(1)
        large.release()
        for _ in range(limits.max_audio_requests):
            first.enter().put(b"file")
        with pytest.raises(ApiError, match="audio files"):
            second.enter()
        assert (second.num_files, second.num_bytes) == (limits.max_audio_requests, 4 * limits.max_audio_requests)
        table.clear(1)  # the first worker has ended
        assert (second.num_files, second.num_bytes) == (0, 0)

    asyncio.run(run())


def test_a_connection_that_a_worker_has_no_descriptor_for_is_not_counted_as_open() -> None:
    async def run() -> None:
        own, other = socket.socketpair()
        connections, hub = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker = await make_worker(own, connections)
        hub.send(b"c")  # as it comes where the system has dropped the descriptor
        worker._take_connections(None)  # type: ignore[arg-type]  # there is nothing to serve
        assert worker._accepted == 1
        for one in (other, hub):
            one.close()

    asyncio.run(run())


def test_a_client_that_leaves_while_it_sends_a_body_for_the_hub_is_no_fault() -> None:
    async def run() -> None:
        own, other = socket.socketpair()
        worker = await make_worker(own, socket.socket())
        replies: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            replies.append(message)

        head = {"type": "http", "method": "POST", "path": "/models/load", "headers": [], "query_string": b""}
        await worker._app(head, receive, send)
        assert replies[0]["status"] == 499
        other.close()

    asyncio.run(run())


def test_a_question_that_is_given_up_as_its_refusal_comes_stays_given_up() -> None:
    async def run() -> None:
        sent: list[Any] = []
        hub = HubClient(SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
        asking = asyncio.create_task(hub.ask(m.HoldModel(0, "r", "gone", "generate", 0.0)))
        await asyncio.sleep(0)
        fields = {"status": 404, "message": "gone", "type": "not_found_error", "code": "model_not_found"}
        hub.answer(m.Failed(sent[0].ask, fields))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(run())


def test_a_process_that_cannot_be_started_is_tried_again_or_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        hub, tries = make_hub(), list[int]()

        def refused(number: int, counts: int) -> None:
            tries.append(number)
            hub._ending = len(tries) == 3
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(hub_module, "Front", refused)
        monkeypatch.setattr(hub_module, "_PAUSES", (0.0,))
        await hub._keep(1)
        assert (hub.failed.result(), tries) == ("front process 1 ended before it began: Too many open files", [1])
        hub._was_ready = True
        await hub._keep(2)
        assert tries == [1, 2, 2]

    asyncio.run(run())


def test_nothing_waits_for_a_process_that_starts() -> None:
    async def run() -> None:
        hub, told = make_hub(), list[Any]()
        never = asyncio.Event()
        starting: Any = SimpleNamespace(listening=False, drained=never, gone=never, send=told.append)
        hub.fronts.append(starting)
        async with asyncio.timeout(60):
            assert await hub._cancel("of-nobody") == 0
            await hub.drain()
        assert told == [m.Drain()], "it refuses requests once it serves"

    asyncio.run(run())


def test_a_worker_that_stood_still_while_a_model_went_may_tell_late_that_it_held_it() -> None:
    """It was ended for that, with all of its streams."""

    async def run() -> None:
        hub, taken = make_hub(served("gen", "decoder-only", None)), []
        hub._relay = SimpleNamespace(take=lambda *work: taken.append(work))  # type: ignore[assignment]
        front = Front.__new__(Front)  # without its process
        front.client, front._held = RelayClient(front), {}
        hub._registry.remove("gen")
        hub._take(front, m.RawWork(1, held={0: 2}))
        hub._take(front, m.RawWork(1, held={0: -1}))
        assert [held for _, held in front._held.values()] == [1]
        front.let_go()
        assert len(taken) == 2 and hub._service.models.get("gen") is None

    asyncio.run(run())


def test_connections_without_a_descriptor_are_logged_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    def refused() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def run() -> None:
        giver = ConnectionGiver(lambda: ())
        giver._listener = SimpleNamespace(accept=refused)  # type: ignore[assignment]
        for _ in range(3):
            giver._accept()

    asyncio.run(run())
    lines = [record.message for record in caplog.records if record.name == "triptych.front"]
    assert lines == ["a connection could not be accepted: Too many open files"]
