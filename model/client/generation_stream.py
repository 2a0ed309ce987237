"""A stream buffers the outputs of one `submit` between the engine and its reader.

The engine never waits for a reader: outputs are buffered here, up to a bound in bytes. A read merges the buffered
outputs of a sequence into one, so a slow reader gets the tokens of several steps at once. With an interval every
reader does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from model.api.request import FinishReason, Request, TokenOutput
from model.errors import EngineDeadError
from model.text.tokenizer import Detokenizer, Tokenizer

_EVENT_BYTES = 200  # estimated size of an event without its text and log-probabilities
_TOKEN_BYTES = 4  # estimated text of a token that is not detokenised yet
_LOGPROB_BYTES = 48

_SequenceKey = tuple[str, int]  # request id, index of the sequence in its request
_SizedOutput = tuple[TokenOutput, int]  # an output and its estimated bytes


class StreamOwner(Protocol):
    """The engine client that feeds a stream, as the stream sees it."""

    def abort(self, model: str, request_id: str, index: int | None, reason: FinishReason) -> None: ...

    def release(self, request_id: str) -> None: ...


class GenerationStream:
    """An asynchronous iterator over the merged outputs of one or more requests; it ends when all sequences have ended.

    The reader must close it (`aclose`) in any case, which aborts unfinished sequences. Once more than
    `max_unread_bytes` are buffered, every open sequence ends as cancelled.

    With an `interval` (seconds) buffered outputs are delivered at most that often. A sequence's first and last output
    are delivered at once, with everything buffered.
    """

    def __init__(
        self,
        engine: StreamOwner,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        max_unread_bytes: int,
        interval: float = 0.0,
    ) -> None:
        self._engine = engine
        self.model = requests[0].model
        self._requests = {request.request_id: request for request in requests}
        self._open: set[_SequenceKey] = {(r.request_id, index) for r in requests for index in range(r.params.n)}
        self._started: set[_SequenceKey] = set()  # have had an output
        self._detokenizers: dict[_SequenceKey, Detokenizer] = {}
        if tokenizer is not None:
            self._detokenizers = {key: Detokenizer.of(tokenizer, self._requests[key[0]].params) for key in self._open}
        # Stop strings need each token's text at once; otherwise detokenisation waits for a read.
        self._has_stop_strings = any(request.params.stop for request in requests)
        self._received: list[_SizedOutput] = []
        self._ready: deque[_SizedOutput] = deque()  # merged: at most one output a sequence
        self._unread_bytes = 0
        self._max_unread_bytes = max_unread_bytes
        self._failure: EngineDeadError | None = None
        self._loop = asyncio.get_running_loop()
        self._waiting_reader: asyncio.Future[None] | None = None
        self._interval = interval
        self._last_delivery = 0.0  # by the event loop's clock
        self._delivery_timer: asyncio.TimerHandle | None = None

    def deadline(self, request_id: str) -> float | None:
        return self._requests[request_id].deadline

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> TokenOutput:
        while not self._ready:
            if self._received and not self._interval:
                self._merge_received()
            elif self._failure is not None:
                raise self._failure
            elif not self._open:
                raise StopAsyncIteration
            else:
                self._waiting_reader = self._loop.create_future()
                await self._waiting_reader
        output, size = self._ready.popleft()
        self._unread_bytes -= size
        return output

    async def aclose(self) -> None:
        self.end(FinishReason.CANCELLED, abort_engine=True)

    def push(self, output: TokenOutput) -> None:
        """Buffer an output of the engine; an output of an ended sequence is dropped."""
        key = (output.request_id, output.index)
        if key not in self._open:
            return
        if self._has_stop_strings and key in self._detokenizers and self._detokenizers[key].fill(output):
            self._engine.abort(self.model, output.request_id, output.index, FinishReason.STOP)
        size = _estimated_bytes(output)
        self._received.append((output, size))
        self._unread_bytes += size
        if output.finish_reason is not None:
            self._close_sequence(key)
        elif self._unread_bytes > self._max_unread_bytes:
            self.end(FinishReason.CANCELLED, abort_engine=True)
        if not self._interval:
            self._wake_reader()
        elif output.finish_reason is not None or key not in self._started:
            self._started.add(key)
            self._deliver()
        elif self._delivery_timer is None:
            self._delivery_timer = self._loop.call_at(self._last_delivery + self._interval, self._deliver)

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
        self._deliver()

    def _merge_received(self) -> None:
        """Move the received outputs to `_ready`, merged into one a sequence, with their text."""
        received, self._received = self._received, []
        if len(received) > 1:
            merged: dict[_SequenceKey, _SizedOutput] = {}
            for output, size in received:
                key = (output.request_id, output.index)
                earlier = merged.get(key)
                merged[key] = (output, size) if earlier is None else (_merge(earlier[0], output), earlier[1] + size)
            received = list(merged.values())
        if not self._has_stop_strings and self._detokenizers:
            for output, _ in received:
                self._detokenizers[output.request_id, output.index].fill(output)
        self._ready.extend(received)

    def _deliver(self) -> None:
        """Make everything received readable now; outputs that come later are not merged into it."""
        if self._delivery_timer is not None:
            self._delivery_timer.cancel()
            self._delivery_timer = None
        self._last_delivery = self._loop.time()
        self._merge_received()
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._waiting_reader is not None and not self._waiting_reader.done():
            self._waiting_reader.set_result(None)

    def _close_sequence(self, key: _SequenceKey) -> None:
        self._open.discard(key)
        if all(request_id != key[0] for request_id, _ in self._open):
            self._engine.release(key[0])


def _merge(output: TokenOutput, later: TokenOutput) -> TokenOutput:
    """Add a sequence's later output to `output`, which is changed and returned."""
    output.token_ids += later.token_ids
    output.text += later.text
    if output.logprobs is None:
        output.logprobs = later.logprobs
    else:
        output.logprobs += later.logprobs or ()
    if output.prompt_logprobs is None:
        output.prompt_logprobs = later.prompt_logprobs
    if output.scheduled_time is None:
        output.scheduled_time = later.scheduled_time
    output.finish_reason, output.stop_reason = later.finish_reason, later.stop_reason
    output.score, output.error = later.score, later.error
    output.cached_tokens = max(output.cached_tokens, later.cached_tokens)
    return output


def _estimated_bytes(output: TokenOutput) -> int:
    """Estimate an output's size as an event. Prompt log-probabilities come once and do not count."""
    size = _EVENT_BYTES + max(len(output.text), _TOKEN_BYTES * len(output.token_ids))
    if output.logprobs:
        size += _LOGPROB_BYTES * sum(1 + len(logprob.top) for logprob in output.logprobs)
    return size
