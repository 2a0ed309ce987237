"""The command `requests`, which measures what one request costs the service, in CPU time.

A service with the embedded models runs in processes of its own. A few connections that stay open send one kind of
request over and over, one after the other on each, and the CPU seconds of everything but the engine are divided by
their number. Refusals by a full queue are measured while the engine's process is stopped, so the queue stays full.
CPU time is disturbed less by other work on the machine than elapsed time, but not free of it: what `--rounds` repeats
is shown by its median and its least.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from lab.faults.site import Site
from triptych.loadtest.errors import ServerError
from triptych.loadtest.results import page
from triptych.loadtest.runs import flags, output

_KEY = "measured-by-loadtest"
_ENGINE = "-m triptych.model.engine "  # in its command line
_WORDS = "def add ( a , b ) : return a + b"
_SECONDS = 20.0  # for a reply
_MOST_QUEUED = 4_096  # requests, until the queue must be full
_QUEUED_TEXTS = 256  # at a time; the queue holds more
_COMPLETE = b"0\r\n\r\n"  # end of a reply in chunks


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request, with the reply that it must get."""

    path: str
    body: Mapping[str, Any]
    status: int = 200
    key: str = _KEY
    texts: int = 1  # by which the cost is divided

    def request(self) -> bytes:
        """Return the bytes of one request."""
        body = json.dumps(self.body).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.key}\r\nUser-Agent: loadtest"
        )
        return f"{head}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _generate(**fields: Any) -> dict[str, Any]:
    return {"model": "code", "prompt": _WORDS, "max_tokens": 1, **fields}


def _texts(count: int) -> dict[str, Any]:
    return {"model": "embed", "input": [f"{number} cats sat on a mat and looked at a dog" for number in range(count)]}


KINDS = {
    "/generate, 1 token": Kind("/generate", _generate()),
    "/generate, 1 token, streamed": Kind("/generate", _generate(stream=True)),
    "/v1/chat/completions, no template (400)": Kind(
        "/v1/chat/completions", {"model": "code", "messages": [{"role": "user", "content": "hi"}]}, 400
    ),
    "/v1/completions, 1 token": Kind("/v1/completions", _generate()),
    "/encode, 1 text": Kind("/encode", _texts(1)),
    "/encode, a text of 16": Kind("/encode", _texts(16), texts=16),
    "/encode, a text of 256": Kind("/encode", _texts(256), texts=256),
    "unknown field (400)": Kind("/generate", _generate(temprature=1), 400),
    "wrong key (401)": Kind("/generate", _generate(), 401, "wrong"),
    "unknown model (404)": Kind("/generate", _generate(model="none"), 404),
    "unknown route (404)": Kind("/nothing", _generate(), 404),
}
FULL = {
    "full queue (429)": Kind("/generate", _generate(), 429),
    "full queue, /v1/completions (429)": Kind("/v1/completions", _generate(), 429),
    "full queue, prompt of 1,500 characters (429)": Kind("/generate", _generate(prompt=_WORDS * 48), 429),
}


def add_command(commands: Any) -> None:
    text = "Start the service with the embedded models, and measure the CPU time of single requests and refusals."
    parser = commands.add_parser("requests", help="what a request costs the service", description=text)
    parser.add_argument("--connections", type=flags.positive, default=8, metavar="N", help="that send requests")
    parser.add_argument(
        "--requests", type=flags.positive, default=1_000, metavar="N", help="of each kind in a round; 4 N texts"
    )
    parser.add_argument("--rounds", type=flags.positive, default=3, metavar="N", help="repetitions")
    parser.add_argument("--only", default="", metavar="WORD", help="kinds whose name contains this")
    parser.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    arguments = ["--runtime", "local", "--api-key", _KEY, "--stall-timeout", "3600", "--drain-timeout", "1"]
    arguments += ["--max-queued-requests", "256"]  # soon full
    found: dict[str, list[float]] = {}
    with Site(arguments, every_core=True) as site:
        _measure(site, KINDS, options, found)
        if any(options.only in name for name in FULL):
            with _full_queue(site):
                _measure(site, FULL, options, found)
    for name, costs in found.items():
        print(f"{name}: {statistics.median(costs):,.0f} us, at least {min(costs):,.0f}", flush=True)
    about = {"kind": "requests", "commit": page.commit(), "machine": page.describe()}
    settings = {name: getattr(options, name) for name in ("connections", "requests", "rounds")}
    print(output.line(about | settings | {"service_us": found}), flush=True)
    return 0


def _measure(site: Site, kinds: Mapping[str, Kind], options: argparse.Namespace, found: dict[str, list[float]]) -> None:
    """Add to `found` the CPU microseconds of the kinds that were asked for."""
    for number in range(options.rounds + 1):  # the first is not counted
        for name, kind in kinds.items():
            if options.only in name:
                cost = _cost(site, kind, options)
                found.setdefault(name, []).extend([cost] if number else [])


def _cost(site: Site, kind: Kind, options: argparse.Namespace) -> float:
    """Return the CPU microseconds of a request, or of one of its texts, outside the engine."""
    count = max(1, min(options.connections, _QUEUED_TEXTS // kind.texts))
    wanted = options.requests if kind.texts == 1 else 4 * options.requests // kind.texts
    turns = -(-wanted // count)
    with ExitStack() as stack:
        connections = [stack.enter_context(Connection(site)) for _ in range(count)]
        _exchange(connections, kind, 2)
        before = _service_s(site)
        _exchange(connections, kind, turns)
        spent = _service_s(site) - before
    return 1e6 * spent / (turns * count * kind.texts)


def _exchange(connections: list[Connection], kind: Kind, turns: int) -> None:
    request = kind.request()
    for _ in range(turns):
        for connection in connections:
            connection.send(request)
        for connection in connections:
            if (status := connection.status()) != kind.status:
                raise ServerError(f"POST {kind.path}: expected {kind.status}, found {status}")


def _service_s(site: Site) -> float:
    return site.cpu_s() - site.cpu_s(_ENGINE)


@contextmanager
def _full_queue(site: Site) -> Iterator[None]:
    """Stop the engine's process inside the block, and fill its queue."""
    request = KINDS["/generate, 1 token"].request()
    with ExitStack() as stack:
        site.signal(_ENGINE, signal.SIGSTOP)
        try:
            for _ in range(_MOST_QUEUED):
                connection = stack.enter_context(Connection(site))
                connection.send(request)
                if connection.answers_soon():  # nothing but a refusal can come
                    break
            else:
                raise ServerError(f"the queue took {_MOST_QUEUED} requests")
            yield
        finally:
            site.signal(_ENGINE, signal.SIGCONT)


class Connection:
    """A connection of a client that waits for each reply."""

    def __init__(self, site: Site) -> None:
        self._socket = socket.create_connection(site.address, timeout=_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, request: bytes) -> None:
        self._socket.sendall(request)

    def answers_soon(self) -> bool:
        """Return whether a reply begins within 50 ms."""
        self._socket.settimeout(0.05)
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except TimeoutError:
            return False
        finally:
            self._socket.settimeout(_SECONDS)

    def status(self) -> int:
        """Read a reply to its end and return its status. Raises `ServerError` if it breaks off."""
        data = self._more(b"")
        while b"\r\n\r\n" not in data:
            data = self._more(data)
        head, _, body = data.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if b"content-length" in fields:
            left = int(fields[b"content-length"]) - len(body)
            while left > 0:
                left -= len(self._more(b""))
        else:
            while not body.endswith(_COMPLETE):
                body = self._more(body[-len(_COMPLETE) :])
        return int(head.split()[1])

    def _more(self, data: bytes) -> bytes:
        piece = self._socket.recv(1 << 20)
        if not piece:
            raise ServerError("the service closed a connection")
        return data + piece
