"""The outputs of one `submit`, from the engine's frames to the one who reads them.

Engines never wait for a reader: what comes waits here, within a bound. A reader gets what has come, one output for each
sequence: one that is behind gets several steps' tokens in one, and with an interval every one does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from model.api.request import FinishReason, Request, TokenOutput
from model.errors import EngineDeadError
from model.text.tokenizer import Detokenizer, Tokenizer

_EVENT_BYTES = 200  # of an output as an event, beside its text and log-probabilities
_TOKEN_BYTES = 4  # of text, where it is not known yet
_LOGPROB_BYTES = 48

_Key = tuple[str, int]  # a request's id, and which of its sequences
_Sized = tuple[TokenOutput, int]  # with the bytes it counts for


class Keeper(Protocol):
    """What a stream asks of those who feed it."""

    def abort(self, model: str, request_id: str, index: int | None, reason: FinishReason) -> None: ...

    def forget(self, request_id: str) -> None: ...


class GenerationStream:
    """Outputs of one or more requests, merged, until each of their sequences has ended.

    Iterate it, and close it (`aclose`) however that ended: what is not finished is then aborted. So is what nobody
    reads: once more than `max_unread_bytes` wait, every open sequence ends as cancelled.

    With an `interval` (seconds) outputs are held back until so long after the last ones were given out, except a
    sequence's first and last, which let go of all that waits.
    """

    def __init__(
        self,
        engine: Keeper,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        max_unread_bytes: int,
        interval: float = 0.0,
    ) -> None:
        self._engine = engine
        self.model = requests[0].model
        self._requests = {request.request_id: request for request in requests}
        self._open: set[_Key] = {(r.request_id, index) for r in requests for index in range(r.params.n)}
        self._begun: set[_Key] = set()
        self._detokenizers: dict[_Key, Detokenizer] = {}
        if tokenizer is not None:
            self._detokenizers = {key: Detokenizer.of(tokenizer, self._requests[key[0]].params) for key in self._open}
        self._stops = any(request.params.stop for request in requests)  # then text is made as tokens come
        self._come: list[_Sized] = []
        self._ready: deque[_Sized] = deque()  # one of each sequence
        self._unread_bytes = 0
        self._max_unread_bytes = max_unread_bytes
        self._failure: EngineDeadError | None = None
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Future[None] | None = None
        self._interval = interval
        self._given = 0.0  # when, by the loop's clock
        self._hold: asyncio.TimerHandle | None = None

    def deadline(self, request_id: str) -> float | None:
        return self._requests[request_id].deadline

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> TokenOutput:
        while not self._ready:
            if self._come and not self._interval:
                self._take()
            elif self._failure is not None:
                raise self._failure
            elif not self._open:
                raise StopAsyncIteration
            else:
                self._reader = self._loop.create_future()
                await self._reader
        output, size = self._ready.popleft()
        self._unread_bytes -= size
        return output

    async def aclose(self) -> None:
        self.end(FinishReason.CANCELLED, tell_engine=True)

    def push(self, output: TokenOutput) -> None:
        """Take an output from the engine; what belongs to an ended sequence is dropped."""
        key = (output.request_id, output.index)
        if key not in self._open:
            return
        if self._stops and key in self._detokenizers and self._detokenizers[key].fill(output):
            self._engine.abort(self.model, output.request_id, output.index, FinishReason.STOP)
        size = _size(output)
        self._come.append((output, size))
        self._unread_bytes += size
        if output.finish_reason is not None:
            self._close(key)
        elif self._unread_bytes > self._max_unread_bytes:
            self.end(FinishReason.CANCELLED, tell_engine=True)
        if not self._interval:
            self._wake()
        elif output.finish_reason is not None or key not in self._begun:
            self._begun.add(key)
            self._release()
        elif self._hold is None:
            self._hold = self._loop.call_at(self._given + self._interval, self._release)

    def end(self, reason: FinishReason, *, tell_engine: bool, only: str | None = None) -> bool:
        """End what is open (of request `only`); False if nothing was."""
        ending = sorted(key for key in self._open if only in (None, key[0]))
        for request_id in {key[0] for key in ending} if tell_engine else ():
            self._engine.abort(self.model, request_id, None, reason)
        for request_id, index in ending:
            self.push(TokenOutput(request_id, index, finish_reason=reason))
        return bool(ending)

    def fail(self, error: EngineDeadError) -> None:
        self._failure = error
        for key in list(self._open):
            self._close(key)
        self._release()

    def _take(self) -> None:
        """Make what has come ready to be read: one output of each sequence, with its text."""
        come, self._come = self._come, []
        if len(come) > 1:
            found: dict[_Key, _Sized] = {}
            for output, size in come:
                key = (output.request_id, output.index)
                before = found.get(key)
                found[key] = (output, size) if before is None else (_joined(before[0], output), before[1] + size)
            come = list(found.values())
        if not self._stops and self._detokenizers:
            for output, _ in come:
                self._detokenizers[output.request_id, output.index].fill(output)
        self._ready.extend(come)

    def _release(self) -> None:
        """Give out what waits, whenever the last was: what comes from now on cannot hold it back again."""
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
        self._given = self._loop.time()
        self._take()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _close(self, key: _Key) -> None:
        self._open.discard(key)
        if all(request_id != key[0] for request_id, _ in self._open):
            self._engine.forget(key[0])


def _joined(output: TokenOutput, later: TokenOutput) -> TokenOutput:
    """What both say of one sequence, as one output."""
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


def _size(output: TokenOutput) -> int:
    """About its bytes as an event. Log-probabilities of the prompt come once and do not count."""
    size = _EVENT_BYTES + max(len(output.text), _TOKEN_BYTES * len(output.token_ids))
    if output.logprobs:
        size += _LOGPROB_BYTES * sum(1 + len(one.top) for one in output.logprobs)
    return size
