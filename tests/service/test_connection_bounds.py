"""What all connections hold together: bodies that are being sent or answered, and connections without a request."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import httpx
import pytest

from tests.service.support import ask, live, make_app, run
from triptych.service.http.connections import IdleConnections
from triptych.service.settings.service_settings import Limits, ServiceSettings

KEY = "k" * 20


class Fake:
    def __init__(self) -> None:
        self.closed = False

    def close_idle(self) -> None:
        self.closed = True


def test_the_oldest_idle_connections_are_closed_unknown_ones_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (10, 10))
    idle, made = IdleConnections(3), [Fake() for _ in range(9)]
    with caplog.at_level(logging.WARNING, "triptych.connections"):
        for one in made[:4]:
            idle.add(one, is_known=False)
        assert [one.closed for one in made[:4]] == [True, False, False, False]
        idle.remove(made[1])  # has a request
        for one in made[4:7]:
            idle.add(one, is_known=True)
        assert sum(one.closed for one in made) == 1 and len(idle) == 5  # half of the descriptors
        for one in made[7:]:
            idle.add(one, is_known=True)
    assert [one.closed for one in made] == [True, False, True, True, False, False, False, False, False]
    assert len(caplog.records) == 1 and "max_idle_connections" in caplog.text


@contextmanager
def connections(url: str, number: int) -> Iterator[list[socket.socket]]:
    found = urlsplit(url)
    made = [socket.create_connection((found.hostname, found.port), timeout=5) for _ in range(number)]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def is_open(one: socket.socket, path: str, key: str = "") -> bool:
    """Whether a connection still answers, and stays open."""
    try:
        one.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nx-api-key: {key}\r\n\r\n".encode())
        return one.recv(65_536).startswith(b"HTTP/1.1 ")
    except OSError:
        return False


def test_idle_connections_without_a_key_are_bounded_and_those_with_one_stay() -> None:
    settings = ServiceSettings(api_keys=(KEY,), limits=Limits(max_idle_connections=4))
    with live(make_app(settings=settings)) as url, connections(url, 2) as known:
        assert all(is_open(one, "/v1/models", KEY) for one in known)
        with connections(url, 10) as unknown:
            time.sleep(0.1)
            assert [is_open(one, "/livez") for one in unknown] == [False] * 6 + [True] * 4
            assert all(is_open(one, "/v1/models", "wrong") for one in unknown[6:])
            with connections(url, 4):  # a wrong key and an open path make no client known
                time.sleep(0.1)
                assert not any(is_open(one, "/livez") for one in unknown)
                assert all(is_open(one, "/v1/models", KEY) for one in known)


_UNDER_A_LOW_LIMIT = """
import resource, socket, time
from urllib.parse import urlsplit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
from triptych.service.http.connections import raise_descriptor_limit
raise_descriptor_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (128, 128)
from tests.service.support import live, make_app
with live(make_app()) as url:
    print(url, flush=True)
    input()
"""


def test_connections_without_a_request_do_not_use_up_the_descriptors() -> None:
    command = [sys.executable, "-c", _UNDER_A_LOW_LIMIT]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    try:
        url = server.stdout.readline().strip()
        with connections(url, 200):
            time.sleep(0.3)
            for _ in range(3):
                assert httpx.get(f"{url}/livez", timeout=5).status_code == 200
    finally:
        with suppress(BrokenPipeError):
            server.communicate("\n", timeout=30)


def test_bodies_of_all_connections_have_a_bound() -> None:
    app = make_app(settings=ServiceSettings(limits=Limits(max_held_body_bytes=250_000)))
    go = asyncio.Event()

    async def slow() -> object:
        yield b'{"model": "gen", "max_tokens": 1, "prompt": "' + b" " * 119_900
        await go.wait()
        yield b'"}'

    async def work(client: httpx.AsyncClient) -> None:
        headers = {"content-type": "application/json"}
        sent = [asyncio.create_task(client.post("/generate", content=slow(), headers=headers)) for _ in range(2)]
        await asyncio.sleep(0.05)
        large = {"model": "gen", "prompt": "a" * 120_000}
        refused = await client.post("/generate", json=large)
        assert refused.status_code == 429 and refused.headers["retry-after"], refused.text
        assert "max_held_body_bytes" in refused.json()["error"]["message"]
        small = await client.post("/generate", json={"model": "gen", "prompt": "a", "max_tokens": 1})
        assert small.status_code == 200
        go.set()
        assert {reply.status_code for reply in await asyncio.gather(*sent)} == {400}  # the prompt is too long
        assert (await client.post("/generate", json=large)).status_code == 400
        assert (await client.get("/info")).json()["limits"]["max_held_body_bytes"] == 250_000

    run(app, work)


def test_a_body_that_is_alone_has_room() -> None:
    app = make_app(settings=ServiceSettings(limits=Limits(max_held_body_bytes=70_000)))
    for _ in range(2):
        assert ask(app, "POST", "/generate", json={"model": "gen", "prompt": "a" * 120_000}).status_code == 400
