"""Holds a server to a case: one request, at most one reply; the status; the connection's fate, as it is told."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from tests.service.http_conformance.cases import OTHER_PROTOCOLS, Case, get
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


def check_behind_proxy(port: int, case: Case, *, may_reload: bool = False) -> None:
    """Send a case through a proxy, then a request of another client: each gets its own replies, or a refusal.

    A case that a proxy does not have to refuse or to change gets the statuses that the service gives. A proxy that
    `may_reload` may say with any reply that it closes the connection.
    """
    with ExitStack() as connections:
        client, other = (connections.enter_context(Client(port)) for _ in range(2))
        client.send(case.segments)
        replies = []
        for at, status in enumerate(case.statuses):
            reply = client.reply(case.methods[at] if case.methods else b"GET")
            if reply is None or reply.closes:
                replies += [reply] if reply else []
                break
            replies.append(reply)
            assert reply.status in (status, 200) or 400 <= reply.status != 404, reply  # /smuggled is a 404
        if not case.direct and not case.name.startswith("upgrade"):
            is_cut = may_reload and bool(replies) and replies[-1].closes
            assert [reply.status for reply in replies] == list(case.statuses[: len(replies) if is_cut else None]), (
                replies
            )
        for at in range(2):
            name = b"other-%d" % at
            other.send([get(b"/livez", b"X-Request-Id: " + name)])
            reply = other.reply()
            assert reply is not None and (reply.status, reply.header(b"x-request-id")) == (200, name), reply
            if may_reload and reply.closes:
                other = connections.enter_context(Client(port))


def failures(port: int, cases: Iterable[Case], *, proxied: bool = False) -> list[str]:
    """Return what fails of `cases`, and why."""
    found = []
    for case in cases:
        if proxied and (case.unfinished or case.name in OTHER_PROTOCOLS):
            continue
        tries: list[str] = []  # a busy server may get segments together that were sent apart
        while len(tries) < 3 and "" not in tries:
            try:
                # Serve reloads HAProxy when it hears of a replica, which may be just after the service is ready.
                check_behind_proxy(port, case, may_reload=True) if proxied else check(port, case)
                tries.append("")
            except (AssertionError, TimeoutError) as error:
                tries.append(f"{case.name}: {str(error)[:300]}")
        if "" not in tries:
            found.append(tries[-1])
    return found
