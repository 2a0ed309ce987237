"""Refusals by a full queue that the server answers before it calls the application, and what it leaves to that."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.types import Receive, Scope, Send

from service.app import Application
from service.core.request_context import current
from service.http.early_refusal import REFUSING
from service.settings.service_settings import Limits, ServiceSettings
from tests.service.dialects.support import talker
from tests.service.support import App, counted, live, make_app

KEY = "k" * 32
BODY = {"model": "gen", "prompt": "ab", "request_id": "mine-1"}
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "w1"}]}
BODIES = {"/generate": BODY, "/v1/completions": BODY, "/v1/chat/completions": CHAT}


@pytest.fixture(scope="module")
def app() -> App:
    talks = talker()
    limits = Limits(max_body_bytes=4_000, max_header_bytes=2_000)
    return make_app(talks, settings=ServiceSettings(api_keys=(KEY,), limits=limits), queue_full="queue_requests")


@pytest.fixture(scope="module")
def url(app: App) -> Iterator[str]:
    with live(app) as found:
        yield found


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths for which the application was called."""
    found: list[str] = []
    call = Application.__call__

    async def spied(self: Application, scope: Scope, receive: Receive, send: Send) -> None:
        found.append(scope["path"])
        await call(self, scope, receive, send)

    monkeypatch.setattr(Application, "__call__", spied)
    return found


def request(path: str, body: Any, *headers: str, kind: str = "application/json", key: str = KEY) -> tuple[bytes, bytes]:
    """Head and body of a POST."""
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Type: {kind}", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join([*lines, f"Authorization: Bearer {key}", "", ""]).encode(), content


def replies(url: str, *pieces: bytes, count: int = 1) -> list[bytes]:
    """What is answered to these pieces, each sent by itself."""
    found = b""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number, piece in enumerate(pieces):
            if number:
                time.sleep(0.05)  # so that the server does not read two at once
            connection.sendall(piece)
        while len(parts := re.split(rb"(?=HTTP/1\.1 )", found)[1:]) < count or not parts[-1].endswith(b"}"):
            data = connection.recv(1 << 16)
            assert data, found
            found += data
    return parts


def plain(reply: bytes) -> bytes:
    """Without what no two replies have in common."""
    return re.sub(rb"(x-request-id: (?!mine)|date: )[^\r]*", rb"\1", reply)


@pytest.mark.parametrize("path", sorted(REFUSING))
def test_it_is_the_applications_refusal(
    app: App, url: str, called: list[str], caplog: pytest.LogCaptureFixture, path: str
) -> None:
    head, body = request(path, BODIES[path])
    seen = []
    with caplog.at_level(logging.INFO, "triptych.access"):
        for pieces in ([head + body], [head, body]):
            before = counted(app, "triptych_rejections_total"), counted(app, "triptych_requests_received_total")
            (reply,) = replies(url, *pieces)
            after = counted(app, "triptych_rejections_total"), counted(app, "triptych_requests_received_total")
            more = [{key: now[key] - was.get(key, 0) for key in now} for was, now in zip(before, after, strict=True)]
            record: Any = caplog.records.pop()
            line = {name: value for name, value in record.fields.items() if name != "ms"}
            seen.append((plain(reply), more, line))
    assert called == [path]  # for the request in two pieces
    assert seen[0] == seen[1]
    assert seen[0][0].startswith(b"HTTP/1.1 429 Too Many Requests\r\n") and b"\r\nretry-after: 3\r\n" in seen[0][0]
    model = BODIES[path]["model"]
    assert seen[0][1][0][model, "queue_requests"] == seen[0][1][1]["generate",] == 1
    assert (b"\r\nx-request-id: mine-1\r\n" in seen[0][0]) == (model == "gen")
    slot = app.service.models.get(str(model))
    assert slot is not None and not slot.users
    assert not app.client.submitted


def chunked(path: str, body: Any) -> tuple[bytes, bytes]:
    """The same, of a body that does not say how long it is."""
    head, content = request(path, body)
    head = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", head)
    return head, b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)


LEFT = {
    "a wrong key": (request("/generate", BODY, key="wrong"), 401),
    "another type": (request("/generate", BODY, kind="text/plain"), 415),
    "large headers": (request("/generate", BODY, f"X-Large: {'x' * 2_000}"), 431),
    "a large body": (request("/generate", {**BODY, "prompt": "x" * 4_000}), 413),
    "a large body in chunks": (chunked("/generate", {**BODY, "prompt": "x" * 4_000}), 413),
    "another model": (request("/generate", {**BODY, "model": "none"}), 404),
    "another route": (request("/generate_stream", {"inputs": "ab", "model": "gen"}), 429),
    "a wait for 100": (request("/generate", BODY, "Expect: 100-continue"), 100),
}


@pytest.mark.parametrize("name", LEFT)
def test_all_else_is_left_to_the_application(app: App, url: str, called: list[str], name: str) -> None:
    (head, body), status = LEFT[name]
    found = replies(url, head + body, count=2 if status == 100 else 1)
    assert found[0].startswith(b"HTTP/1.1 %d " % status) and len(called) == 1


def test_with_room_or_while_it_drains_it_is_the_applications_too(
    app: App, url: str, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, body = request("/generate", {**BODY, "max_tokens": 2})
    with monkeypatch.context() as patch:
        patch.setattr(app.script, "queue_full", None)
        assert replies(url, head + body)[0].startswith(b"HTTP/1.1 200 ")
    monkeypatch.setattr(app.service, "_draining", True)
    assert replies(url, head + body)[0].startswith(b"HTTP/1.1 503 ")
    assert called == ["/generate"] * 2


def test_a_connection_goes_on_and_ends_as_the_client_asks(url: str, called: list[str]) -> None:
    whole, last = (b"".join(request("/generate", BODY, *more)) for more in ((), ("Connection: close",)))
    first, second, third = replies(url, whole, whole + last, count=3)
    assert plain(first) == plain(second) and b"connection" not in first
    assert b"\r\nconnection: close\r\n" in third
    assert called == ["/generate"]  # for one that had to wait for the reply of another
    assert plain(replies(url, last)[0]) == plain(third)


def test_what_the_server_does_next_is_in_no_requests_context(app: App) -> None:
    headers = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {KEY}".encode())]
    scope = {"path": "/generate", "method": "POST", "headers": headers}
    found = app.app.refusals.of(scope, bytearray(json.dumps(BODY).encode()))
    assert found is not None and found[0] == 429
    assert current() is None
