"""A stream buffers the outputs of one `submit` between the engine and its reader.

The engine never waits for a reader: outputs are buffered here, up to a bound in bytes. A read merges the buffered
outputs of a sequence into one, so a slow reader gets the tokens of several steps at once. With an interval every
reader does.

There are two ways to read: to iterate over the outputs, or to be called back (`listen`) and take them all (`take`),
which wakes no task.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from triptych.model.api.request import FinishReason, Request, TokenOutput
from triptych.model.errors import EngineDeadError
from triptych.model.text.detokenizer import Detokenizer
from triptych.model.text.tokenizer import Tokenizer

# -- Delivery calls the readers of streams back, all readers of one engine frame together. A stream with something to
# read is called once: after the callbacks that are due now, so that all frames that have arrived are handled together;
# or, with an interval, when its next delivery is due. Times of delivery are rounded up to an eighth of the interval, so
# that streams share timers. Everything runs on one event loop.

_TICKS = 8  # an interval

logger = logging.getLogger(__name__)


class Deliverable(Protocol):
    """A stream, as delivery sees it."""

    def deliver(self) -> None:
        """Wake the reader."""

    def deliver_due(self) -> None:
        """Make the held outputs readable, and wake the reader."""


class Delivery:
    """Schedules the deliveries of all streams of one engine client."""

    def __init__(self, interval: float = 0.0) -> None:
        """`interval`: seconds between two deliveries of a stream; 0: everything is delivered as soon as it comes."""
        self.interval = interval
        self._soon: list[Deliverable] = []
        self._due: dict[int, list[Deliverable]] = {}  # by tick

    def soon(self, stream: Deliverable) -> None:
        """Call `deliver` after the callbacks that are due now."""
        if not self._soon:
            asyncio.get_running_loop().call_soon(self._deliver_soon)
        self._soon.append(stream)

    def after(self, stream: Deliverable, last: float) -> None:
        """Call `deliver_due` one interval after the delivery at `last`, a time of the event loop."""
        loop = asyncio.get_running_loop()
        seconds = self.interval / _TICKS
        tick = math.ceil((last + self.interval) / seconds)
        waiting = self._due.get(tick)
        if waiting is None:
            waiting = self._due[tick] = []
            loop.call_at(tick * seconds, self._deliver_due, tick)
        waiting.append(stream)

    def _deliver_soon(self) -> None:
        streams, self._soon = self._soon, []
        _call([stream.deliver for stream in streams])

    def _deliver_due(self, tick: int) -> None:
        _call([stream.deliver_due for stream in self._due.pop(tick)])


def _call(calls: Iterable[Callable[[], None]]) -> None:
    """Make all calls; if one raises, log it and continue, because the others are of other streams."""
    for call in calls:
        try:
            call()
        except Exception:
            logger.exception("a stream could not be delivered")


_EVENT_BYTES = 200  # estimated size of an event without its text and log-probabilities
_TOKEN_BYTES = 4  # estimated text of a token that is not detokenised yet
_LOGPROB_BYTES = 48

_SequenceKey = tuple[str, int]  # request id, index of the sequence in its request


class StreamOwner(Protocol):
    """The engine client, as a stream uses it."""

    def abort(self, model: str, request_id: str, index: int | None, reason: FinishReason) -> None: ...

    def started(self, model: str, request_id: str, cached_tokens: int) -> None:
        """Record that a sequence of the request has its first output."""

    def release(self, model: str, request_id: str) -> None: ...


class GenerationStream:
    """The buffered outputs of one or more requests; it ends when all sequences have ended.

    The reader must close it (`aclose`) in any case, which aborts unfinished sequences. Once more than
    `max_unread_bytes` are buffered, every open sequence ends as cancelled.

    With an interval (`Delivery`) buffered outputs are delivered at most that often. A sequence's first and last output
    are delivered at once, with everything buffered.
    """

    def __init__(
        self,
        engine: StreamOwner,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        max_unread_bytes: int,
        delivery: Delivery,
    ) -> None:
        self._engine = engine
        self.model = requests[0].model
        self._requests = {request.request_id: request for request in requests}
        self._open: set[_SequenceKey] = {(r.request_id, index) for r in requests for index in range(r.params.n)}
        self._is_single = len(self._open) == 1
        self._started: set[_SequenceKey] = set()  # have had an output
        self._detokenizers: dict[_SequenceKey, Detokenizer] = {}
        if tokenizer is not None:
            self._detokenizers = {key: Detokenizer.of(tokenizer, self._requests[key[0]].params) for key in self._open}
        # Stop strings need each token's text at once; otherwise detokenisation waits for a read.
        self._has_stop_strings = any(one.params.stop or one.params.line_stop for one in requests)
        self._held: list[TokenOutput] = []  # until the interval is over
        self._received: list[TokenOutput] = []  # readable, not merged yet
        self._ready: deque[TokenOutput] = deque()  # merged: at most one output a sequence
        self._held_bytes = self._unread_bytes = 0  # estimated; unread: of all three
        self._max_unread_bytes = max_unread_bytes
        self._failure: EngineDeadError | None = None
        self._delivery = delivery
        self._last_delivery = 0.0  # by the event loop's clock
        self._is_due_later = self._is_due_soon = False
        self._waiting_reader: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None

    def deadline(self, request_id: str) -> float | None:
        return self._requests[request_id].deadline

    # -- for the reader

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> TokenOutput:
        while not self._ready:
            if self._received:
                self._merge_received()
            elif self._failure is not None:
                raise self._failure
            elif not self._open:
                raise StopAsyncIteration
            else:
                self._waiting_reader = asyncio.get_running_loop().create_future()
                await self._waiting_reader
        output = self._ready.popleft()
        if not self._ready and not self._received:
            self._unread_bytes = self._held_bytes
        return output

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever outputs are ready or the engine was lost; soon, if that is so already."""
        self._listener = listener
        self._deliver_soon()

    def take(self) -> Sequence[TokenOutput]:
        """Return all readable outputs. Raises `EngineDeadError` after the last outputs of a lost engine."""
        if self._received:
            self._merge_received()
        elif not self._ready and self._failure is not None:
            raise self._failure
        outputs, self._ready = self._ready, deque()
        self._unread_bytes = self._held_bytes
        if self._failure is not None:
            self._deliver_soon()  # nothing else would call the listener to take the failure
        return outputs

    async def aclose(self) -> None:
        self._listener = None
        self.end(FinishReason.CANCELLED, abort_engine=True)

    # -- for the engine client

    def push(self, output: TokenOutput) -> None:
        """Buffer an output of the engine; outputs of ended sequences are dropped."""
        key = (output.request_id, output.index)
        if key not in self._open:
            return
        if self._has_stop_strings and key in self._detokenizers and self._detokenizers[key].fill(output):
            self._engine.abort(self.model, output.request_id, output.index, FinishReason.STOP)
        size = _estimated_bytes(output)
        self._unread_bytes += size
        self._hold(output, size)
        if key not in self._started:
            self._started.add(key)
            self._engine.started(self.model, output.request_id, output.cached_tokens)
            self._deliver_held()
        elif output.finish_reason is not None:
            self._deliver_held()
        if output.finish_reason is not None:
            self._close_sequence(key)
        elif self._unread_bytes > self._max_unread_bytes:
            self.end(FinishReason.CANCELLED, abort_engine=True)

    def end(self, reason: FinishReason, *, abort_engine: bool, only: str | None = None) -> bool:
        """End the open sequences (of request `only`, if given); False if there were none.

        `abort_engine`: abort the requests in the engine too.
        """
        ending = sorted(key for key in self._open if only in (None, key[0]))
        for request_id in {key[0] for key in ending} if abort_engine else ():
            self._engine.abort(self.model, request_id, None, reason)
        for request_id, index in ending:
            self.push(TokenOutput(request_id, index, finish_reason=reason))
        return bool(ending)

    def fail(self, error: EngineDeadError) -> None:
        """End every open sequence; the reader gets the buffered outputs, then `error`."""
        self._failure = error
        for key in list(self._open):
            self._close_sequence(key)
        self._deliver_held()

    # -- delivery

    def _hold(self, output: TokenOutput, size: int) -> None:
        """Hold an output until the interval is over; without one it is readable at once."""
        if not self._delivery.interval:
            self._received.append(output)
            self._deliver_soon()
            return
        self._held.append(output)
        self._held_bytes += size
        if not self._is_due_later:
            self._deliver_when_due()

    def _deliver_held(self) -> None:
        """Make all received outputs readable now; later ones are held again."""
        if self._held:
            self._received += self._held
            self._held, self._held_bytes = [], 0
            self._last_delivery = asyncio.get_running_loop().time()
        self._deliver_soon()

    def _deliver_when_due(self) -> None:
        """Deliver the held outputs one interval after the last delivery."""
        if self._last_delivery + self._delivery.interval <= asyncio.get_running_loop().time():
            self._deliver_held()
        else:
            self._is_due_later = True
            self._delivery.after(self, self._last_delivery)

    def _deliver_soon(self) -> None:
        if not self._is_due_soon:
            self._is_due_soon = True
            self._delivery.soon(self)

    def deliver(self) -> None:
        """Wake the reader, whichever way it reads."""
        self._is_due_soon = False
        if self._waiting_reader is not None and not self._waiting_reader.done():
            self._waiting_reader.set_result(None)
        elif self._listener is not None and (self._ready or self._received or self._failure is not None):
            self._listener()

    def deliver_due(self) -> None:
        """Deliver the held outputs, unless a delivery in the meantime has started a new interval."""
        self._is_due_later = False
        if self._held:
            self._deliver_when_due()

    def _merge_received(self) -> None:
        """Move the received outputs to `_ready`, merged into one for each sequence, with their text."""
        received, self._received = self._received, []
        if len(received) > 1 and self._is_single:
            first, *others = received
            for output in others:
                _merge(first, output)
            received = [first]
        elif len(received) > 1:
            merged: dict[_SequenceKey, TokenOutput] = {}
            for output in received:
                key = (output.request_id, output.index)
                earlier = merged.get(key)
                merged[key] = output if earlier is None else _merge(earlier, output)
            received = list(merged.values())
        if not self._has_stop_strings and self._detokenizers:
            for output in received:
                self._detokenizers[output.request_id, output.index].fill(output)
        self._ready.extend(received)

    def _close_sequence(self, key: _SequenceKey) -> None:
        self._open.discard(key)
        if all(request_id != key[0] for request_id, _ in self._open):
            self._engine.release(self.model, key[0])


def _merge(output: TokenOutput, later: TokenOutput) -> TokenOutput:
    """Add a sequence's later output to `output`, which is changed and returned."""
    output.token_ids += later.token_ids
    output.text += later.text
    output.drafted_tokens += later.drafted_tokens
    output.accepted_tokens += later.accepted_tokens
    if later.cumulative_logprob is not None:
        output.cumulative_logprob = later.cumulative_logprob
    if later.finish_reason is None and later.scheduled_time is None and later.logprobs is None:
        return output  # a token in the middle, which has nothing else
    if output.logprobs is None:
        output.logprobs = later.logprobs
    else:
        output.logprobs += later.logprobs or ()
    if output.prompt_logprobs is None:
        output.prompt_logprobs = later.prompt_logprobs
    if output.probe_logprobs is None:
        output.probe_logprobs = later.probe_logprobs
    if output.alignment is None:
        output.alignment = later.alignment
    if output.scheduled_time is None:
        output.scheduled_time = later.scheduled_time
    output.finish_reason, output.stop_reason = later.finish_reason, later.stop_reason
    output.score, output.error = later.score, later.error
    output.is_missing = later.is_missing
    output.cached_tokens = max(output.cached_tokens, later.cached_tokens)
    return output


def _estimated_bytes(output: TokenOutput) -> int:
    """Estimate an output's size as an event. Prompt log-probabilities come once and do not count."""
    size = _EVENT_BYTES + max(len(output.text), _TOKEN_BYTES * len(output.token_ids))
    if output.logprobs:
        size += _LOGPROB_BYTES * sum(1 + len(logprob.top) for logprob in output.logprobs)
    return size
