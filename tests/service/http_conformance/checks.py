"""Holds a server to a case: one request, at most one reply; the status; the connection's fate, as it is told."""

from __future__ import annotations

from tests.service.http_conformance.cases import Case, get
from tests.service.http_conformance.raw import Client


def check(port: int, case: Case) -> None:
    """Send a case; where the connection is kept, one more request must get one more reply, and no other."""
    with Client(port) as client:
        client.send(case.segments)
        for at, status in enumerate(case.statuses):
            reply = client.reply(case.methods[at] if case.methods else b"GET")
            assert reply is not None, f"no reply {at + 1}"
            assert reply.status == status, reply
            is_last = at + 1 == len(case.statuses)
            assert reply.closes == (is_last and not case.kept), reply
        if case.kept:
            client.send([get(b"/livez", b"X-Request-Id: the-end", b"Connection: close")])
            reply = client.reply()
            assert reply is not None and reply.status == 200 and reply.header(b"x-request-id") == b"the-end", reply
        assert client.is_at_end()
