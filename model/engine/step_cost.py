"""What the steps of an engine cost, learnt from the steps themselves. Arithmetic only; stdlib.

One late step (a container that was paused, a kernel that was compiled) must not be believed: a measurement counts as
`_OUTLIER` times what was expected at most, beyond `_BELIEVED` seconds. So a wrong one raises the estimate a little, and
a real change raises it again and again.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from math import inf

_WEIGHT = 0.2  # of the newest measurement in a running mean
_ASKED_WEIGHT = 0.5  # of one that a step was spent on
_OUTLIER = 4.0
_BELIEVED = 0.02  # seconds: steps are so late every day
_FOLLOWING = 0.05  # of a change at one size, at the others
_MEASURE_EVERY = 32  # steps with other work in them, then one without


class DecodeCost:
    """Seconds of a step that only decodes, as a running mean."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._mixed = 0  # steps in a row that did other work too

    @property
    def is_due(self) -> bool:
        """Whether a step should only decode, so that its cost is known: never measured, or not for long."""
        return self.seconds is None or self._mixed >= _MEASURE_EVERY

    def observe(self, seconds: float) -> None:
        """A step of `seconds` that only decoded."""
        if self.seconds is None:
            self.seconds = seconds
        else:
            weight = _ASKED_WEIGHT if self.is_due else _WEIGHT
            self.seconds += weight * (min(seconds, max(_OUTLIER * self.seconds, _BELIEVED)) - self.seconds)
        self._mixed = 0

    def observe_mixed(self) -> None:
        """A step that decoded and did other work."""
        self._mixed += 1


@dataclass(slots=True)
class _Size:
    """Steps of about one size, as running means."""

    tokens: float
    seconds: float


class WorkCost:
    """Seconds of work on some tokens.

    Means are kept for each power of two of tokens; between them cost is interpolated. What is known of other sizes
    follows a little when one turns out to cost more or less than it did.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}  # by the bits of the number of tokens
        self._curve: list[tuple[float, float]] = []  # (tokens, seconds), both rising; the first is the fixed part

    @property
    def is_known(self) -> bool:
        return bool(self._sizes)

    def seconds(self, tokens: int) -> float:
        """What so many tokens are expected to cost; 0 while nothing is known."""
        if not tokens or not self._curve:
            return 0.0
        at = min(max(bisect_right(self._curve, (tokens, inf)), 1), len(self._curve) - 1)
        (n0, s0), (n1, s1) = self._curve[at - 1], self._curve[at]
        return s0 + (tokens - n0) * (s1 - s0) / (n1 - n0)

    def worthwhile_tokens(self, least: int) -> int:
        """The smallest known size whose tokens cost at most twice what they do in the best one; at least `least`."""
        sizes = self._curve[1:]
        best = min((seconds / tokens for tokens, seconds in sizes), default=0.0)
        return max(least, next((int(n) for n, seconds in sizes if seconds <= 2 * best * n), least))

    def tokens_within(self, seconds: float, least: int, *, explore: bool = True) -> int:
        """How many tokens fit, `least` at the least and at most twice what was ever tried.

        While sizes differ by less than four, twice what was tried, whether it fits or not: the fixed part is not known
        yet. Without `explore` only what fits.
        """
        if not self._curve:
            return least
        largest = int(2 * self._curve[-1][0])
        if explore and (len(self._curve) == 2 or self._curve[-1][0] < 4 * self._curve[1][0]):
            return max(least, largest)
        at = min(max(bisect_right([s for _, s in self._curve], seconds), 1), len(self._curve) - 1)
        (n0, s0), (n1, s1) = self._curve[at - 1], self._curve[at]
        fitting = int(n0 + (seconds - s0) * (n1 - n0) / max(s1 - s0, 1e-9))
        return max(least, min(fitting, largest))

    def observe(self, tokens: int, seconds: float) -> None:
        """So many tokens took `seconds`."""
        if self._sizes:
            expected = max(self.seconds(tokens), 1e-6)
            seconds = min(seconds, max(_OUTLIER * expected, _BELIEVED))
            change = 1 + _FOLLOWING * (min(max(seconds / expected, 0.5), 2.0) - 1)
            for size in self._sizes.values():
                size.seconds *= change
        size = self._sizes.setdefault(tokens.bit_length(), _Size(tokens, seconds))
        size.tokens += _WEIGHT * (tokens - size.tokens)
        size.seconds += _WEIGHT * (seconds - size.seconds)
        self._draw()

    def _draw(self) -> None:
        """The curve through all sizes, made to rise: what costs more than a larger size was measured in bad times.

        The fixed part is where its first piece meets no tokens.
        """
        sizes = [(size.tokens, size.seconds) for _, size in sorted(self._sizes.items(), reverse=True)]
        seconds = accumulate((seconds for _, seconds in sizes), min)
        points = [(tokens, least) for (tokens, _), least in zip(sizes, seconds, strict=True)][::-1]
        fixed = 0.0
        if len(points) > 1:
            (n0, s0), (n1, s1) = points[0], points[1]
            fixed = max(0.0, s0 - n0 * (s1 - s0) / (n1 - n0))
        self._curve = [(0.0, fixed), *points]
