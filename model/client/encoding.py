"""The inputs of one call of `encode`: a few of them are with the engine, the rest is held here.

The engine computes inputs in the order in which they come. As a call of any size sends few at a time, by the rate at
which its inputs are computed, others' inputs come in between, and it takes little of the queue's room.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from model.api.request import EncodeOutput, EncodeRequest
from model.client.model_table import Admission


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
