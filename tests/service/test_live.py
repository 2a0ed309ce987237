"""Disconnects, stalls, keep-alive and limits over real sockets."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.service.support import App, check_accounts, events, live, make_app
from tests.service.test_bad_requests import check_error
from triptych.service.http.bounded_protocol import BoundedProtocol
from triptych.service.settings.service_settings import Limits, ServiceSettings

LONG = {"model": "gen", "prompt": "ab", "max_tokens": 50}


def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


def settings(**limits: Any) -> ServiceSettings:
    return ServiceSettings(limits=Limits(**limits))


def settled(app: App) -> None:
    """Nothing runs any more and the accounts add up."""

    def adds_up() -> bool:  # a client has its answer before it is accounted for
        with suppress(AssertionError):
            check_accounts(app)
            return True
        return False

    with suppress(AssertionError):  # which says less than the next
        eventually(adds_up)
    time.sleep(0.02)
    check_accounts(app)


def test_a_stream_arrives_piece_by_piece() -> None:
    app = make_app(delay_s=0.3)
    with (
        live(app) as url,
        httpx.stream("POST", f"{url}/generate", json={**LONG, "max_tokens": 10, "stream": True}) as reply,
    ):
        pieces = reply.iter_raw()
        next(pieces)
        assert app.client.running  # the rest is still to be made
        app.script.delay_s = 0.0
        assert len(list(pieces)) >= 2
        assert "content-length" not in reply.headers
    settled(app)


def test_each_event_is_one_piece_and_the_end_comes_with_the_last() -> None:
    app = make_app(delay_s=0.001)
    with live(app) as url:
        connection = _post(url, "/generate", {**LONG, "max_tokens": 10, "stream": True})
        raw = b""
        while not raw.endswith(b"0\r\n\r\n"):
            raw += connection.recv(65536)
        connection.close()
        settled(app)
    body = raw.partition(b"\r\n\r\n")[2]
    pieces = []
    while body:
        size, _, body = body.partition(b"\r\n")
        pieces.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    assert pieces.pop() == b""
    assert len(pieces) == 10
    assert all(piece.startswith(b"data: {") and piece.endswith(b"}\n\n") for piece in pieces[:-1])
    assert pieces[-1].count(b"data: ") == 2
    assert pieces[-1].endswith(b"\n\ndata: [DONE]\n\n")


def test_a_stream_passes_the_layers_around_it_by() -> None:
    app = make_app()
    seen: list[str] = []
    inner = app.app.build_middleware_stack()

    async def stack(scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Any) -> None:
            seen.append(message["type"])
            await send(message)

        await inner(scope, receive, noted)

    app.app.middleware_stack = stack
    with live(app) as url:
        text = httpx.post(f"{url}/generate", json={**LONG, "max_tokens": 10, "stream": True}).text
        assert len(events(text)) == 11
        settled(app)
    assert [one for one in seen if one.startswith("http.")] == ["http.response.start", "http.response.body"]  # the end


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(stream: bool) -> None:
    app = make_app(delay_s=0.2)
    with live(app) as url:
        connection = _post(url, "/generate", {**LONG, "stream": stream})
        eventually(lambda: app.client.running)
        connection.close()
        eventually(lambda: app.client.aborted)
        settled(app)
    assert len(app.client.aborted) == 1


def test_a_client_that_leaves_aborts_its_encoding() -> None:
    app = make_app(delay_s=60)
    with live(app) as url:
        connection = _post(url, "/encode", {"input": ["w1", "w2"]})
        eventually(lambda: app.client.running)
        connection.close()
        eventually(lambda: len(app.client.aborted) == 2)
        settled(app)


def test_keep_alive_comments_fill_a_silence() -> None:
    app = make_app(delay_s=0.5, settings=settings(stream_keepalive_s=0.05))
    with live(app) as url:
        text = httpx.post(f"{url}/generate", json={**LONG, "max_tokens": 2, "stream": True}).text
    assert text.count(": keep-alive\n\n") >= 3
    assert events(text)[-1] == "[DONE]"
    settled(app)


def test_a_stream_that_nobody_reads_is_aborted() -> None:
    app = make_app("bare", settings=settings(stream_stall_s=0.3, max_logprobs=299, default_max_tokens=50))
    app.script.token_ids = [0]
    with live(app) as url:
        body = {"model": "bare", "prompt": [1] * 10, "stream": True, "logprobs": 299, "n": 8, "max_tokens": 50}
        connection = _post(url, "/generate", body, receive_buffer=2048)
        eventually(lambda: app.client.aborted)
        connection.close()
        settled(app)
    assert len(app.client.aborted) == 1


def test_bodies_are_bounded_declared_and_streamed() -> None:
    app = make_app(settings=settings(max_body_bytes=1000))
    with live(app) as url:
        declared = httpx.post(f"{url}/generate", json={"prompt": "a" * 2000})
        check_error(declared, 413, None, "body_too_large")
        headers = {"content-type": "application/json"}
        streamed = httpx.post(f"{url}/generate", content=(b" " * 100 for _ in range(20)), headers=headers)
        check_error(streamed, 413, None, "body_too_large")
        assert httpx.post(f"{url}/generate", json=LONG).status_code == 200
        settled(app)


def test_headers_are_bounded() -> None:
    app = make_app()
    with live(app) as url:
        many = httpx.get(f"{url}/info", headers={f"x-{i}": "1" for i in range(101)})
        check_error(many, 431, None, "headers_too_large")
        large = httpx.get(f"{url}/info", headers={"x-large": "1" * 16_400})
        check_error(large, 431, None, "headers_too_large")
        assert httpx.get(f"{url}/info").status_code == 200


HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("begin", "status"),
    [
        (b"GET /info HTTP/1.1\r\nX-", b"431"),
        (b"GET /info HTTP/1.1\r\nX-Large: ", b"431"),
        (b"GET /", b"431"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-Trailer: ", b""),
    ],
    ids=["name", "value", "path", "trailer"],
)
def test_a_head_that_never_ends_is_cut_off(begin: bytes, status: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    app, received = make_app(settings=settings(max_audio_bytes=1_000)), Counter[BoundedProtocol]()
    receive = BoundedProtocol.data_received

    def noted(protocol: BoundedProtocol, data: bytes) -> None:
        received[protocol] += len(data)
        receive(protocol, data)

    monkeypatch.setattr(BoundedProtocol, "data_received", noted)
    with live(app) as url:
        connection = _connect(url)
        connection.sendall(begin)
        assert _flood(connection, 40_000_000) < 20_000_000  # what sockets hold at most
        connection.close()
        connection = _connect(url)
        connection.sendall(begin)
        # What comes in one piece with a body counts from the next piece on.
        eventually(lambda: len(begin) in received.values())
        with suppress(ConnectionError):
            connection.sendall(b"a" * 70_000)
        assert _answer(connection).startswith(b"HTTP/1.1 " + status if status else b"")
        connection.close()
        assert httpx.get(f"{url}/info").status_code == 200
        settled(app)


@pytest.mark.parametrize(
    ("begin", "more", "status"),
    [
        (b"GET /info HTTP/1.1\r\n", b"X: a\r\n", b"HTTP/1.1 408 "),
        (HEAD + b"Content-Length: 1000\r\n\r\n", b" ", b"HTTP/1.1 408 "),
        (b"", b"", b""),  # nothing was asked, so nothing is answered
    ],
    ids=["head", "body", "nothing"],
)
def test_a_request_that_dribbles_is_ended(begin: bytes, more: bytes, status: bytes) -> None:
    app = make_app(settings=settings(receive_s=0.3))
    with live(app) as url:
        began = time.monotonic()
        connection = _connect(url)
        connection.settimeout(0.05)
        connection.sendall(begin)
        reply = None
        while reply is None and time.monotonic() - began < 60:
            try:
                reply = _answer(connection)
            except TimeoutError:
                with suppress(ConnectionError):
                    connection.sendall(more)
        assert reply is not None and reply.startswith(status)
        assert time.monotonic() - began > 0.25
        if status:
            assert b'"code":"request_too_slow"' in reply
            connection.settimeout(60)
            assert _answer(connection) == b""  # and closed
        eventually(lambda: httpx.post(f"{url}/generate", json=LONG).status_code == 200)  # this client may be late too
        settled(app)


def test_requests_on_one_connection_are_timed_apart() -> None:
    app = make_app(settings=settings(receive_s=1.0))
    with live(app) as url, httpx.Client() as client:
        for _ in range(4):
            assert client.post(f"{url}/generate", json=LONG).status_code == 200
            time.sleep(0.3)
        time.sleep(1.0)  # idle between requests for longer: that is the keep-alive's to end
        assert client.get(f"{url}/info").status_code == 200
        settled(app)


def test_invalid_http_gets_a_400_in_the_error_shape() -> None:
    with live(make_app()) as url:
        connection = _connect(url)
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        reply = connection.recv(1 << 16)
        assert reply.startswith(b"HTTP/1.1 400 ")
        assert b'"code":"invalid_http"' in reply
        connection.close()


def test_a_slow_body_that_breaks_off_is_forgotten() -> None:
    app = make_app()
    with live(app) as url:
        connection = _connect(url)
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.sendall(b'Content-Length: 100\r\n\r\n{"prompt":')
        connection.close()
        eventually(lambda: app.metrics.registry.get_sample_value(*_CLOSED) == 1)
        assert httpx.post(f"{url}/generate", json=LONG).status_code == 200
        settled(app)


_KEY = b"Authorization: Bearer secret\r\n"
_BODY = b"Content-Length: 300000\r\n\r\n"
_CHUNK = b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n493e0\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HEAD + _KEY + _BODY, b"413"),
        (HEAD + _KEY + b"Connection: close\r\n" + _BODY, b"413"),
        (HEAD.replace(b"1.1", b"1.0") + _KEY + _BODY, b"413"),
        (HEAD + _KEY + _CHUNK, b"413"),
        (HEAD + b"Connection: close\r\n" + _BODY, b"401"),
        (HEAD + _KEY + b"Connection: close\r\nX: " + b"a" * 20_000 + b"\r\n" + _BODY, b"431"),
        (HEAD.replace(b"generate", b"nowhere") + _KEY + _CHUNK, b"404"),
        (b"GET /info HTTP/1.1\r\nX: ", b"431"),
        (b"what is this\r\n\r\n", b"400"),
    ],
    ids=["keep-alive", "close", "HTTP/1.0", "chunked", "key", "headers", "path", "head", "no HTTP"],
)
def test_a_client_that_only_writes_sees_why_it_is_refused(head: bytes, status: bytes) -> None:
    """(A16)"""
    app = make_app(settings=ServiceSettings(api_keys=("secret",), limits=Limits(max_body_bytes=100_000)))
    with live(app) as url:
        connection = _connect(url)
        connection.sendall(head)
        for _ in range(30):  # a close that reads nothing breaks the second of them
            connection.sendall(b"a" * 10_000)
            time.sleep(0.005)
        assert _answer(connection).startswith(b"HTTP/1.1 " + status)
        connection.close()
        settled(app)


def test_a_slow_client_that_only_writes_sees_why_it_is_refused() -> None:
    app = make_app(settings=settings(receive_s=0.3))
    with live(app) as url:
        connection = _connect(url)
        connection.sendall(HEAD + _BODY)
        began = time.monotonic()
        while time.monotonic() - began < 0.5:
            connection.sendall(b" ")
            time.sleep(0.01)
        assert _answer(connection).startswith(b"HTTP/1.1 408 ")
        connection.close()
        settled(app)


def test_the_body_of_a_refused_request_is_drained_within_limits() -> None:
    app = make_app(settings=settings(max_body_bytes=1_000, max_audio_bytes=1_000))
    with live(app) as url:
        for more in (b"Connection: close\r\n", b""):
            connection = _connect(url)
            connection.sendall(HEAD + more + b"Content-Length: 40000000\r\n\r\n")
            assert _flood(connection, 40_000_000) < 20_000_000  # what sockets hold at most
            connection.close()
        settled(app)


_CLOSED = ("triptych_rejections_total", {"model": "", "reason": "client_closed"})


def _connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    where = urlsplit(url)
    connection.connect((where.hostname, where.port))
    return connection


def _answer(connection: socket.socket) -> bytes:
    """Return the next data; empty if the other side closed, even without reading ours."""
    try:
        return connection.recv(1 << 16)
    except ConnectionError:
        return b""


def _flood(connection: socket.socket, most: int) -> int:
    """Return the bytes that were sent before the connection broke."""
    for sent in range(0, most, 10_000):
        try:
            connection.sendall(b"a" * 10_000)
        except OSError:
            return sent
        time.sleep(0.001)
    return most


def _post(url: str, path: str, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    """Return a connection that has sent a request and reads nothing."""
    raw = json.dumps(body).encode()
    connection = _connect(url, receive_buffer)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection
