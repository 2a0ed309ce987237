"""The asynchronous client of one engine loop, which runs in another process: requests in, streams of outputs back.

Requests go to the loop as token ids; outputs come back as token ids and get their text here. The loop never waits for
a reader. Each accepted request ends exactly once: by the engine's last output, by its deadline (also checked here, in
case the engine hangs), by `cancel`, by closing its stream, or by an error when the engine is lost.

Models can be loaded and unloaded while others are served (`model_table`). A lost engine is restarted with the models
that were served last, at most `_MAX_RESTARTS` times within `_RESTART_WINDOW` seconds. An engine that sends nothing for
`stall_seconds` is killed, if the transport can do that, and counts as lost. So is an engine whose restart takes several
times as long as its longest start. Not thread-safe: everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import chain, repeat
from typing import Protocol

from triptych.model.api.messages import Abort, Commands, Events, ModelSpec
from triptych.model.api.request import EncodeOutput, EncodeRequest, FinishReason, Request
from triptych.model.api.stats import Demand, EngineStats, Health, ModelInfo, StepStats
from triptych.model.client.admission import Encoding
from triptych.model.client.generation_stream import Delivery, GenerationStream
from triptych.model.client.model_table import FrontModel, ModelTable
from triptych.model.errors import ConfigError, EngineDeadError, EngineGoneError
from triptych.model.system.fault_limit import FaultLimit
from triptych.model.system.host_memory import resident_memory
from triptych.model.text.tokenizer import Tokenizer

_DEADLINE_GRACE = 2.0  # the engine ends late requests itself; after this the front does
_WATCH_SECONDS = 0.5
_RESTART_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # pauses between attempts to start a lost engine again
_MAX_RESTARTS = 8  # within `_RESTART_WINDOW`; after one more loss the engine stays down, not live, for that time
_RESTART_WINDOW = 600.0  # seconds
# A restart that takes longer than `_LEAST_START_SECONDS` plus this many times the longest start is taken to hang.
_START_PATIENCE = 5.0
_LEAST_START_SECONDS = 60.0

logger = logging.getLogger(__name__)


class Transport(Protocol):
    """The front's end of the connection to an engine loop: `ProcessTransport`, or a thread in tests."""

    @property
    def pid(self) -> int | None:
        """The id of the engine process; None before the start."""

    async def start(self, on_events: Callable[[Events], None], on_lost: Callable[[str], None]) -> None: ...

    def send(self, commands: Commands) -> None: ...

    def kill(self) -> bool:
        """End a loop that no longer answers; returns False if it cannot be ended by itself."""
        ...

    async def close(self) -> None: ...


class AsyncEngine:
    """The engines of one or more models, reached through one transport."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        transport: Callable[[], Transport],
        tokenizers: Mapping[str, Tokenizer | None],
        stall_seconds: float = 30.0,
        max_unread_bytes: int = 1 << 20,
        stream_interval: float = 0.0,
    ) -> None:
        """`stall_seconds`: a loop that sends no frame for this long counts as hung and is replaced.
        `max_unread_bytes`: bound on the output buffered for one stream. `stream_interval`: seconds between deliveries
        of a stream (`Delivery`)."""
        self._table = ModelTable(specs, tokenizers)
        self._new_transport = transport
        self._transport: Transport | None = None
        self._stall_seconds = stall_seconds
        self._max_unread_bytes = max_unread_bytes
        self._delivery = Delivery(stream_interval)
        self._streams: dict[str, GenerationStream] = {}
        self._encodes: dict[str, tuple[EncodeRequest, Encoding]] = {}
        self._observers: list[Callable[[StepStats], None]] = []
        self._pending = Commands()
        self._unready_reason = "not started"  # empty when ready
        self._started: asyncio.Future[None] | None = None
        self._start_seconds = 0.0  # of the slowest start
        self._last_events_time = time.monotonic()
        self._kill_reason = ""  # why the loop was killed; empty once it is gone
        self._restarts = 0
        self._restart_limit = FaultLimit(_MAX_RESTARTS, _RESTART_WINDOW)
        self._restarts_paused = False
        self._background: set[asyncio.Task[None]] = set()
        self._unloads: set[asyncio.Task[None]] = set()  # which end by themselves when the engine is closed
        self._closed = False

    @property
    def models(self) -> dict[str, ModelInfo]:
        return {name: model.info for name, model in self._table.served.items() if model.info is not None}

    @property
    def restarts(self) -> int:
        """The number of attempts to replace a lost loop; each loads all models again."""
        return self._restarts

    @property
    def transport(self) -> Transport | None:
        return self._transport

    async def start(self) -> None:
        """Load the models that are served from the start; raises `ConfigError` or `EngineDeadError`."""
        await self._start_transport()
        self._spawn(self._watch())

    async def load(self, spec: ModelSpec, tokenizer: Tokenizer | None) -> ModelInfo:
        """Load a model while others are served, as `triptych.service.core.engine_client.EngineClient.load` says."""
        self._check_ready()
        await self._table.wait_unloaded(spec.name)  # its load was given up just now, for example
        self._check_ready()
        future = self._table.begin_load(spec, tokenizer)
        self._next_commands().load.append(spec)
        try:
            return await future
        except asyncio.CancelledError:
            if self._table.give_up(spec.name):
                self._next_commands().unload.append(spec.name)
            elif spec.name in self._table.served:  # it was loaded at the same time
                self._begin_unload(spec.name, 0.0)
            raise

    async def unload(self, name: str, *, drain_seconds: float = 0.0) -> None:
        """Unload a model and its adapters; return when the memory is free. Raises `ModelNotLoadedError`.

        It accepts no requests from now on. Requests that run after `drain_seconds` end as cancelled. Cancelling this
        call does not stop the unloading.
        """
        adapters = [self._begin_unload(one, drain_seconds) for one in self._table.adapters_of(name)]
        if adapters:
            await asyncio.shield(asyncio.gather(*adapters))
        await asyncio.shield(self._begin_unload(name, drain_seconds))

    async def close(self) -> None:
        """Fail the unfinished requests and close the transport. Idempotent."""
        self._closed = True
        self._unready_reason = "shutting down"
        self._fail_all("the engine is shut down")
        for task in self._background:
            task.cancel()
        if self._transport is not None:
            await self._transport.close()
            self._transport = None

    def check_room(self, model: str, sequences: int = 1, tenant: str = "") -> None:
        """Raise what `submit` would raise for this many sequences of `model`, or `encode` for an input (0)."""
        self._check_ready()
        self._table[model].admission.check_room(sequences, tenant)

    def submit(self, requests: Sequence[Request]) -> GenerationStream:
        """Accept all requests (of one model) or none; raises `QueueFullError` or `EngineGoneError` before any work.

        Raises `ConfigError` for pictures where the model reads none.
        """
        self._check_ready()
        model = self._table[requests[0].model]
        if any(one.images for one in requests) and not (model.info is not None and model.info.reads_pictures):
            raise ConfigError(f"images: {requests[0].model} does not read pictures in prompts")
        model.admission_of(is_background=requests[0].is_background).admit(
            {r.request_id: r.num_tokens for r in requests},
            sequences={r.request_id: max(r.params.n, r.params.num_beams) for r in requests},
            tenant=requests[0].tenant,
        )
        stream = GenerationStream(self, requests, model.tokenizer, self._max_unread_bytes, self._delivery)
        for request in requests:
            self._streams[request.request_id] = stream
            model.requests.add(request.request_id)
        self._next_commands().generate.extend(requests)
        return stream

    async def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeOutput]:
        """Return one output for each request, in order; all are of one model. Cancelling this call aborts them.

        Raises what `submit` would raise for one request: only a few inputs are in the queue at a time.
        """
        self._check_ready()
        model = self._table[requests[0].model]
        encoding = Encoding(requests, model.admission_of(is_background=requests[0].is_background))
        first = encoding.begin()
        for request in requests:
            model.requests.add(request.request_id)
            self._encodes[request.request_id] = (request, encoding)
        self._next_commands().encode.extend(first)
        try:
            await encoding.done
            return [encoding.outputs[request.request_id] for request in requests]
        finally:
            encoding.close()
            for request in requests:
                if request.request_id in self._encodes:
                    if encoding.has_sent(request.request_id):
                        self.abort(request.model, request.request_id, None, FinishReason.CANCELLED)
                    self.release(request.model, request.request_id)

    def cancel(self, request_id: str) -> bool:
        """End a running request of either kind as cancelled; returns False if no request has this id."""
        if request_id in self._encodes:
            self.abort(self._encodes[request_id][0].model, request_id, None, FinishReason.CANCELLED)
            self._end_encode(EncodeOutput(request_id, finish_reason=FinishReason.CANCELLED))
            return True
        stream = self._streams.get(request_id)
        return stream is not None and stream.end(FinishReason.CANCELLED, abort_engine=True, only=request_id)

    def health(self) -> Health:
        """Report liveness and readiness.

        Not live: the loop hangs, or restarts are paused after too many losses. A hung loop is killed soon; then the
        engine is lost, and live.
        """
        if self._restarts_paused:
            return Health(live=False, ready=False, reason=self._unready_reason)
        if hang := self._kill_reason or self._hang_reason():
            return Health(live=False, ready=False, reason=hang)
        return Health(live=True, ready=not self._unready_reason, reason=self._unready_reason)

    def resident_memory(self) -> int:
        """Return the bytes that the engine process has in memory; 0 if there is none."""
        process = self._transport.pid if self._transport is not None else None
        return resident_memory(process) if process is not None else 0

    def stats(self) -> dict[str, EngineStats]:
        return {name: model.current_stats for name, model in self._table.served.items()}

    def num_running(self, model: str) -> int:
        """Return the number of sequences that run in a model's engine."""
        return self._table.running(model)

    def demand(self) -> dict[str, Demand]:
        """Return the demand of each model, by name; that of adapters is part of their base's."""
        served = self._table.served.items()
        return {name: model.admission.demand(model.stats) for name, model in served if not model.is_adapter}

    def on_step(self, observe: Callable[[StepStats], None]) -> None:
        """Call `observe` with the statistics of every step from now on."""
        self._observers.append(observe)

    def abort(self, model: str, request_id: str, index: int | None, reason: FinishReason) -> None:
        """Tell the engine to end a request or one of its sequences; one that has ended is ignored."""
        self._next_commands().abort.append(Abort(model, request_id, index, reason))

    def started(self, model: str, request_id: str, cached_tokens: int) -> None:
        """Stop counting a request's tokens as waiting, because it has an output."""
        self._table.mark_started(model, request_id, cached_tokens)

    def release(self, model: str, request_id: str) -> None:
        """Remove a request that has ended: it no longer counts in admission control and gets no more outputs."""
        self._streams.pop(request_id, None)
        self._encodes.pop(request_id, None)
        self._table.release(model, request_id)

    # -- unloading

    def _begin_unload(self, name: str, drain_seconds: float) -> asyncio.Task[None]:
        model, gone = self._table.begin_unload(name)
        task = asyncio.get_running_loop().create_task(self._unload(model, gone, drain_seconds))
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)
        return task

    async def _unload(self, model: FrontModel, gone: asyncio.Future[None], drain_seconds: float) -> None:
        """Wait for a model's requests, end the rest, and have the engine free it."""
        name = model.spec.name
        if self._unready_reason:  # no engine has it: a starting engine is told to free it
            self._table.unloaded(name)
            return
        drained = asyncio.ensure_future(model.drained.wait())
        await asyncio.wait((drained, gone), timeout=drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        if not gone.done():
            for stream in {stream for stream in self._streams.values() if stream.model == name}:
                stream.end(FinishReason.CANCELLED, abort_engine=True)
            for encode in [encode for encode, _ in self._encodes.values() if encode.model == name]:
                self.cancel(encode.request_id)
            self._next_commands().unload.append(name)
        await gone

    # -- commands to the loop

    def _next_commands(self) -> Commands:
        """Return the frame being filled; it is sent after the event loop's current callbacks."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        return self._pending

    def _flush(self) -> None:
        commands, self._pending = self._pending, Commands()
        if commands and self._transport is not None and not self._unready_reason:
            self._transport.send(commands)

    def _check_ready(self) -> None:
        if self._unready_reason:
            raise EngineGoneError(self._unready_reason)

    def _hang_reason(self) -> str:
        """Describe a hang of the loop; empty while frames arrive and while no engine is ready."""
        silent = time.monotonic() - self._last_events_time
        if self._unready_reason or silent <= self._stall_seconds:
            return ""
        return f"the engine has given no sign for {silent:.0f} s"

    # -- events from the loop

    def _on_events(self, events: Events) -> None:
        self._last_events_time = time.monotonic()
        for info in events.loaded:
            self._table.loaded(info)
        for failure in events.load_failures:
            self._table.load_failed(failure)
        for name in events.unloaded:
            self._table.unloaded(name)
        if events.ready or events.failure is not None:
            self._finish_start(events)
        for stats in events.stats:
            self._table.set_stats(stats)
        for step in events.steps:
            self._table.observe(step)
            for observe in self._observers:
                observe(step)
        for output in events.tokens:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.push(output)
        for encoded in events.encoded:
            self._end_encode(encoded)

    def _end_encode(self, output: EncodeOutput) -> None:
        if output.request_id in self._encodes:
            request, encoding = self._encodes[output.request_id]
            if following := encoding.add(output):  # before the release: a model with requests is not unloaded
                self._next_commands().encode.extend(following)
            self.release(request.model, output.request_id)

    def _finish_start(self, events: Events) -> None:
        if events.failure is None:
            self._unready_reason = ""
            self._next_commands().unload.extend(self._table.left_while_started())
            if self._started is not None and not self._started.done():
                self._started.set_result(None)
            return
        error = ConfigError(events.failure) if events.invalid else EngineDeadError(events.failure)
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
        else:
            self._on_lost(events.failure)

    def _on_lost(self, reason: str) -> None:
        """Fail all unfinished requests of a loop that is gone, and start a new one."""
        if self._closed or (self._unready_reason and (self._started is None or self._started.done())):
            return
        logger.error("engine lost: %s", reason)
        self._fail_all(reason)
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineDeadError(reason))
        else:
            self._unready_reason = reason
            self._spawn(self._restart())

    def _fail_all(self, reason: str) -> None:
        error = EngineDeadError(reason)
        for stream in set(self._streams.values()):
            stream.fail(error)
        for request_id, (request, encoding) in list(self._encodes.items()):
            self.release(request.model, request_id)
            if not encoding.done.done():
                encoding.done.set_exception(error)
        self._table.lost(error)

    # -- start, restart and supervision

    async def _start_transport(self) -> None:
        began = time.monotonic()
        self._unready_reason = "loading models"
        self._started = asyncio.get_running_loop().create_future()
        self._transport = self._new_transport()
        try:
            await self._transport.start(self._on_events, self._on_lost)
            self._transport.send(self._table.start_commands())
            await self._started
            self._start_seconds = max(self._start_seconds, time.monotonic() - began)
        except Exception as error:  # also OSError: no descriptors or memory for a process
            self._unready_reason = str(error)
            await self._transport.close()
            raise

    async def _restart(self) -> None:
        for pause in chain(_RESTART_SECONDS, repeat(_RESTART_SECONDS[-1])):
            if self._transport is not None:
                await self._transport.close()
            self._kill_reason = ""
            if self._restart_limit.record_fault():
                await self._pause_restarts()
            await asyncio.sleep(pause)
            self._restarts += 1
            limit = self._start_limit
            try:
                async with asyncio.timeout(limit):
                    await self._start_transport()
            except TimeoutError:
                self._unready_reason = f"the engine did not start within {limit:.0f} s"
                logger.error("%s", self._unready_reason)
            except Exception as error:
                logger.error("the engine did not start again: %s", error)
            else:
                logger.info("the engine runs again")
                return

    @property
    def _start_limit(self) -> float:
        """The seconds that a lost engine may take to start with the models that are served; then it is killed."""
        loads = sum(info.load_seconds for info in self.models.values())
        return _LEAST_START_SECONDS + _START_PATIENCE * (self._start_seconds + loads)

    async def _pause_restarts(self) -> None:
        """Report not live for `_RESTART_WINDOW`: restarting does not help, so a supervisor must act."""
        limit = self._restart_limit
        restarts = f"it was started again {limit.max_faults} times within {limit.seconds:.0f} s"
        self._unready_reason += f"; {restarts} and is left alone for as long"
        self._restarts_paused = True
        logger.error("%s", self._unready_reason)
        await asyncio.sleep(limit.seconds)
        self._restarts_paused = False

    async def _watch(self) -> None:
        """Enforce deadlines and the stall limit by the front's own clock, in case the engine hangs."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_WATCH_SECONDS)
            now = time.monotonic()
            # While this process did not run (in a paused container, for example), the engine was not silent.
            self._last_events_time = min(now, self._last_events_time + max(0.0, now - before - _WATCH_SECONDS))
            self._end_expired(now - _DEADLINE_GRACE)
            self._kill_if_hung()

    def _end_expired(self, time_limit: float) -> None:
        """End the requests whose deadline is before `time_limit`."""
        for request_id, stream in list(self._streams.items()):
            deadline = stream.deadline(request_id)
            if deadline is not None and deadline < time_limit:
                stream.end(FinishReason.DEADLINE, abort_engine=True, only=request_id)
        for encode, _ in list(self._encodes.values()):
            if encode.deadline is not None and encode.deadline < time_limit:
                self._end_encode(EncodeOutput(encode.request_id, finish_reason=FinishReason.DEADLINE))

    def _kill_if_hung(self) -> None:
        """Kill a hung loop and treat it as lost."""
        reason = self._hang_reason()
        if reason and self._transport is not None and self._transport.kill():
            self._kill_reason = reason
            self._on_lost(reason)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
