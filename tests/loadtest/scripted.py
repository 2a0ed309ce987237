"""A server with a script: it replies with known delays over plain sockets and records when it sent each event.

It runs its own asyncio loop in a thread and shares no code with the load generator, so that both can be wrong only in
different ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Script:
    """What the server does; times in seconds."""

    first_s: float = 0.0  # until the first event
    gap_s: float = 0.0  # between events
    stall: tuple[float, float] | None = None  # since the first request: nothing is answered from .. to
    capacity: int = 0  # requests worked on at once; 0: any number
    queue: int = 10**9  # requests that may wait for a place; more are refused
    status: int = 200
    error_after: int | None = None  # the number of events before an error event
    cut_after: int | None = None  # the number of events before the connection breaks
    silent: int = 0  # every n-th event has no text, and all have their token's id
    metrics: str = ""
    unasked: bool = False  # all but the probe is streamed, also what is to come in one piece
    foreign: bytes = b""  # the reply to every POST, whatever was asked: another server's, head and body
    described: str = ""  # the reply to GET /v1/models


@dataclass
class Seen:
    """One request as the server saw it; times of `time.monotonic`."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    received: float
    sends: list[float] = field(default_factory=list)
    ended: float = 0.0
    broken: bool = False  # the client was gone


class ScriptedServer:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.url = ""
        self._places = asyncio.Semaphore(script.capacity) if script.capacity else contextlib.nullcontext()
        self._waiting = 0

    @property
    def load(self) -> list[Seen]:
        """Return the requests of one run without its probe."""
        return self.seen[1:]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in head[1:] if line)}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        received = time.monotonic()
        if method == "GET":
            known = {"/metrics": self.script.metrics, "/v1/models": self.script.described}
            found = known.get(path, "")
            _reply(writer, 200 if found else 404, found or "{}")
            return True
        if self.script.foreign:
            writer.write(self.script.foreign)
            await writer.drain()
            return b"content-length" in self.script.foreign.lower() or await self._until_left(reader)
        if path == "/tokenize":
            _reply(writer, 404, "{}")
            return True
        seen = Seen(path, json.loads(content), headers, received)
        self.seen.append(seen)
        try:
            return await self._answer(seen, writer)
        except ConnectionError:
            seen.broken = True
            raise
        finally:
            seen.ended = time.monotonic()

    async def _until_left(self, reader: asyncio.StreamReader) -> bool:
        """A reply without an end: the connection stays open until the client closes it."""
        await reader.read()
        return False

    async def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        script, probe = self.script, seen.body.get("max_tokens") == 1 and not seen.body.get("stream")
        if not probe and (script.status != 200 or self._waiting >= script.queue):
            status = script.status if script.status != 200 else 429
            _reply(writer, status, json.dumps({"error": {"message": "no", "type": "t", "code": "scripted"}}), 1)
            return True
        if not seen.body.get("stream") and (probe or not script.unasked):
            if not probe:
                await asyncio.sleep(script.first_s)
            usage = {"prompt_tokens": 7, "completion_tokens": seen.body.get("max_tokens", 0)}
            _reply(writer, 200, json.dumps({"model": "m", "choices": [{"text": "word"}], "data": [], "usage": usage}))
            return True
        self._waiting += 1
        async with self._places:
            self._waiting -= 1
            return await self._stream(seen, writer)

    async def _stream(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        script, tokens = self.script, seen.body["max_tokens"]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if script.stall is not None:
            begin, end = (self.load[0].received + edge for edge in script.stall)
            if begin <= time.monotonic() < end:
                await asyncio.sleep(end - time.monotonic())
        for number in range(tokens):
            await asyncio.sleep(script.gap_s if number else script.first_s)
            if number == script.cut_after:
                writer.transport.abort()
                return False
            if number == script.error_after:
                _event(writer, json.dumps({"error": {"message": "m", "code": "broken"}}))
                break
            last = {"finish_reason": "length"} if number + 1 == tokens else {}
            event: dict[str, Any] = {"choices": [{"index": 0, "text": f"é{number} ", **last}]}
            if script.silent:
                event["choices"][0] |= {"token_ids": [number]} | ({"text": ""} if number % script.silent == 0 else {})
            if last:
                event["usage"] = {"prompt_tokens": 7, "completion_tokens": tokens}
            _event(writer, json.dumps(event, ensure_ascii=False))
            seen.sends.append(time.monotonic())
            await writer.drain()
        _event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _event(writer: asyncio.StreamWriter, data: str) -> None:
    """One event in two chunks, split inside a character where there is one."""
    raw = f": comment\r\ndata: {data}\r\n\r\n".encode()
    at = raw.find(b"\xa9") if b"\xa9" in raw else len(raw) // 2
    for part in (raw[:at], raw[at:]):
        writer.write(b"%x\r\n%b\r\n" % (len(part), part))


def _reply(writer: asyncio.StreamWriter, status: int, content: str, retry_after: int | None = None) -> None:
    raw = content.encode()
    extra = "" if retry_after is None else f"Retry-After: {retry_after}\r\n"
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{extra}Content-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)


@contextmanager
def serving(script: Script) -> Iterator[ScriptedServer]:
    """Run the server until the end of the block."""
    server = ScriptedServer(script)
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def main() -> None:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        listening.close()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    try:
        assert ready.wait(60)
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
