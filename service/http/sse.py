"""Server-sent events: frames, keep-alive comments, and cancellation of the work when a stream ends for any reason.

A stream consists of the frames of a `Rendering`, such as `data: {json}` or a line of JSON, and the rendering's end
(`data: [DONE]`). If it fails, the last frame has an error object. Frames are sent at the speed of the client; nothing
is buffered here. A client that disconnects, or reads nothing for `stream_stall_s`, ends the stream. The `finally` of
`EventStream.__call__` always closes the job once.

If the server is uvicorn and the engine's stream has callbacks, events are rendered and written in the callback, for all
streams of a step together. Otherwise a task awaits each output and sends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from triptych.model.api.request import FinishReason, TokenOutput
from triptych.model.errors import EngineError
from triptych.service.core.engine_client import GenerationStream, ListenableStream
from triptych.service.core.errors import ApiError, engine_failed, internal, log_unexpected
from triptych.service.core.write_batch import WriteBatch
from triptych.service.http.bodies import cancel_all, wait_for_disconnect
from triptych.service.http.json_replies import Generation, Json, Rendering
from triptych.service.http.reply_writing import StreamWriter
from triptych.service.lifecycle.jobs import Job
from triptych.service.settings.service_settings import Limits

# -- Templates of events: the bytes around text and token ids, which are the same in all events of a running sequence. A
# template is made from an event that was rendered with marks for both, so that it has the shape of the other events.

_TEXT = "\ue000text\ue000"  # private characters, which no field name has
_ID = 987_654_321_012_345
_encode = msgspec.json.Encoder().encode


def is_plain(output: TokenOutput) -> bool:
    """Return whether an output has only text and token ids, and does not end its sequence."""
    return (
        output.finish_reason is None
        and output.logprobs is None
        and output.prompt_logprobs is None
        and output.score is None
        and output.stop_reason is None
        and output.error is None
        and output.text != ""
    )


def marked(output: TokenOutput) -> TokenOutput:
    """Return an output of the same sequence with the marks as text and token ids."""
    return TokenOutput(output.request_id, output.index, [_ID], text=_TEXT)


@dataclass(frozen=True, slots=True)
class EventTemplate:
    """The bytes before, between and after text and token ids; `between` is None for events without ids."""

    before: bytes
    between: bytes | None
    after: bytes

    @classmethod
    def of(cls, shown: bytes) -> EventTemplate | None:
        """Return the template of an event of a `marked` output; None if it does not have each mark once."""
        before, *rest = shown.split(_encode(_TEXT))
        if len(rest) != 1 or _encode(_ID) in before:
            return None
        parts = rest[0].split(_encode([_ID]))
        if len(parts) == 1:
            return cls(before, None, parts[0])
        return cls(before, parts[0], parts[1]) if len(parts) == 2 else None

    def fill(self, output: TokenOutput) -> bytes:
        """Return the bytes of the event of a plain output."""
        if self.between is None:
            return b"%b%b%b" % (self.before, _encode(output.text), self.after)
        return b"%b%b%b%b%b" % (
            self.before,
            _encode(output.text),
            self.between,
            _encode(output.token_ids),
            self.after,
        )


Chunk = tuple[bytes, bool]  # whole frames, and whether more follow
DIRECT = "triptych.send"  # key of a scope for the server's own `send`, outside all middleware


class Events(Protocol):
    """The frames of a stream."""

    @property
    def keepalive(self) -> bytes: ...

    def opening(self) -> bytes:
        """Return the frames that begin the stream; empty if there are none."""

    def each(self) -> AsyncIterator[Chunk]:
        """Yield the frames of each output."""


class GenerationEvents:
    """The outputs of a generation as frames, with the end of the stream after the last one.

    An error becomes a frame with the error that `shown_error` returns.
    """

    def __init__(
        self,
        generation: Generation,
        stream: GenerationStream,
        job: Job,
        rendering: Rendering,
        shown_error: Callable[[ApiError], ApiError],
    ) -> None:
        self.stream = stream
        self._generation = generation
        self._job = job
        self._rendering = rendering
        self._shown_error = shown_error
        self._head = generation.head()
        self._context = copy_context()  # the request's context, which callbacks lack
        self._templates: dict[tuple[str, int], EventTemplate | None] = {}  # of sequences in progress

    @property
    def keepalive(self) -> bytes:
        return self._rendering.keepalive

    def opening(self) -> bytes:
        """Return the frames that begin the stream; empty if there are none."""
        return self._framed(self._rendering.opening())

    def take(self, stream: ListenableStream) -> Chunk:
        """Return the frames of all outputs that are ready."""
        try:
            return self._shown(stream.take())
        except EngineError:
            return self._failed(engine_failed())
        except Exception as error:
            self._context.run(log_unexpected, error)
            return self._failed(internal())

    async def each(self) -> AsyncIterator[Chunk]:
        """Yield the frames of each output."""
        failure = engine_failed()
        try:
            async for output in self.stream:
                shown, more = self._shown((output,))
                if shown or not more:
                    yield shown, more
                if not more:
                    return
        except EngineError:
            pass
        except Exception as error:
            log_unexpected(error)
            failure = internal()
        yield self._failed(failure)

    def _failed(self, failure: ApiError) -> Chunk:
        self._job.end(FinishReason.ERROR)
        return self._framed(self._rendering.failed(self._shown_error(failure))) + self._rendering.done, False

    def _framed(self, events: Iterable[Json]) -> bytes:
        return b"".join(map(self._rendering.frame, events))

    def _shown(self, outputs: Sequence[TokenOutput]) -> Chunk:
        shown: list[bytes] = []
        for output in outputs:
            template = self._template(output) if is_plain(output) else None
            if template is not None:
                self._generation.count(output)
                shown.append(template.fill(output))
                continue
            if output.is_missing:  # other outputs of its request follow
                self._generation.count(output)
                continue
            delta = self._generation.add(output)
            if output.finish_reason is FinishReason.ERROR:
                end, _ = self._failed(self._generation.failure or engine_failed())
                return b"".join(shown) + end, False
            event = {**self._head, "choices": [delta]}
            if self._generation.ended:
                event |= self._generation.tail()
            shown.append(self._framed(self._rendering.events(event)))
            if self._generation.ended:
                return b"".join(shown) + self._rendering.done, False
        return b"".join(shown), True

    def _template(self, output: TokenOutput) -> EventTemplate | None:
        """Return the template of a sequence in progress, if its events have one."""
        key = (output.request_id, output.index)
        if key in self._templates:
            return self._templates[key]
        if not self._generation.has_begun(output):
            return None
        event = self._rendering.repeated({**self._head, "choices": [self._generation.delta(marked(output))]})
        if event is None:
            return None
        self._templates[key] = found = EventTemplate.of(self._rendering.frame(event))
        return found


class EventStream(Response):
    """A reply that sends `events`, and closes `job` when it ends for any reason."""

    media_type = "text/event-stream"

    def __init__(
        self, events: Events, job: Job, limits: Limits, writes: WriteBatch, media_type: str = media_type
    ) -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.body = b""
        self._events = events
        self._job = job
        self._limits = limits
        self._writes = writes
        self._last_sent = time.monotonic()
        self._begun: float | None = None  # start of sending the current message
        self._end: bytes | None = None  # last frames, once they are known
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    def init_headers(self, headers: object = None) -> None:
        """Set the headers as the base class does, without the content-length of an empty body."""
        super().init_headers(headers)  # type: ignore[arg-type]
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks: list[asyncio.Task[None]] = []
        direct: Send = scope.get(DIRECT, send)
        try:
            work = (self._pump(send, direct), self._watch(direct), wait_for_disconnect(receive))
            tasks = [asyncio.create_task(one) for one in work]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            try:
                await cancel_all(tasks)
            finally:
                if any(map(_error_of, tasks)):
                    self._job.fail()
                await self._job.aclose()
        if (error := next(filter(None, map(_error_of, done)), None)) is not None:
            raise error

    async def _pump(self, send: Send, direct: Send) -> None:
        """Send the events; all but the last bypass the middleware, which does not read bodies."""
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if opening := self._events.opening():
            await self._send(direct, {"type": "http.response.body", "body": opening, "more_body": True})
        writer, events = StreamWriter.of(direct), self._events
        if writer is not None and isinstance(events, GenerationEvents) and isinstance(events.stream, ListenableStream):
            await self._write_in_callbacks(events, events.stream, writer)
        else:
            await self._send_each(direct)
        await self._send(send, {"type": "http.response.body", "body": self._end, "more_body": False})

    async def _send_each(self, direct: Send) -> None:
        """Send all frames but the last."""
        async for event, more in self._events.each():
            if more:
                await self._send(direct, {"type": "http.response.body", "body": event, "more_body": True})
            else:
                self._end = event

    async def _write_in_callbacks(
        self, events: GenerationEvents, stream: ListenableStream, writer: StreamWriter
    ) -> None:
        """Write all frames but the last in the stream's callbacks; take no outputs while the client does not read."""
        wake = asyncio.Event()

        def write() -> None:
            if self._end is not None:
                return
            if writer.paused:
                wake.set()
                return
            event, more = events.take(stream)
            if not more:
                self._end = event
                wake.set()
            elif event:
                self._writes.add(writer.write, event)
                self._last_sent = time.monotonic()

        stream.listen(write)
        while True:
            await wake.wait()
            if self._end is not None:
                return
            wake.clear()
            self._begun = time.monotonic()
            await writer.drain()
            self._last_sent, self._begun = time.monotonic(), None
            write()
            await asyncio.sleep(0)  # the end must not overtake the writes in the batch

    async def _send(self, send: Send, message: Message) -> None:
        self._begun = time.monotonic()
        await send(message)
        self._last_sent, self._begun = time.monotonic(), None

    async def _watch(self, direct: Send) -> None:
        """Send keep-alive comments until the client has read nothing for `stream_stall_s`.

        The time is checked at intervals, because a timer for each event would cost as much as the event.
        """
        stall, interval = self._limits.stream_stall_s, self._limits.stream_keepalive_s
        while True:
            now = time.monotonic()
            if self._begun is not None:
                left = self._begun + stall - now
                if left <= 0:
                    return
            else:
                left = self._last_sent + interval - now
                if left <= 0:
                    async with asyncio.timeout(stall):
                        await direct({"type": "http.response.body", "body": self._events.keepalive, "more_body": True})
                    self._last_sent, left = time.monotonic(), interval
            await asyncio.sleep(min(left, stall))


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    """Return what a task has raised that is not for want of a connection."""
    if not task.done() or task.cancelled():
        return None
    error = task.exception()
    return None if isinstance(error, OSError) else error
