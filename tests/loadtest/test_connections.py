"""The load generator's own HTTP: replies as servers send them, in pieces of any size, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from tests.engine.front import async_test
from triptych.loadtest.generator.connections import Connections

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
STREAM = CHUNKED + b"3\r\nabc\r\n" + b"4\r\ndefg\r\n" + b"0\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nabcdefg"


@dataclass
class Server:
    """Answers each request with the next of `replies`: pieces, some milliseconds apart; a None closes."""

    replies: list[Sequence[bytes | None]]
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
                )
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.replies.pop(0):
                    if piece is None:
                        return
                    writer.write(piece)
                    await asyncio.sleep(0.003)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def talking(
    *replies: Sequence[bytes | None], timeout_s: float = 60.0
) -> AsyncIterator[tuple[Connections, Server]]:
    server = Server(list(replies))
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    connections = Connections(f"http://127.0.0.1:{port}/generate?a=b", "key", timeout_s)
    try:
        yield connections, server
    finally:
        await connections.aclose()
        listener.close()


async def body_of(connections: Connections) -> bytes:
    async with connections.post(b"{}") as reply:
        assert reply.status == 200
        return await reply.read()


@async_test
async def test_a_request_says_what_it_must() -> None:
    async with talking([SIZED]) as (connections, server):
        await body_of(connections)
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    assert (first, body) == ("POST /generate?a=b HTTP/1.1", b"{}")
    headers = dict(line.split(": ", 1) for line in lines)
    assert headers["Host"].startswith("127.0.0.1:")
    assert (headers["Authorization"], headers["Content-Length"]) == ("Bearer key", "2")
    assert headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("whole", [STREAM, SIZED, b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED])
@async_test
async def test_replies_come_in_pieces_of_any_size_over_one_connection(whole: bytes) -> None:
    splits = [[whole[at : at + size] for at in range(0, len(whole), size)] for size in (1, 5, 17, 1000)]
    async with talking(*splits) as (connections, server):
        for _ in splits:
            assert await body_of(connections) == b"abcdefg"
        assert server.connections == 1


@async_test
async def test_pieces_are_handed_on_as_they_come_with_their_times() -> None:
    pieces = [CHUNKED, b"3\r\nabc\r\n", b"4\r\ndefg\r\n", b"0\r\n\r\n"]
    found: list[tuple[bytes, float]] = []

    def sink(piece: bytes, at: float) -> float:
        found.append((piece, at))
        assert 0 <= time.monotonic() - at < 60
        return 0.0

    async with talking(pieces) as (connections, _), connections.post(b"{}") as reply:
        assert reply.headers["content-type"] == "text/event-stream"
        while len(reply._early) < 2:
            await asyncio.sleep(0.001)
        listens = time.monotonic()  # both have come before anybody listens: the times are those of then
        await reply.each(sink)
    assert [piece for piece, _ in found] == [b"abc", b"defg"]
    assert found[0][1] < found[1][1] < listens


@async_test
async def test_a_sink_that_wants_time_gets_it() -> None:
    found: list[float] = []

    def sink(piece: bytes, at: float) -> float:
        found.append(at)
        return 0.05

    async with talking([CHUNKED, *[b"1\r\na\r\n"] * 4, b"0\r\n\r\n"], [SIZED]) as (connections, server):
        began = time.monotonic()
        async with connections.post(b"{}") as reply:
            await reply.each(sink)
        assert time.monotonic() - began >= 0.19
        assert len(found) == 4
        assert await body_of(connections) == b"abcdefg"
        assert server.connections == 1


@async_test
async def test_a_connection_is_not_used_again_when_the_server_says_so_or_the_client_left() -> None:
    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 7\r\n\r\nabcdefg"
    until_end = b"HTTP/1.1 200 OK\r\n\r\nabcdefg"
    async with talking([closing], [until_end, None], [STREAM[:-20]], [SIZED]) as (connections, server):
        assert await body_of(connections) == b"abcdefg"
        assert await body_of(connections) == b"abcdefg"
        async with connections.post(b"{}") as reply:
            assert reply.status == 200
        assert await body_of(connections) == b"abcdefg"
        assert server.connections == 4


@async_test
async def test_one_that_the_server_closed_in_the_meantime_is_replaced() -> None:
    async with talking([SIZED, None], [SIZED]) as (connections, server):
        assert await body_of(connections) == b"abcdefg"
        await asyncio.sleep(0.05)
        assert await body_of(connections) == b"abcdefg"
        assert server.connections == 2


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ([None], httpx.RemoteProtocolError),
        ([STREAM[:-7], None], httpx.RemoteProtocolError),
        ([SIZED[:-1], None], httpx.RemoteProtocolError),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], httpx.RemoteProtocolError),
        ([CHUNKED + b"zz\r\nabc\r\n"], httpx.RemoteProtocolError),
        ([CHUNKED], httpx.ReadTimeout),
        ([], httpx.ReadTimeout),
    ],
    ids=["nothing", "cut stream", "cut body", "not http", "bad chunk", "silence in it", "silence"],
)
@async_test
async def test_incomplete_replies_are_errors(reply: Sequence[bytes | None], error: type[Exception]) -> None:
    silent = error is httpx.ReadTimeout
    async with talking(reply, timeout_s=0.2 if silent else 60.0) as (connections, _):
        with pytest.raises(error):
            await body_of(connections)


@async_test
async def test_nobody_there_is_an_error_of_connecting() -> None:
    with pytest.raises(httpx.ConnectError):
        await body_of(Connections("http://127.0.0.1:9/generate", "", 5.0))


@async_test
async def test_an_exception_of_the_sink_ends_the_reply() -> None:
    def sink(piece: bytes, at: float) -> float:
        raise KeyError(piece)

    async def give_to_it(connections: Connections) -> None:
        async with connections.post(b"{}") as reply:
            await reply.each(sink)

    async with talking([STREAM], [SIZED]) as (connections, server):
        with pytest.raises(KeyError):
            await give_to_it(connections)
        assert await body_of(connections) == b"abcdefg"
        assert server.connections == 2
