"""A client, which sends a request, reads the reply, records all times, and has a habit (cancel, slow, retry)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import httpx
import msgspec

from triptych.loadtest.generator import targets
from triptych.loadtest.generator.connections import Connection, Connections, Sink
from triptych.loadtest.generator.targets import Reply
from triptych.loadtest.records import Outcome, Record
from triptych.loadtest.settings import Settings
from triptych.loadtest.workload.items import Item, Turn

# -- A parser of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html). Chunks may end
# anywhere: inside a line ending, a character or a field. Only whole lines are decoded, so no character is split.
# Comments and unknown fields are ignored; data after the last blank line is no event.


class EventParser:
    """Parses chunks and returns the data of each complete event."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_cr = False  # the next byte belongs to the last line's ending if it is \n
        self._begun = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the `data` of every event that ends in `chunk`, in order, as UTF-8."""
        if self._is_one_event(chunk):
            return [chunk[6:-2]]
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if not chunk:
            return []
        lines = (self._rest + chunk).splitlines(keepends=True)  # of bytes: \n, \r and \r\n only
        self._rest = b"" if lines[-1][-1:] in b"\r\n" else lines.pop()
        self._after_cr = chunk.endswith(b"\r")
        found: list[bytes] = []
        for line in lines:
            self._line(line.rstrip(b"\r\n"), found)
        return found

    def _is_one_event(self, chunk: bytes) -> bool:
        """Return whether the chunk is exactly one data line and a blank line, as most servers send a token."""
        return (
            self._begun
            and not self._rest
            and not self._data
            and not self._after_cr
            and chunk.startswith(b"data: ")
            and chunk.find(b"\n") == len(chunk) - 2
            and chunk.endswith(b"\n")
            and b"\r" not in chunk
        )

    def _line(self, line: bytes, found: list[bytes]) -> None:
        if not self._begun:
            self._begun = True
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            if self._data:
                found.append(b"\n".join(self._data))
                self._data = []
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))


REJECTIONS = (429, 503)
_MAX_RETRY_AFTER_S = 60.0
_UNSTREAMED_CANCEL_S = 1.0  # within which a canceller of an unstreamed reply disconnects


class _LeftError(Exception):
    """Says that the client disconnected, as planned."""


class Client:
    """Makes requests and fills in their records. `now` returns seconds since the run's start."""

    def __init__(self, settings: Settings, connections: Connections, now: Callable[[], float]) -> None:
        self._settings = settings
        self._connections = connections
        self.now = now

    async def request(self, record: Record, item: Item, turn: Turn, history: list[str]) -> str:
        """Make one request, with its retries, and return the generated text."""
        body = targets.body(self._settings, turn, history, stream=self._settings.streams)
        said: list[str] = []
        try:
            for attempt in range(self._attempts(record)):
                wait_s = await self._attempt(record, item, body, said)
                if wait_s is None or attempt + 1 == self._attempts(record):
                    break
                await asyncio.sleep(wait_s)
        except asyncio.CancelledError:
            record.outcome = Outcome.UNFINISHED
            raise
        finally:
            record.ended = self.now()
        return "".join(said)

    def _attempts(self, record: Record) -> int:
        return 1 + self._settings.clients.max_retries if record.habit == "retry" else 1

    async def _attempt(self, record: Record, item: Item, body: bytes, said: list[str]) -> float | None:
        """Send the request once; return the seconds until a retry, or None if it has ended."""
        record.attempts += 1
        record.sent = self.now()
        try:
            async with self._patience(record, item), self._connections.post(body) as reply:
                record.status = reply.status
                if reply.status != 200:
                    return await self._refused(record, reply)
                await self._read(record, item, reply, said)
                record.outcome = Outcome.ERROR if record.error else Outcome.OK
        except (_LeftError, TimeoutError):
            record.outcome = Outcome.CANCELLED
        except httpx.HTTPError as error:
            record.outcome, record.error = Outcome.ERROR, type(error).__name__
        except msgspec.DecodeError:
            record.outcome, record.error = Outcome.ERROR, "unreadable reply"
        return None

    def _patience(self, record: Record, item: Item) -> asyncio.Timeout:
        leaves = record.habit == "cancel" and not self._settings.streams
        return asyncio.timeout(item.leave_at * _UNSTREAMED_CANCEL_S if leaves else None)

    async def _refused(self, record: Record, reply: Connection) -> float | None:
        content = await reply.read()
        seconds = self.now() - record.sent
        rejected = reply.status in REJECTIONS
        record.retry_after = "retry-after" in reply.headers
        record.outcome = Outcome.REJECTED if rejected else Outcome.ERROR
        record.rejects.append((reply.status, seconds))
        try:
            record.error = targets.decode(content).failure or f"HTTP {reply.status}"
        except msgspec.DecodeError:
            record.error = f"HTTP {reply.status}"
        return _retry_after(reply) if rejected else None

    async def _read(self, record: Record, item: Item, reply: Connection, said: list[str]) -> None:
        record.error = ""
        if "text/event-stream" not in reply.headers.get("content-type", ""):
            self._absorb(record, targets.decode(await reply.read()), said, None)
            return
        if not self._settings.streams:  # it may have no length
            record.error = "an unrequested stream"
            return
        await reply.each(
            self._sink(record, item, said)
        )  # read to the end after [DONE], so that the connection can be reused
        if not record.done and not record.error:
            record.error = "stream ended without [DONE]"

    def _sink(self, record: Record, item: Item, said: list[str]) -> Sink:
        """Return a function that takes the pieces of a stream, of any sizes."""
        feed = EventParser().feed
        since = time.monotonic() - self.now()  # the run's start on the clock of the pieces
        leave_after = 1 + int(item.leave_at * max(0, record.planned_output_tokens - 1))
        cancels = record.habit == "cancel"
        pause = 1 / self._settings.clients.slow_rate if record.habit == "slow" else 0.0

        def take(piece: bytes, at: float) -> float:
            events = 0
            for data in feed(piece):
                if data == b"[DONE]":
                    record.done = True
                    continue
                events += 1
                self._absorb(record, targets.decode(data), said, at - since)
                if cancels and len(record.token_times) >= leave_after:
                    raise _LeftError
            return pause * events

        return take

    def _absorb(self, record: Record, reply: Reply, said: list[str], at: float | None) -> None:
        """Record the content of a reply or event; `at` is an event's arrival, None for an unstreamed reply."""
        record.error = reply.failure or record.error
        text, tokens = reply.said, reply.num_tokens
        if text:
            said.append(text)
        if at is not None and (text if tokens is None else tokens):
            record.token_times.append(at)
            if tokens is not None:
                record.token_counts.append(tokens)
                record.silent_tokens += 0 if text else tokens
        record.finish_reason = reply.finish_reason or record.finish_reason
        if reply.usage is not None:
            record.has_usage = True
            record.prompt_tokens, record.completion_tokens = reply.usage.prompt_tokens, reply.usage.completion_tokens
            record.cached_tokens = reply.usage.cached
        if reply.timings is not None:
            times = reply.timings
            record.queue_ms, record.prefill_ms, record.decode_ms = times.queue_ms, times.prefill_ms, times.decode_ms
            record.server_ttft_ms, record.server_total_ms = times.ttft_ms, times.total_ms


def _retry_after(reply: Connection) -> float:
    """Return the seconds until a refused request is sent again, with jitter so that not all come at once."""
    text = reply.headers.get("retry-after", "1")
    seconds = float(text) if text.isdigit() else 1.0
    return min(seconds, _MAX_RETRY_AFTER_S) * random.uniform(1.0, 1.1)


def clock(start: float) -> Callable[[], float]:
    """Return a function for the seconds since `start`, a time of `time.monotonic`."""
    return lambda: time.monotonic() - start
