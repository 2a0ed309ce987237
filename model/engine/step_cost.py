"""Estimates of the cost of an engine's steps, learnt from the steps themselves. Arithmetic only; stdlib.

A single slow step (a paused container, a kernel that was compiled) must not distort the estimate: a measurement above
`_MIN_OUTLIER` seconds is clipped to `_OUTLIER` times the estimate. So an outlier raises the estimate a little, and a
lasting change raises it step by step.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from math import inf

_WEIGHT = 0.2  # of the newest measurement in an exponential moving average
_REQUESTED_WEIGHT = 0.5  # of a measurement for which a step was left without other work
_OUTLIER = 4.0
_MIN_OUTLIER = 0.02  # seconds; smaller delays are common
_COUPLING = 0.05  # the part of a change at one size that is applied to the others
_MEASURE_EVERY = 32  # mixed steps, then a step that only decodes


class DecodeCost:
    """The seconds of a step that only decodes, as a moving average."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._num_mixed = 0  # consecutive steps with other work too

    @property
    def is_due(self) -> bool:
        """Whether a step should only decode to measure its cost: never measured, or not lately."""
        return self.seconds is None or self._num_mixed >= _MEASURE_EVERY

    def observe(self, seconds: float) -> None:
        """Record a step that only decoded."""
        if self.seconds is None:
            self.seconds = seconds
        else:
            weight = _REQUESTED_WEIGHT if self.is_due else _WEIGHT
            self.seconds += weight * (min(seconds, max(_OUTLIER * self.seconds, _MIN_OUTLIER)) - self.seconds)
        self._num_mixed = 0

    def observe_mixed(self) -> None:
        """Record a step that decoded and did other work."""
        self._num_mixed += 1


@dataclass(slots=True)
class _Bucket:
    """Moving averages of steps of about one size."""

    tokens: float
    seconds: float


class WorkCost:
    """The seconds of work as a function of its tokens.

    There is a moving average for each power of two of tokens; costs in between are interpolated. A change at one size
    is applied to the others by a small part (`_COUPLING`).
    """

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}  # by the bit length of the number of tokens
        self._curve: list[tuple[float, float]] = []  # (tokens, seconds), both rising; the first is the fixed cost

    @property
    def is_known(self) -> bool:
        return bool(self._buckets)

    def seconds(self, tokens: int) -> float:
        """Return the expected cost of tokens; 0 before any measurement."""
        if not tokens or not self._curve:
            return 0.0
        at = min(max(bisect_right(self._curve, (tokens, inf)), 1), len(self._curve) - 1)
        (n0, s0), (n1, s1) = self._curve[at - 1], self._curve[at]
        return s0 + (tokens - n0) * (s1 - s0) / (n1 - n0)

    def worthwhile_tokens(self, min_tokens: int) -> int:
        """Return the smallest measured size with at most twice the best cost per token, but at least `min_tokens`."""
        points = self._curve[1:]
        best = min((seconds / tokens for tokens, seconds in points), default=0.0)
        return max(min_tokens, next((int(n) for n, seconds in points if seconds <= 2 * best * n), min_tokens))

    def tokens_within(self, seconds: float, min_tokens: int, *, explore: bool = True) -> int:
        """Return how many tokens fit into `seconds`: at least `min_tokens`, at most twice the largest measured size.

        With `explore`, while the measured sizes are within a factor of four, twice the largest is returned whether it
        fits or not: the fixed cost is not known yet.
        """
        if not self._curve:
            return min_tokens
        largest = int(2 * self._curve[-1][0])
        if explore and (len(self._curve) == 2 or self._curve[-1][0] < 4 * self._curve[1][0]):
            return max(min_tokens, largest)
        at = min(max(bisect_right([s for _, s in self._curve], seconds), 1), len(self._curve) - 1)
        (n0, s0), (n1, s1) = self._curve[at - 1], self._curve[at]
        fitting = int(n0 + (seconds - s0) * (n1 - n0) / max(s1 - s0, 1e-9))
        return max(min_tokens, min(fitting, largest))

    def observe(self, tokens: int, seconds: float) -> None:
        """Record that work on `tokens` took `seconds`."""
        if self._buckets:
            expected = max(self.seconds(tokens), 1e-6)
            seconds = min(seconds, max(_OUTLIER * expected, _MIN_OUTLIER))
            change = 1 + _COUPLING * (min(max(seconds / expected, 0.5), 2.0) - 1)
            for bucket in self._buckets.values():
                bucket.seconds *= change
        bucket = self._buckets.setdefault(tokens.bit_length(), _Bucket(tokens, seconds))
        bucket.tokens += _WEIGHT * (tokens - bucket.tokens)
        bucket.seconds += _WEIGHT * (seconds - bucket.seconds)
        self._update_curve()

    def _update_curve(self) -> None:
        """Compute the curve through all buckets, made monotonic: a size that costs more than a larger one is stale.

        The fixed cost is the intercept of the first segment.
        """
        buckets = [(bucket.tokens, bucket.seconds) for _, bucket in sorted(self._buckets.items(), reverse=True)]
        seconds = accumulate((seconds for _, seconds in buckets), min)
        points = [(tokens, minimum) for (tokens, _), minimum in zip(buckets, seconds, strict=True)][::-1]
        fixed = 0.0
        if len(points) > 1:
            (n0, s0), (n1, s1) = points[0], points[1]
            fixed = max(0.0, s0 - n0 * (s1 - s0) / (n1 - n0))
        self._curve = [(0.0, fixed), *points]
