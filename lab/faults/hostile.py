"""Hostile clients on raw sockets. Each function returns what happened to its connections, in words."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lab.faults.site import Site

PATIENCE_S = 35.0
STALL_PATIENCE_S = 75.0
_LARGE = 20_000_000
_PIECE = b"X-Large: " + b"a" * 1000 + b"\r\n"
_HEAD = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def never_read(site: Site, model: str) -> str:
    """Request a stream of several MB and read none of it; the service ends it after `stream_stall_s`."""
    body = {"model": model, "prompt": "def", "stream": True, "max_tokens": 900, "n": 8, "logprobs": 20}
    raw = json.dumps(body | {"ignore_eos": True, "temperature": 1.0}).encode()
    cancelled = site.metric("requests_total", model=model, outcome="cancelled")
    with _connected(site, 1, receive_buffer=4096) as (connection,):
        connection.sendall(f"{_HEAD}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        seconds = _until(
            lambda: site.metric("requests_total", model=model, outcome="cancelled") >= cancelled + 1, STALL_PATIENCE_S
        )
    return (
        f"counted as cancelled after {seconds:.1f} s"
        if seconds is not None
        else f"not cancelled in {STALL_PATIENCE_S:g} s"
    )


def stay_idle(site: Site, connections: int = 2000, seconds: float = 10.0) -> str:
    """Connect and send nothing."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with _connected(site, connections) as opened:
        time.sleep(seconds)
        left = sum(not _closed(one) for one in opened)
        memory = site.memory_mb()
    return f"{len(opened)} connected, {left} still so after {seconds:g} s; {memory:.0f} MiB meanwhile"


def send_large_headers(site: Site) -> str:
    """Send 20 MB of headers."""
    with _connected(site, 1) as (connection,):
        sent = 0
        with contextlib.suppress(OSError):
            connection.sendall(b"GET /info HTTP/1.1\r\nHost: x\r\n")
            while sent < _LARGE:
                connection.sendall(_PIECE)
                sent += len(_PIECE)
            connection.sendall(b"\r\n")
        memory = site.memory_mb()
        return f"{_answer(connection, 5)} after {sent / 1e6:.1f} MB; {memory:.0f} MiB meanwhile"


def never_end_headers(site: Site) -> str:
    """Send a header line at intervals, on twenty connections."""

    def more(connection: socket.socket, number: int) -> None:
        connection.sendall(b"X-%d: a\r\n" % number)

    return _dribble(site, b"GET /info HTTP/1.1\r\nHost: x\r\n", more)


def dribble_body(site: Site) -> str:
    """Send a byte of a body at intervals, on twenty connections."""

    def more(connection: socket.socket, number: int) -> None:
        connection.sendall(b" ")

    return _dribble(site, f"{_HEAD}Content-Length: 100000\r\n\r\n".encode(), more)


def _dribble(site: Site, begin: bytes, more: Callable[[socket.socket, int], None]) -> str:
    with _connected(site, 20) as opened:
        for connection in opened:
            connection.sendall(begin)
        began, number = time.monotonic(), 0
        ends: list[float] = []
        answers: set[str] = set()
        while opened and time.monotonic() - began < PATIENCE_S:
            time.sleep(0.5)
            number += 1
            for connection in list(opened):
                try:
                    more(connection, number)
                    over = _closed(connection)
                except OSError:
                    over = True
                if over:
                    ends.append(time.monotonic() - began)
                    answers.add(_answer(connection, 1))
                    opened.remove(connection)
                    connection.close()
    if not ends:
        return f"none of {len(opened)} ended in {PATIENCE_S:g} s"
    return f"{', '.join(sorted(answers))}: {len(ends)} of 20 ended after {max(ends):.1f} s"


@contextmanager
def _connected(site: Site, count: int, receive_buffer: int = 0) -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            connection = socket.socket()
            opened.append(connection)
            if receive_buffer:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            connection.settimeout(10)
            connection.connect(site.address)
        yield opened
    finally:
        for connection in opened:
            connection.close()


def _closed(connection: socket.socket) -> bool:
    """Return whether data or the end of the connection has arrived."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(10)


def _answer(connection: socket.socket, seconds: float) -> str:
    """Return the status of the reply, or how the connection ended."""
    connection.settimeout(seconds)
    try:
        line = connection.recv(1 << 16).split(b"\r\n")[0].decode("latin-1")
    except TimeoutError:
        return "no answer"
    except OSError:
        return "reset"
    return line.partition(" ")[2] or "closed"


def _until(condition: Callable[[], bool], seconds: float) -> float | None:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return None
        time.sleep(0.1)
    return time.monotonic() - began
