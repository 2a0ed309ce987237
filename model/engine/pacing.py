"""How many prompt tokens a step may take while others wait for their next token. Arithmetic only; stdlib.

A stream's next token comes when the step ends, so a long prompt is cut to pieces that let a step last at most `STRETCH`
times what it lasts without any; with a queue behind it some more, because a batch that is kept small for the sake of
its pace lets the queue grow. Both costs are measured on the running engine: seconds of a step that only decodes, and
seconds that each prompt token adds. When every step has had prompts for a while, one is left without, to measure what
decoding alone costs now.

Without running decodes prompts get all that they want, but for one bound: what they add to a step lasts
`LONGEST_SECONDS` at most. Who cancels, and whose deadline has passed, is looked at between steps, and an engine that is
silent for long is taken for one that hangs.
"""

from __future__ import annotations

STRETCH = 2.0
MOST_STRETCH = 8.0
LONGEST_SECONDS = 2.0
FIRST_TOKENS = 256  # for prompts while nothing is known
_WAITING_PER_STRETCH = 8  # so many waiting sequences are worth another decode's time
_WEIGHT = 0.2  # of the newest measurement
_RARE_WEIGHT = 0.5  # of one that had to be asked for
_MEASURE_EVERY = 32  # steps
_LEAST_TOKENS = 16  # a prompt always gets on


class Pacing:
    """Costs of one engine's steps, as running means."""

    def __init__(self) -> None:
        self._decode_seconds: float | None = None
        self._seconds_per_prompt_token: float | None = None
        self._unmeasured = 0  # steps in a row with prompts beside decodes

    def prompt_limit(self, num_waiting: int) -> int | None:
        """Prompt tokens for a step with decodes in it, when so many sequences wait; None while too little is known."""
        if self._unmeasured >= _MEASURE_EVERY:
            return 0
        if self._decode_seconds is None or self._seconds_per_prompt_token is None:
            return None
        stretch = min(STRETCH + num_waiting / _WAITING_PER_STRETCH, MOST_STRETCH)
        spare = (stretch - 1.0) * self._decode_seconds
        return max(_LEAST_TOKENS, int(spare / max(self._seconds_per_prompt_token, 1e-9)))

    @property
    def most_tokens(self) -> int | None:
        """Prompt tokens, sources' included, for a step, whatever else is in it; None while nothing is known."""
        if self._seconds_per_prompt_token is None:
            return None
        return max(_LEAST_TOKENS, int(LONGEST_SECONDS / max(self._seconds_per_prompt_token, 1e-9)))

    def observe(self, seconds: float, num_decodes: int, num_prompt_tokens: int) -> None:
        """A step of `seconds` with so many sequences that decoded and so many other tokens."""
        if num_prompt_tokens == 0:
            weight = _WEIGHT if self._unmeasured < _MEASURE_EVERY else _RARE_WEIGHT
            self._decode_seconds = _mean(self._decode_seconds, seconds, weight)
            self._unmeasured = 0
            return
        self._unmeasured += bool(num_decodes)
        if num_prompt_tokens >= _LEAST_TOKENS // 2:  # of the least limit a prompt with others behind it takes half
            base = self._decode_seconds or 0.0 if num_decodes else 0.0
            each = max(seconds - base, 0.0) / num_prompt_tokens
            self._seconds_per_prompt_token = _mean(self._seconds_per_prompt_token, each, _WEIGHT)


def _mean(before: float | None, value: float, weight: float) -> float:
    return value if before is None else (1 - weight) * before + weight * value
