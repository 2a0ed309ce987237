"""Server-sent events: frames, keep-alive comments, and cancellation of the work when a stream ends for any reason.

A stream consists of `data: {json}` frames from a `Rendering`, the last with an error object if it failed, and the
rendering's end (`data: [DONE]`). Frames are sent as fast as the client reads; nothing is buffered here. A client that
disconnects, or reads nothing for `stall_s`, ends the stream. The job is always closed once, by the `finally` of
`EventStream.__call__`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from model.api.request import FinishReason
from model.errors import EngineError
from service.core.engine_client import GenerationStream
from service.core.errors import ApiError, engine_failed, internal, log_unexpected
from service.http.bodies import cancel_all, wait_for_disconnect
from service.http.json_replies import Generation, Rendering
from service.lifecycle.jobs import Job
from service.settings.service_settings import Limits

Chunk = tuple[bytes, bool]  # one or more whole frames, and whether more follow
DIRECT = "triptych.send"  # key of a scope: the server's own `send`, outside all middleware
_KEEPALIVE = b": keep-alive\n\n"


def frame(value: object) -> bytes:
    """Return the bytes of one event; the JSON has no line breaks."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def generation_events(
    generation: Generation,
    stream: GenerationStream,
    job: Job,
    rendering: Rendering,
    shown_error: Callable[[ApiError], ApiError],
) -> AsyncIterator[Chunk]:
    """Yield the frames of a generation: those of each output together, and the end of the stream with the last ones.

    An error becomes a frame with what `shown_error` returns.
    """
    failure: ApiError | None = None
    head = generation.head()
    try:
        async for output in stream:
            delta = generation.add(output)
            if output.finish_reason is FinishReason.ERROR:
                failure = generation.failure or engine_failed()
                break
            event = {**head, "choices": [delta]}
            if generation.ended:
                event |= generation.tail()
            shown = b"".join([frame(one) for one in rendering.events(event)])
            if generation.ended:
                yield shown + rendering.done, False
                return
            if shown:
                yield shown, True
    except EngineError:
        failure = engine_failed()
    except Exception as error:
        log_unexpected(error)
        failure = internal()
    job.end(FinishReason.ERROR)
    yield frame(shown_error(failure or engine_failed()).body()) + rendering.done, False


class EventStream(Response):
    """Sends `events` to the client, and closes `job` when that ends for any reason."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Chunk], job: Job, limits: Limits) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self._events = events
        self._job = job
        self._limits = limits
        self._last_sent = time.monotonic()
        self._begun: float | None = None  # when sending the current message began
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
                await self._job.aclose()
        for task in done:
            error = task.exception()
            if error is not None and not isinstance(error, OSError):
                raise error

    async def _pump(self, send: Send, direct: Send) -> None:
        """Send the events; the body goes through `direct`, past all middleware, which does not read it."""
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event, more in self._events:
            await self._send(direct, {"type": "http.response.body", "body": event, "more_body": more})

    async def _send(self, send: Send, message: Message) -> None:
        self._begun = time.monotonic()
        await send(message)
        self._last_sent, self._begun = time.monotonic(), None

    async def _watch(self, direct: Send) -> None:
        """Return when the client has read nothing for `stream_stall_s`; until then send keep-alive comments.

        It checks the time at intervals, because a timer for each event would cost as much as the event.
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
                        await direct({"type": "http.response.body", "body": _KEEPALIVE, "more_body": True})
                    self._last_sent, left = time.monotonic(), interval
            await asyncio.sleep(min(left, stall))
