"""What the steps of an engine cost, learnt from the steps themselves. Arithmetic only; stdlib.

One late step (a container that was paused, a kernel that was compiled) must not be believed: a measurement counts as
`_OUTLIER` times what was expected at most. So a wrong one raises the estimate a little, and a real change raises it
again and again.
"""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.2  # of the newest measurement in a running mean
_ASKED_WEIGHT = 0.5  # of one that a step was spent on
_OUTLIER = 4.0
_FADING = 0.98  # of what is known of other sizes, with each measurement
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
            self.seconds += weight * (min(seconds, _OUTLIER * self.seconds) - self.seconds)
        self._mixed = 0

    def observe_mixed(self) -> None:
        """A step that decoded and did other work."""
        self._mixed += 1


@dataclass(slots=True)
class _Size:
    """Steps of about one size: running means of tokens and seconds, and how fresh they are (1: the latest)."""

    tokens: float
    seconds: float
    weight: float = 1.0


class WorkCost:
    """Seconds of work on some tokens, as `fixed + per_token * tokens`.

    Means are kept for each power of two of tokens; the line is their least-squares fit by relative error, neither part
    of it negative. Until sizes differ by four, `fixed` cannot be told from `per_token` and is taken for 0.
    """

    def __init__(self) -> None:
        self.fixed = 0.0
        self.per_token = 0.0
        self._sizes: dict[int, _Size] = {}

    @property
    def is_known(self) -> bool:
        return bool(self._sizes)

    @property
    def _is_line(self) -> bool:
        tokens = [size.tokens for size in self._sizes.values()]
        return max(tokens) >= 4 * min(tokens)

    def seconds(self, tokens: int) -> float:
        """What so many tokens are expected to cost; 0 while nothing is known."""
        return self.fixed + self.per_token * tokens if tokens and self._sizes else 0.0

    def worthwhile_tokens(self, least: int) -> int:
        """The smallest piece whose tokens cost as much as starting it does, and `least` at the least."""
        return max(least, int(self.fixed / self.per_token)) if self.per_token else least

    def tokens_within(self, seconds: float, least: int) -> int:
        """How many tokens fit, `least` at the least; while there is no line, twice what was tried so as to find it."""
        if not self._sizes:
            return least
        fitting = int((seconds - self.fixed) / max(self.per_token, 1e-9))
        if not self._is_line:
            fitting = max(fitting, int(2 * max(size.tokens for size in self._sizes.values())))
        return max(least, fitting)

    def observe(self, tokens: int, seconds: float) -> None:
        """So many tokens took `seconds`."""
        if self._sizes:
            seconds = min(seconds, _OUTLIER * self.seconds(tokens))
        for size in self._sizes.values():
            size.weight *= _FADING
        at = tokens.bit_length()
        if at in self._sizes:
            size = self._sizes[at]
            size.tokens += _WEIGHT * (tokens - size.tokens)
            size.seconds += _WEIGHT * (seconds - size.seconds)
            size.weight = 1.0
        else:
            self._sizes[at] = _Size(tokens, seconds)
        self._fit()

    def _fit(self) -> None:
        """Minimise the sum of weight * ((fixed + per_token * tokens - seconds) / seconds) ** 2."""
        rows = [
            (size.weight / max(size.seconds, 1e-9) ** 2, size.tokens, size.seconds) for size in self._sizes.values()
        ]
        total = sum(w for w, _, _ in rows)
        x, y = (sum(row[0] * row[at] for row in rows) / total for at in (1, 2))
        spread = sum(w * (n - x) ** 2 for w, n, _ in rows)
        slope = sum(w * (n - x) * (s - y) for w, n, s in rows) / spread if spread and self._is_line else 0.0
        through_zero = sum(w * n * s for w, n, s in rows) / sum(w * n * n for w, n, _ in rows)
        self.fixed, self.per_token = (y - slope * x, slope) if 0 < slope <= y / x else (0.0, through_zero)
