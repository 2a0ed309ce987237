"""The local runtime: each case on a connection of its own, to one server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.service.http_conformance.cases import CASES, Case, get, post
from tests.service.http_conformance.checks import check
from tests.service.http_conformance.raw import Client
from tests.service.support import live, make_app


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with live(make_app()) as url:
        found = urlsplit(url).port
        assert found is not None
        yield found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_request_gets_its_reply(port: int, case: Case) -> None:
    check(port, case)


@pytest.mark.parametrize("body", [b"", b"{}"])
def test_a_body_that_has_come_is_not_asked_for(port: int, body: bytes) -> None:
    with Client(port) as client:
        client.send([post(b"Expect: 100-continue", body=body)])
        assert client.reply() is not None and client.interim == []


@pytest.mark.parametrize("sent", [get(), post(), get() + post() + get()], ids=["GET", "POST", "three"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_client_that_closes_its_side_gets_its_replies(port: int, sent: bytes, version: bytes) -> None:
    sent = sent.replace(b"HTTP/1.1", b"HTTP/" + version)
    with Client(port) as client:
        client.send([sent])
        client.half_close()
        for _ in range(sent.count(b"HTTP/") if version == b"1.1" else 1):
            reply = client.reply()
            assert reply is not None and reply.status == 200
        assert client.is_at_end()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_waits_is_told_from_one_that_has_gone(streamed: bool) -> None:
    body = b'{"model": "gen", "prompt": "a", "max_tokens": 40, "stream": %b}' % (b"true" if streamed else b"false")
    app = make_app(delay_s=0.05)
    with live(app) as url:
        port = urlsplit(url).port
        assert port is not None
        with Client(port) as client:
            client.send([post(body=body)])
            client.half_close()
            reply = client.reply()
            assert reply is not None and reply.status == 200 and client.is_at_end()
            assert b"length" in reply.body and client.interim == ([] if streamed else [102])
        app.script.delay_s = 0.1
        with Client(port) as client:
            client.send([post(body=body.replace(b"40", b"50"))])
            while not app.client.running:
                time.sleep(0.01)
        begun = time.monotonic()
        while app.client.running:
            time.sleep(0.01)
        assert time.monotonic() - begun < 4  # the whole would take 5


def test_a_reply_of_a_service_that_drains_is_the_last() -> None:
    app = make_app()
    with live(app) as url:
        port = urlsplit(url).port
        assert port is not None
        with Client(port) as client, Client(port) as other:
            for one in (client, other):
                one.send([get()])
                reply = one.reply()
                assert reply is not None and not reply.closes
            app.service.begin_drain()
            for one, sent, status in ((client, get(), 200), (other, post(), 503)):
                one.send([sent])
                reply = one.reply()
                assert reply is not None and reply.closes and reply.status == status
                assert one.is_at_end()


def test_all_methods_of_a_path_are_told(port: int) -> None:
    for path, methods in ((b"/", b"GET, HEAD, POST"), (b"/generate", b"POST"), (b"/livez", b"GET, HEAD")):
        with Client(port) as client:
            client.send([get(path, method=b"DELETE")])
            reply = client.reply()
            assert reply is not None and (reply.status, reply.header(b"allow")) == (405, methods)
