"""The bound on what may wait for one model: requests and tokens, counted where requests come in. Stdlib only.

Counting is exact and synchronous: a request is refused before anything is computed, never dropped afterwards. It counts
as waiting until its first output; what runs beyond `max_num_seqs` sequences waits by definition.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from model.api.engine_config import BatchLimits, EngineConfig
from model.api.stats import Demand, EngineStats
from model.errors import QueueFullError

_RECENT = 64  # ends from which the drain rate is taken
_MAX_RETRY = 60.0


class Admission:
    """Who is in, of one model."""

    def __init__(self, config: EngineConfig) -> None:
        """For a model on a CPU, until `settle` is told what it was given on its device."""
        self._block_size = config.block_size
        self.settle(config.limits())
        self._sequences: dict[str, int] = {}  # of every request that has not ended
        self._waiting_tokens: dict[str, int] = {}  # of those without an output
        self._ends: deque[float] = deque(maxlen=_RECENT)

    def settle(self, limits: BatchLimits) -> None:
        """Hold to these limits from now on: the engine knows its device only when it is loaded."""
        self._max_running = limits.max_num_seqs
        self._max_sequences = limits.max_num_seqs + limits.max_queued_requests
        self._max_waiting_tokens = max(1, limits.max_queued_tokens)

    def admit(self, tokens: Mapping[str, int], *, sequences: Mapping[str, int] | None = None) -> None:
        """Count the requests (id -> prompt tokens) in, all or none; raises `QueueFullError`.

        A queue that is empty takes as many sequences as there are, so that none is refused forever.
        """
        counts = sequences or dict.fromkeys(tokens, 1)
        self.check_room(sum(counts.values()))
        self._sequences.update(counts)
        self._waiting_tokens.update(tokens)

    def check_room(self, sequences: int = 1) -> None:
        """Raise `QueueFullError` where `admit` would refuse so many sequences.

        Tokens are bounded by those that wait already, so that this is known before a text is tokenised, and long
        prompts find room as often as short ones: the last that is taken may reach beyond the bound.
        """
        if sum(self._sequences.values()) + sequences > self._max_sequences and self._sequences:
            raise QueueFullError("queue_requests", self._retry_after(sequences))
        if self.waiting_tokens >= self._max_waiting_tokens:
            raise QueueFullError("queue_tokens", self._retry_after(1))

    @property
    def waiting_tokens(self) -> int:
        """Of prompts and inputs without an output yet."""
        return sum(self._waiting_tokens.values())

    def demand(self, stats: EngineStats) -> Demand:
        return Demand(self.saturation(stats), self.waiting_tokens)

    def saturation(self, stats: EngineStats) -> float:
        """What is in over what can run at once, in sequences or in tokens, whichever is more; above 1 some wait.

        Tokens are those in KV blocks and those that wait; without a KV cache, those that wait over their bound.
        """
        tokens = self.waiting_tokens
        if not stats.total_blocks:
            return tokens / self._max_waiting_tokens
        share = stats.used_blocks / stats.total_blocks + tokens / (stats.total_blocks * self._block_size)
        return max(share, sum(self._sequences.values()) / self._max_running)

    def started(self, request_id: str) -> None:
        self._waiting_tokens.pop(request_id, None)

    def release(self, request_id: str) -> None:
        """A request has ended; harmless for one that is not in."""
        self._waiting_tokens.pop(request_id, None)
        if self._sequences.pop(request_id, None) is not None:
            self._ends.append(time.monotonic())

    def _retry_after(self, wanted: int) -> float:
        """Seconds until `wanted` places are likely free, by the rate at which requests have ended lately."""
        if len(self._ends) < 2:
            return 1.0
        span = max(time.monotonic() - self._ends[0], 1e-3)
        return min(_MAX_RETRY, max(1.0, wanted * span / len(self._ends)))
