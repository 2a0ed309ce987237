"""Admission control bounds the requests and tokens that wait for one model. No torch.

The front counts requests as they arrive: a request is refused before any work, never dropped afterwards. A request's
tokens count as waiting until its first output; sequences beyond `max_num_seqs` wait by definition.

Of the inputs of one call of `encode` a few are with the engine, and the front holds the others; these are counted
apart. The engine computes inputs in the order in which they come. As a call of any size sends few at a time, by the
rate at which its inputs are computed, others' inputs come in between, and it takes little of the queue's room.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence

from triptych.model.api.engine_config import BatchLimits, EngineConfig
from triptych.model.api.request import EncodeOutput, EncodeRequest
from triptych.model.api.stats import Demand, EngineStats
from triptych.model.errors import QueueFullError

_MAX_RETRY_SECONDS = 60.0
_SHARE_STEPS = 2  # that the inputs of one call may fill in the queue: while one is computed, the next is ready
_SHARE_SECONDS = 0.2  # for which they may fill it
_FIRST_SHARE = 4  # before a call's rate is known it fills 1 / 4 of a step
_MAX_HELD_TOKENS = 1 << 21  # of inputs that are held back: about 80 MB
_RATE_WINDOW = 64  # ends of requests from which their rate is computed


class Admission:
    """Counts the requests and tokens that one model has admitted and not yet finished."""

    def __init__(self, config: EngineConfig) -> None:
        """Uses the limits for a CPU until `set_limits` brings those of the loaded model."""
        self._block_size = config.block_size
        self.set_limits(config.limits())
        self._sequences: dict[str, int] = {}  # number of sequences, by id of every unfinished request
        self._waiting: dict[str, int] = {}  # tokens, by id of every such request without an output
        self._num_sequences = 0  # the sum of `_sequences`
        self._waiting_tokens = 0  # the sum of `_waiting`
        self._held_tokens = 0
        self._ends: deque[float] = deque(maxlen=_RATE_WINDOW)  # times at which requests ended

    def set_limits(self, limits: BatchLimits) -> None:
        """Replace the limits; some depend on the device, which is known once the model is loaded."""
        self._max_running = limits.max_num_seqs
        self._step_tokens = limits.max_num_batched_tokens
        self._max_sequences = limits.max_num_seqs + limits.max_queued_requests
        self._max_waiting_tokens = max(1, limits.max_queued_tokens)

    def admit(self, tokens: Mapping[str, int], *, sequences: Mapping[str, int] | None = None) -> None:
        """Admit all requests (id -> prompt tokens) or none; raises `QueueFullError`.

        With no unfinished request any number of sequences is admitted, so that no request is refused forever.
        """
        number = sequences or dict.fromkeys(tokens, 1)
        self.check_room(sum(number.values()))
        self._num_sequences += sum(number.values())
        self._waiting_tokens += sum(tokens.values())
        self._sequences.update(number)
        self._waiting.update(tokens)

    def check_room(self, sequences: int = 1) -> None:
        """Raise `QueueFullError` where `admit` would refuse this number of sequences.

        The token bound looks at the tokens that wait already, not at the new prompt's. So the answer is known before
        tokenisation, and long prompts are admitted as often as short ones; the last one may exceed the bound.
        """
        admitted = self._num_sequences
        if admitted and admitted + sequences > self._max_sequences:
            raise QueueFullError("queue_requests", self._retry_after(sequences))
        if self.waiting_tokens >= self._max_waiting_tokens:
            raise QueueFullError("queue_tokens", self._retry_after(1))

    def hold(self, tokens: Sequence[int]) -> None:
        """Admit the inputs of one call, given the tokens of each; all are held at first; raises `QueueFullError`.

        A call is admitted where a single input is. What is held back is bounded, by what others hold already.
        """
        self.check_room()
        total = sum(tokens)
        fits = len(tokens) <= _SHARE_STEPS * self._max_running and total <= _SHARE_STEPS * self._step_tokens
        if not fits and self._held_tokens >= _MAX_HELD_TOKENS:
            raise QueueFullError("queue_tokens", self._retry_after(len(tokens)))
        self._held_tokens += total

    def has_share(self, sequences: int, tokens: int, rate: float | None) -> bool:
        """Return whether a call that has `sequences` inputs in the queue may add one, for `tokens` in all.

        It may always have one; others while the queue has room, for the time that others may have to wait for them at
        `rate` tokens a second (None: not known yet), and for two steps at most.
        """
        if not sequences:
            return True
        most = self._step_tokens // _FIRST_SHARE if rate is None else _SHARE_SECONDS * rate
        if sequences >= _SHARE_STEPS * self._max_running or tokens > min(most, _SHARE_STEPS * self._step_tokens):
            return False
        return self._num_sequences < self._max_sequences and self._waiting_tokens < self._max_waiting_tokens

    def take_held(self, request_id: str, tokens: int) -> None:
        """Count an input that was held as one in the queue."""
        self._held_tokens -= tokens
        self._num_sequences += 1
        self._waiting_tokens += tokens
        self._sequences[request_id] = 1
        self._waiting[request_id] = tokens

    def let_go(self, tokens: int) -> None:
        """Stop counting inputs that were held."""
        self._held_tokens -= tokens

    @property
    def has_requests(self) -> bool:
        """Whether any admitted request has not ended."""
        return bool(self._sequences)

    @property
    def waiting_tokens(self) -> int:
        """The tokens of prompts and inputs that have no output yet."""
        return self._waiting_tokens

    def demand(self, stats: EngineStats) -> Demand:
        return Demand(self.saturation(stats), self.waiting_tokens + self._held_tokens)

    def saturation(self, stats: EngineStats) -> float:
        """The load as a fraction of what can run at once, by sequences or by tokens, whichever is larger.

        Above 1 some requests wait. Tokens are those in KV blocks plus those that wait; layers with a window
        have a fraction of their own. Without a KV cache it is the waiting tokens over their bound.
        """
        tokens = self.waiting_tokens
        if not stats.total_blocks:
            return tokens / self._max_waiting_tokens
        token_load = stats.used_blocks / stats.total_blocks + tokens / (stats.total_blocks * self._block_size)
        return max(token_load, *stats.window_usage.values(), self._num_sequences / self._max_running)

    def mark_started(self, request_id: str) -> None:
        """Stop counting a request's tokens as waiting: it has an output."""
        self._waiting_tokens -= self._waiting.pop(request_id, 0)

    def release(self, request_id: str) -> None:
        """Stop counting a finished request; an unknown id is ignored."""
        self.mark_started(request_id)
        sequences = self._sequences.pop(request_id, None)
        if sequences is not None:
            self._num_sequences -= sequences
            self._ends.append(time.monotonic())

    def _retry_after(self, sequences: int) -> float:
        """Estimate the seconds until this number of sequences fits, from the rate at which requests finished lately."""
        if len(self._ends) < 2:
            return 1.0
        rate = len(self._ends) / max(time.monotonic() - self._ends[0], 1e-3)
        return min(_MAX_RETRY_SECONDS, max(1.0, sequences / rate))


class Encoding:
    """Sends inputs as outputs come, and ends when every input has its output."""

    def __init__(self, requests: Sequence[EncodeRequest], admission: Admission) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outputs: dict[str, EncodeOutput] = {}  # by request id
        self._number = len(requests)
        self._admission = admission
        self._held = deque(requests)
        self._sent: dict[str, int] = {}  # tokens of the inputs that are with the engine
        self._sent_tokens = 0
        self._began = time.monotonic()
        self._computed_tokens = 0

    def begin(self) -> list[EncodeRequest]:
        """Admit the inputs and return those to send at once; raises `QueueFullError`."""
        self._admission.hold([request.source.num_positions for request in self._held])
        return self._next()

    def add(self, output: EncodeOutput) -> list[EncodeRequest]:
        """Take the output of an input, and return the inputs to send now."""
        self.outputs[output.request_id] = output
        tokens = self._sent.pop(output.request_id, 0)
        self._sent_tokens -= tokens
        self._computed_tokens += tokens
        if len(self.outputs) == self._number and not self.done.done():
            self.done.set_result(None)
        return self._next()

    def has_sent(self, request_id: str) -> bool:
        """Return whether an input is with the engine."""
        return request_id in self._sent

    def close(self) -> None:
        """Hold nothing any more."""
        self._admission.let_go(sum(request.source.num_positions for request in self._held))
        self._held.clear()

    def _next(self) -> list[EncodeRequest]:
        found = []
        seconds = time.monotonic() - self._began
        rate = self._computed_tokens / seconds if self._computed_tokens and seconds else None
        while self._held:
            request, tokens = self._held[0], self._held[0].source.num_positions
            if request.request_id in self.outputs:  # cancelled, or too late
                self._admission.let_go(tokens)
            elif self._admission.has_share(len(self._sent), self._sent_tokens + tokens, rate):
                self._admission.take_held(request.request_id, tokens)
                self._sent[request.request_id] = tokens
                self._sent_tokens += tokens
                found.append(request)
            else:
                break
            self._held.popleft()
        return found
