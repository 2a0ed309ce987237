"""A tally of generated tokens, which are counted one by one and added to Prometheus' metrics from time to time."""

from __future__ import annotations

import bisect
from typing import Any

_MOST_KEPT = 128  # tokens, which are lost with a process that is killed


class TokenTally:
    """Counts the tokens of one model and their inter-token latencies; `flush` adds them to the metrics.

    A counter and a histogram of prometheus_client cost 3 us a token, and more where processes share them by files. So
    tokens are added together: at each `flush`, and as soon as there are `_MOST_KEPT`.
    """

    def __init__(self, tokens: Any, gaps: Any) -> None:
        """`tokens` is a counter, `gaps` a histogram of seconds, both with their labels."""
        self._counter, self._histogram = tokens, gaps
        self._bounds: list[float] = list(gaps._upper_bounds)  # the last is infinite
        self._tokens = 0
        self._seconds = 0.0
        self._buckets = [0] * len(self._bounds)

    def __call__(self, tokens: int, seconds_each: float | None) -> None:
        """Count `tokens`; `seconds_each` is their mean inter-token latency, None for the first of a sequence."""
        self._tokens += tokens
        if seconds_each is not None:
            self._buckets[bisect.bisect_left(self._bounds, seconds_each)] += tokens
            self._seconds += tokens * seconds_each
        if self._tokens >= _MOST_KEPT:
            self.flush()

    def flush(self) -> None:
        """Add what was counted since the last call to the metrics."""
        if not self._tokens:
            return
        self._counter.inc(self._tokens)
        for place, count in enumerate(self._buckets):
            if count:
                self._histogram._buckets[place].inc(count)  # as `observe` does, which counts one value a call
                self._buckets[place] = 0
        self._histogram._sum.inc(self._seconds)
        self._tokens, self._seconds = 0, 0.0
