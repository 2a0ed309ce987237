"""The HTTP protocol over a transport and a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from triptych.service.app import TABLE
from triptych.service.core.errors import ApiError
from triptych.service.http import bounded_protocol as bounded_protocol_module
from triptych.service.http.bodies import cancel_on_disconnect
from triptych.service.http.bounded_protocol import BoundedProtocol, bounded_protocol
from triptych.service.http.connections import LOSS, ConnectionLoss
from triptych.service.settings.service_settings import Limits

_made: list[Connection] = []
LIMITS = Limits(
    receive_s=60.0, stream_stall_s=30.0, max_body_bytes=100_000, max_audio_bytes=1_000_000, max_file_bytes=1_000_000
)


class Timer:
    """A callback that is due, unless it is cancelled."""

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """Tasks are the running loop's, time is the test's."""

    def __init__(self) -> None:
        self.create_task = asyncio.get_running_loop().create_task
        self.call_soon = asyncio.get_running_loop().call_soon
        self.now = 0.0
        self.timers: list[Timer] = []

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now + seconds, callback))
        return self.timers[-1]

    def wait(self, seconds: float) -> None:
        self.now += seconds
        while due := [one for one in self.timers if one.when <= self.now and not one.cancelled]:
            due[0].cancelled = True
            due[0].callback()


class Transport(asyncio.Transport):
    """Holds what was written until the client takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: Any = None
        self.written = b""
        self.unread = 0
        self.ended = ""
        self.half_closed = False
        self.is_reading = True

    def write(self, data: Any) -> None:
        self.written += data
        self.unread += len(data)
        if self.unread > 65_536:
            self.protocol.pause_writing()

    def take(self, size: int) -> None:
        self.unread -= size
        if self.unread <= 16_384:
            self.protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.ended = "aborted"
        self.protocol.connection_lost(None)

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def is_closing(self) -> bool:
        return bool(self.ended)

    def write_eof(self) -> None:
        self.half_closed = True

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


class Connection:
    """A client's side of one connection to an application that answers at once.

    The client reads all of the replies, or what the test takes.
    """

    def __init__(
        self, size: int = 100, *, reads: bool = True, protocols: Callable[..., BoundedProtocol] | None = None
    ) -> None:
        self.loop = Loop()
        self.reads = reads
        self.transport = Transport()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await Response(b"x" * size)(scope, receive, send)

        config: Any = uvicorn.Config(answer, ws="none", lifespan="off", log_config=None, timeout_keep_alive=75)
        loop: Any = self.loop
        self.protocol = (protocols or bounded_protocol(LIMITS))(config, ServerState(), {}, loop)
        self.transport.protocol = self.protocol
        self.protocol.connection_made(self.transport)
        _made.append(self)

    async def send(self, data: bytes) -> None:
        """And let the application answer what is complete."""
        if not self.transport.ended:
            self.protocol.data_received(data)
        for _ in range(5):
            await asyncio.sleep(0)
        if self.reads:
            self.transport.take(self.transport.unread)


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**arguments: Any) -> None:
        async def main() -> None:
            try:
                await test(**arguments)
            finally:
                while _made:  # an application that waits for the client waits no more
                    _made.pop().transport.abort()

        asyncio.run(main())

    return run


LENGTH = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [(LENGTH, b"a"), (CHUNKED, b"1\r\na\r\n"), (CHUNKED + b"0\r\nX-Trailer: ", b"a"), (LENGTH, b"")],
    ids=["length", "chunks", "trailer", "nothing"],
)
@in_a_loop
async def test_a_body_that_goes_on_after_its_answer_is_ended(begin: bytes, more: bytes) -> None:
    client = Connection()
    await client.send(begin)
    answer = client.transport.written
    assert answer.startswith(b"HTTP/1.1 200 ")
    for _ in range(59):
        client.loop.wait(1)
        assert not client.transport.ended
        if more:
            await client.send(more)
    client.loop.wait(1)
    assert client.transport.ended == "closed"
    assert client.transport.written == answer  # what came after it would be taken for the next answer


@in_a_loop
async def test_a_reply_without_a_body_comes_before_the_refusal_of_the_next_request() -> None:
    client = Connection()
    client.protocol.data_received(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.sleep(0)  # until it is answered; its head is sent in the turn after that
    client.protocol.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n")
    statuses = [reply[:3] for reply in client.transport.written.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"400"]


@in_a_loop
async def test_a_body_that_ends_after_its_answer_leaves_the_connection_to_the_next_request() -> None:
    client = Connection()
    for _ in range(3):
        await client.send(LENGTH + b"a" * 50_000)
        client.loop.wait(50)
        await client.send(b"a" * 50_000)
        client.loop.wait(50)  # idle
        assert not client.transport.ended
    assert client.transport.written.count(b"HTTP/1.1 200 ") == 3


@in_a_loop
async def test_the_next_head_has_seconds_of_its_own() -> None:
    client = Connection()
    await client.send(LENGTH + b"a" * 99_999)
    client.loop.wait(50)
    await client.send(b"a")
    await client.send(b"GET / HTTP/1.1\r\n")
    client.loop.wait(50)
    assert not client.transport.ended
    client.loop.wait(10)
    assert client.transport.half_closed and b"HTTP/1.1 408 " in client.transport.written
    client.loop.wait(60)
    assert client.transport.ended == "closed"


CLOSING = LENGTH.replace(b"Host", b"Connection: close\r\nHost")


@pytest.mark.parametrize("path", [b"/v1/audio/transcriptions", b"/group/v1/files"])
@in_a_loop
async def test_the_rest_of_a_file_that_is_refused_is_drained(path: bytes) -> None:
    client = Connection()
    length = LENGTH.replace(LENGTH.split(b" ")[1], path, 1).replace(b"100000", b"100000000")
    await client.send(length)
    for _ in range(10):
        await client.send(b"a" * 100_000)
        assert not client.transport.ended
    await client.send(b"a")
    assert client.transport.ended == "closed"


@pytest.mark.parametrize("begin", [LENGTH, CLOSING, b"\x16\x03\x01\r\n\r\n"], ids=["keep-alive", "close", "no HTTP"])
@in_a_loop
async def test_draining_is_limited_in_bytes(begin: bytes) -> None:
    client = Connection()
    length = begin.replace(b"100000", b"100000000")
    await client.send(length)
    assert client.transport.written.startswith(b"HTTP/1.1 ")
    assert client.transport.half_closed == (begin is not LENGTH)
    for _ in range(8):
        await client.send(b"a" * LIMITS.max_body_bytes)
        assert not client.transport.ended
    await client.send(b"a")
    assert client.transport.ended == "closed"


@in_a_loop
async def test_a_connection_that_is_to_be_closed_is_drained_for_seconds() -> None:
    client = Connection()
    await client.send(CLOSING + b"a")
    answer = client.transport.written
    client.loop.wait(59)
    await client.send(b"a" * 99_999 + GET + b"\r\n")
    assert not client.transport.ended and client.transport.half_closed
    client.loop.wait(1)
    assert client.transport.ended == "closed" and client.transport.written == answer


@in_a_loop
async def test_a_connection_whose_request_is_complete_is_closed_with_its_reply() -> None:
    client = Connection()
    await client.send(CLOSING + b"a" * 100_000)
    assert client.transport.ended == "closed" and not client.transport.half_closed


@pytest.mark.parametrize("begin", [LENGTH, CLOSING], ids=["keep-alive", "close"])
@in_a_loop
async def test_few_connections_of_a_server_are_drained_at_a_time(begin: bytes) -> None:
    protocols = bounded_protocol(LIMITS)
    clients = [Connection(protocols=protocols) for _ in range(66)]
    for client in clients[:65]:
        await client.send(begin)
        assert client.transport.written.startswith(b"HTTP/1.1 200 ")
    assert [client.transport.ended for client in clients[:65]] == [""] * 64 + ["closed"]
    if begin is LENGTH:
        await clients[0].send(b"a" * 100_000)  # the whole body was read
    else:
        clients[0].transport.abort()  # the client closed
    await clients[65].send(begin)
    assert not clients[65].transport.ended


GET = b"GET / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize("size", [1_000, 1_000_000])
@pytest.mark.parametrize("more", [b"\r\n", b"Connection: close\r\n\r\n"], ids=["keep-alive", "close"])
@in_a_loop
async def test_a_reply_that_nobody_reads_is_thrown_away(size: int, more: bytes) -> None:
    client = Connection(size, reads=False)
    await client.send(GET + more)
    client.loop.wait(29)
    assert client.transport.ended != "aborted"
    client.loop.wait(1)
    assert client.transport.ended == "aborted"


@in_a_loop
async def test_a_reply_that_is_read_slowly_is_read_to_its_end() -> None:
    client = Connection(1_000_000, reads=False)
    await client.send(GET + b"\r\n")
    while client.transport.unread:
        client.transport.take(min(12_345, client.transport.unread))
        client.loop.wait(29)
        assert client.transport.ended != "aborted"
    client.loop.wait(1_000)
    assert client.transport.ended == "closed"  # idle at last, and before with a rest that its closing lets out


@in_a_loop
async def test_a_rest_that_nobody_reads_is_thrown_away_too() -> None:
    client = Connection(1_000_000, reads=False)
    await client.send(GET + b"\r\n")
    client.loop.wait(29)
    client.transport.take(client.transport.unread - 10)
    client.loop.wait(30)
    assert client.transport.ended != "aborted"
    client.loop.wait(30)
    assert client.transport.ended == "aborted"


@in_a_loop
async def test_requests_whose_replies_nobody_reads_do_not_keep_the_connection() -> None:
    client = Connection(10_000, reads=False)
    for _ in range(20):
        await client.send(GET + b"\r\n")
        client.loop.wait(10)
    assert client.transport.ended == "aborted"
    assert client.transport.unread < 100_000


@in_a_loop
async def test_a_reply_that_was_read_leaves_the_connection_to_the_next_request() -> None:
    client = Connection(1_000_000)
    for _ in range(3):
        await client.send(GET + b"\r\n")
        client.loop.wait(70)
        assert not client.transport.ended


class Answering(Connection):
    """A connection to an application of the test's own."""

    def __init__(self, application: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self.protocol.app = application  # type: ignore[assignment]
        self.writes: list[bytes] = []
        write = self.transport.write

        def noted(data: bytes) -> None:
            self.writes.append(data)
            write(data)

        self.transport.write = noted  # type: ignore[method-assign]


@pytest.mark.parametrize("size", [0, 10, 100_000])
@in_a_loop
async def test_a_reply_leaves_with_its_head_in_one_write(size: int) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b"x" * size)(scope, receive, send)

    client = Answering(answer)
    for count in (1, 2):
        await client.send(GET + b"\r\n")
        assert len(client.writes) == count
        assert client.writes[-1].startswith(b"HTTP/1.1 200 ") and client.writes[-1].endswith(b"\r\n\r\n" + b"x" * size)


@in_a_loop
async def test_the_head_of_a_stream_does_not_wait_for_its_first_event() -> None:
    event = asyncio.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await event.wait()
        await send({"type": "http.response.body", "body": b"first", "more_body": False})

    client = Answering(stream)
    await client.send(GET + b"\r\n")
    assert len(client.writes) == 1 and client.writes[0].endswith(b"\r\n\r\n")
    event.set()
    await client.send(b"")
    assert b"first" in client.writes[1]


@pytest.mark.parametrize("connected_to", ["this protocol", "another"])
@in_a_loop
async def test_work_for_a_lost_connection_is_cancelled(connected_to: str) -> None:
    begun, seen = 0, list[object]()

    async def work() -> None:
        nonlocal begun
        begun += 1
        await asyncio.sleep(60)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if connected_to == "another":
            del scope[LOSS]
        await receive()
        try:
            await cancel_on_disconnect(Request(scope, receive, send), work())
        except ApiError as error:
            seen.append(error.status)
        seen.append(asyncio.current_task().cancelling())  # type: ignore[union-attr]

    client = Answering(answer)
    await client.send(GET + b"\r\n")
    assert begun == 1 and not seen
    client.protocol.connection_lost(None)
    await client.send(b"") if not client.transport.ended else await asyncio.sleep(0.01)
    assert seen == [499, 0]


@pytest.mark.parametrize("before", [0, 1])
@in_a_loop
async def test_a_long_body_does_not_hide_the_loss_of_its_client(before: int) -> None:
    """Its parts paused reading, and nothing resumed it until the reply."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        await asyncio.sleep(60)

    client = Answering(answer)
    await client.send(LENGTH + b"x" * before)
    await client.send(b"x" * (100_000 - before))
    assert client.protocol.cycle.more_body is False and client.transport.is_reading


@pytest.mark.parametrize("connected_to", ["this protocol", "another"])
@in_a_loop
async def test_a_pipelined_request_does_not_hide_the_loss_of_the_first(connected_to: str) -> None:
    seen = list[object]()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if connected_to == "another":
            seen.append((await receive())["type"])
            return
        try:
            await cancel_on_disconnect(Request(scope, receive, send), asyncio.sleep(60))
        except ApiError as error:
            seen.append(error.status)

    client = Answering(answer)
    await client.send(GET + b"\r\n")
    await client.send(GET + b"\r\n")
    client.protocol.connection_lost(None)
    await asyncio.sleep(0.01)
    assert seen == [499 if connected_to == "this protocol" else "http.disconnect"]


@in_a_loop
async def test_requests_are_parsed_as_replies_make_room() -> None:
    """All of a segment of 256 KiB were, which took time quadratic in their number."""
    client = Connection(1)
    client.protocol.data_received((GET + b"\r\n") * 3_000)
    most = 0
    while client.protocol._unanswered:
        most = max(most, len(client.protocol.pipeline))
        await asyncio.sleep(0)
        client.transport.take(client.transport.unread)
    assert most <= 64
    assert client.transport.written.count(b"HTTP/1.1 200 ") == 3_000


@in_a_loop
async def test_a_body_of_many_chunks_is_parsed_in_several_turns() -> None:
    client = Connection(1)
    client.protocol.data_received(CHUNKED + b"1\r\nx\r\n" * 40_000 + b"0\r\n\r\n")
    assert len(client.protocol.cycle.body) < 10_000
    for _ in range(100):
        await asyncio.sleep(0)
    assert client.transport.written.count(b"HTTP/1.1 200 ") == 1 and not client.protocol._in_body


@in_a_loop
async def test_a_trailer_is_no_header() -> None:
    seen = list[object]()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        seen.append([name for name, _ in scope["headers"]])
        await Response(b"x")(scope, receive, send)

    client = Answering(answer)
    trailer = b"0\r\nAuthorization: Bearer k\r\nConnection: close, upgrade\r\nUpgrade: h2c\r\n\r\n"
    for offer in (b"\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n"):
        await client.send(CHUNKED[:-2] + offer + b"2\r\n{}\r\n" + trailer)
        await client.send(CHUNKED[:-2] + offer)
        await client.send(b"2\r\n{}\r\n" + trailer)
    plain, offering = [b"host", b"transfer-encoding"], [b"host", b"transfer-encoding", b"connection", b"upgrade"]
    assert seen == [plain, plain, offering, offering]
    assert client.transport.written.count(b"HTTP/1.1 200 ") == 4


@in_a_loop
async def test_the_host_of_a_target_counts() -> None:
    seen = list[object]()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope["path"], [value for name, value in scope["headers"] if name == b"host"]))
        await Response(b"x")(scope, receive, send)

    client = Answering(answer)
    await client.send(GET.replace(b"GET /", b"GET http://y:80/a?b") + b"\r\n")
    await client.send(b"GET http://y HTTP/1.0\r\n\r\n")
    assert seen == [("/a", [b"y:80"]), ("/", [b"y"])]


@in_a_loop
async def test_a_stream_to_http_1_0_has_no_chunks() -> None:
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        await send({"type": "http.response.body", "body": b"last", "more_body": False})

    client = Answering(stream)
    await client.send(GET.replace(b"1.1", b"1.0") + b"\r\n")
    head, _, body = client.transport.written.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head and body == b"first last"
    assert client.transport.ended == "closed"


@in_a_loop
async def test_a_task_that_is_cancelled_itself_stays_so_and_keeps_no_work_for_a_lost_connection() -> None:
    loss = ConnectionLoss()
    task = asyncio.create_task(loss.cancels(asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await loss.cancels(asyncio.sleep(0, 7)) == 7
    loss.lost()
    await asyncio.sleep(0)  # nothing is cancelled now
    with pytest.raises(ApiError, match="closed the connection"):
        await loss.cancels(asyncio.sleep(60))


def test_the_paths_of_larger_bodies_are_those_of_the_table() -> None:
    assert TABLE.body_limits == bounded_protocol_module._LARGE_BODIES
