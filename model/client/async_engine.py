"""Per-request streams over one engine loop, wherever the loop runs.

Requests go in as ids and come out as ids with text; the loop never waits for a reader. Each accepted request ends
exactly once: by the engine's last output, by its deadline (watched here too, in case the engine hangs), by `cancel`
or closing its stream, or, if the engine is lost, by an error for every waiter at once. A lost engine is started again,
but so often within a time at most; one that gives no sign of life is ended first, where that can be done, and is then
lost like any other.
Not thread-safe: everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import chain, repeat
from typing import Protocol

from model.api.messages import Abort, Commands, Events, ModelSpec
from model.api.request import EncodeOutput, EncodeRequest, FinishReason, Request
from model.api.stats import Demand, EngineStats, Health, ModelInfo, StepStats
from model.client.admission import Admission
from model.client.generation_stream import GenerationStream
from model.errors import ConfigError, EngineDeadError, EngineGoneError
from model.system.fault_limit import FaultLimit
from model.text.tokenizer import Tokenizer

_DEADLINE_GRACE = 2.0  # the engine ends late requests itself; after this the front does
_WATCH_SECONDS = 0.5
_RESTART_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # pauses between attempts to start a lost engine again
_MAX_RESTARTS = (
    8  # within `_RESTART_WINDOW`; what is lost once more is down for as long, which is for a supervisor to see
)
_RESTART_WINDOW = 600.0

logger = logging.getLogger(__name__)


class Transport(Protocol):
    """The front's end of the seam (`process.py`, `thread.py`)."""

    async def start(self, on_events: Callable[[Events], None], on_lost: Callable[[str], None]) -> None: ...

    def send(self, commands: Commands) -> None: ...

    def kill(self) -> bool:
        """End a loop that answers nothing any more; False where only the whole process could be ended."""
        ...

    async def close(self) -> None: ...


class AsyncEngine:
    """The engines of one or more models behind one transport."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        transport: Callable[[], Transport],
        tokenizers: Mapping[str, Tokenizer | None],
        stall_seconds: float = 30.0,
        max_unread_bytes: int = 1 << 20,
        stream_interval: float = 0.0,
    ) -> None:
        """`stall_seconds`: without a sign of life for so long, the loop counts as hanging and is replaced.
        `max_unread_bytes`: of output that may wait for the reader of one stream. `stream_interval`: seconds as of
        `GenerationStream`."""
        self._specs = list(specs)
        self._new_transport = transport
        self._transport: Transport | None = None
        self._tokenizers = tokenizers
        self._stall_seconds = stall_seconds
        self._max_unread_bytes = max_unread_bytes
        self._stream_interval = stream_interval
        self._models: dict[str, ModelInfo] = {}
        self._stats: dict[str, EngineStats] = {spec.name: EngineStats(spec.name) for spec in specs}
        self._admission = {spec.name: Admission(spec.engine) for spec in specs}
        self._streams: dict[str, GenerationStream] = {}
        self._encodes: dict[str, tuple[EncodeRequest, asyncio.Future[EncodeOutput]]] = {}
        self._observers: list[Callable[[StepStats], None]] = []
        self._pending = Commands()
        self._reason = "not started"  # why it is not ready; empty when it is
        self._started: asyncio.Future[None] | None = None
        self._last_sign = time.monotonic()
        self._hung = ""  # why the loop was killed, until it is gone
        self._restarts = 0
        self._limit = FaultLimit(_MAX_RESTARTS, _RESTART_WINDOW)
        self._given_up = False
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def models(self) -> dict[str, ModelInfo]:
        return self._models

    @property
    def restarts(self) -> int:
        """How often a lost loop was replaced, or tried to be: with it all models are loaded again."""
        return self._restarts

    @property
    def transport(self) -> Transport | None:
        return self._transport

    async def start(self) -> None:
        """Load every model; raises `ConfigError` or `EngineDeadError`."""
        await self._start_transport()
        self._spawn(self._watch())

    async def close(self) -> None:
        """Fail whatever still runs and release the engines. Idempotent."""
        self._closed = True
        self._reason = "shutting down"
        self._fail_all("the engine is shut down")
        for task in self._background:
            task.cancel()
        if self._transport is not None:
            await self._transport.close()
            self._transport = None

    def check_room(self, model: str, sequences: int = 1) -> None:
        """Raise as `submit` and `encode` do where they would refuse so many sequences of `model`."""
        self._check_alive()
        self._admission[model].check_room(sequences)

    def submit(self, requests: Sequence[Request]) -> GenerationStream:
        """Accept all requests (of one model) or none.

        Raises `QueueFullError` or `EngineGoneError` at once; nothing has been computed then.
        """
        self._check_alive()
        model = requests[0].model
        self._admission[model].admit(
            {r.request_id: len(r.prompt_token_ids) + len(r.decoder_token_ids) for r in requests},
            sequences={r.request_id: max(r.params.n, r.params.num_beams) for r in requests},
        )
        stream = GenerationStream(
            self, requests, self._tokenizers.get(model), self._max_unread_bytes, self._stream_interval
        )
        for request in requests:
            self._streams[request.request_id] = stream
        self._queue().generate.extend(requests)
        return stream

    async def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeOutput]:
        """One output for each request (all of one model), in order. Raises as `submit` does; cancelling aborts."""
        self._check_alive()
        loop = asyncio.get_running_loop()
        self._admission[requests[0].model].admit({r.request_id: len(r.token_ids) for r in requests})
        futures: list[asyncio.Future[EncodeOutput]] = []
        for request in requests:
            futures.append(loop.create_future())
            self._encodes[request.request_id] = (request, futures[-1])
        self._queue().encode.extend(requests)
        try:
            return list(await asyncio.gather(*futures))
        finally:
            for request in requests:
                if request.request_id in self._encodes:
                    self.abort(request.model, request.request_id, None, FinishReason.CANCELLED)
                    self.forget(request.request_id)

    def cancel(self, request_id: str) -> bool:
        """End a running request of either kind with `FinishReason.CANCELLED`; False if there is none of that id."""
        if request_id in self._encodes:
            self.abort(self._encodes[request_id][0].model, request_id, None, FinishReason.CANCELLED)
            self._end_encode(EncodeOutput(request_id, finish_reason=FinishReason.CANCELLED))
            return True
        stream = self._streams.get(request_id)
        return stream is not None and stream.end(FinishReason.CANCELLED, tell_engine=True, only=request_id)

    def health(self) -> Health:
        """Not live: the loop hangs, or was lost so often that it is not started again for now. A loop that hangs has
        been ended in a moment; then the engine is merely lost."""
        if self._given_up:
            return Health(live=False, ready=False, reason=self._reason)
        if hung := self._hung or self._hangs():
            return Health(live=False, ready=False, reason=hung)
        return Health(live=True, ready=not self._reason, reason=self._reason)

    def stats(self) -> dict[str, EngineStats]:
        return self._stats

    def demand(self) -> dict[str, Demand]:
        """Of each model."""
        return {name: one.demand(self._stats[name]) for name, one in self._admission.items()}

    def on_step(self, observe: Callable[[StepStats], None]) -> None:
        self._observers.append(observe)

    def abort(self, model: str, request_id: str, index: int | None, reason: FinishReason) -> None:
        """Tell the engine to end a request or one of its sequences; harmless if it has ended."""
        self._queue().abort.append(Abort(model, request_id, index, reason))

    def forget(self, request_id: str) -> None:
        """A request has ended: it no longer counts and nothing more is delivered to it."""
        self._streams.pop(request_id, None)
        self._encodes.pop(request_id, None)
        for admission in self._admission.values():
            admission.release(request_id)

    # -- towards the loop

    def _queue(self) -> Commands:
        """The frame being filled; it leaves when the current callbacks of the event loop are through."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        return self._pending

    def _flush(self) -> None:
        commands, self._pending = self._pending, Commands()
        if commands and self._transport is not None and not self._reason:
            self._transport.send(commands)

    def _check_alive(self) -> None:
        if self._reason:
            raise EngineGoneError(self._reason)

    def _hangs(self) -> str:
        """In what words; empty while the loop gives signs, and while there is none that should."""
        silent = time.monotonic() - self._last_sign
        if self._reason or silent <= self._stall_seconds:
            return ""
        return f"the engine has given no sign for {silent:.0f} s"

    # -- from the loop

    def _on_events(self, events: Events) -> None:
        self._last_sign = time.monotonic()
        for info in events.loaded:
            self._models[info.name] = info
            self._admission[info.name].settle(info.limits)
            logger.info("loaded %s in %.1f s", info.name, info.load_seconds)
        if events.ready or events.failure is not None:
            self._settle_start(events)
        for stats in events.stats:
            self._stats[stats.model] = stats
        for step in events.steps:
            for observe in self._observers:
                observe(step)
        for output in events.tokens:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                self._admission[stream.model].started(output.request_id)
                stream.push(output)
        for encoded in events.encoded:
            self._end_encode(encoded)

    def _end_encode(self, output: EncodeOutput) -> None:
        if output.request_id in self._encodes:
            _, future = self._encodes[output.request_id]
            self.forget(output.request_id)
            if not future.done():
                future.set_result(output)

    def _settle_start(self, events: Events) -> None:
        if events.failure is None:
            self._reason = ""
            if self._started is not None and not self._started.done():
                self._started.set_result(None)
            return
        error = ConfigError(events.failure) if events.invalid else EngineDeadError(events.failure)
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
        else:
            self._on_lost(events.failure)

    def _on_lost(self, reason: str) -> None:
        """The loop is gone: everybody who waits is told so now, and a new one is started."""
        if self._closed or (self._reason and (self._started is None or self._started.done())):
            return
        logger.error("engine lost: %s", reason)
        self._fail_all(reason)
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineDeadError(reason))
        else:
            self._reason = reason
            self._spawn(self._restart())

    def _fail_all(self, reason: str) -> None:
        error = EngineDeadError(reason)
        for stream in set(self._streams.values()):
            stream.fail(error)
        for request_id, (_, future) in list(self._encodes.items()):
            self.forget(request_id)
            if not future.done():
                future.set_exception(error)
        self._stats = {name: EngineStats(name) for name in self._stats}

    # -- life

    async def _start_transport(self) -> None:
        self._reason = "loading models"
        self._started = asyncio.get_running_loop().create_future()
        self._transport = self._new_transport()
        try:
            await self._transport.start(self._on_events, self._on_lost)
            self._transport.send(Commands(load=self._specs))
            await self._started
        except Exception as error:  # a system without descriptors or memory for a process among them
            self._reason = str(error)
            await self._transport.close()
            raise

    async def _restart(self) -> None:
        for pause in chain(_RESTART_SECONDS, repeat(_RESTART_SECONDS[-1])):
            if self._transport is not None:
                await self._transport.close()
            self._hung = ""
            if self._limit.exceeded():
                await self._rest()
            await asyncio.sleep(pause)
            self._restarts += 1
            try:
                await self._start_transport()
            except Exception as error:
                logger.error("the engine did not start again: %s", error)
            else:
                logger.info("the engine runs again")
                return

    async def _rest(self) -> None:
        """Be dead for a while: starting again does not help, and what does is for a supervisor or a person to do."""
        limit = self._limit
        times = f"it was started again {limit.most} times within {limit.seconds:.0f} s"
        self._reason += f"; {times} and is left alone for as long"
        self._given_up = True
        logger.error("%s", self._reason)
        await asyncio.sleep(limit.seconds)
        self._given_up = False

    async def _watch(self) -> None:
        """What the engine should have done by itself, by the front's own clock."""
        while True:
            slept = time.monotonic()
            await asyncio.sleep(_WATCH_SECONDS)
            now = time.monotonic()
            # While this process stood still too (in a paused container, say) it could not have heard anything.
            self._last_sign = min(now, self._last_sign + max(0.0, now - slept - _WATCH_SECONDS))
            self._end_late(now - _DEADLINE_GRACE)
            self._end_hanging()

    def _end_late(self, late: float) -> None:
        """End what should have ended before `late`."""
        for request_id, stream in list(self._streams.items()):
            deadline = stream.deadline(request_id)
            if deadline is not None and deadline < late:
                stream.end(FinishReason.DEADLINE, tell_engine=True, only=request_id)
        for encode, _ in list(self._encodes.values()):
            if encode.deadline is not None and encode.deadline < late:
                self._end_encode(EncodeOutput(encode.request_id, finish_reason=FinishReason.DEADLINE))

    def _end_hanging(self) -> None:
        """A loop that hangs is killed, and then lost like one that died."""
        hung = self._hangs()
        if hung and self._transport is not None and self._transport.kill():
            self._hung = hung
            self._on_lost(hung)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
