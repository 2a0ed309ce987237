"""How many prompt tokens a step may take while others wait for their next token. Arithmetic only; stdlib.

A stream's next token comes when the step ends, so a long prompt is cut to pieces that let a step last at most `STRETCH`
times what it lasts without any. Both costs are measured on the running engine: seconds of a step that only decodes, and
seconds that each prompt token adds. Without running decodes nothing is held back.
"""

from __future__ import annotations

STRETCH = 2.0
_WEIGHT = 0.2  # of the newest measurement
_LEAST_TOKENS = 16  # a prompt always gets on


class Pacing:
    """Costs of one engine's steps, as running means."""

    def __init__(self) -> None:
        self._decode_seconds: float | None = None
        self._seconds_per_prompt_token: float | None = None

    def prompt_limit(self) -> int | None:
        """Prompt tokens for a step with decodes in it; None while too little is known."""
        if self._decode_seconds is None or self._seconds_per_prompt_token is None:
            return None
        spare = (STRETCH - 1.0) * self._decode_seconds
        return max(_LEAST_TOKENS, int(spare / max(self._seconds_per_prompt_token, 1e-9)))

    def observe(self, seconds: float, num_decodes: int, num_prompt_tokens: int) -> None:
        """A step of `seconds` with so many sequences that decoded and so many other tokens."""
        if num_prompt_tokens == 0:
            self._decode_seconds = _mean(self._decode_seconds, seconds)
        elif num_prompt_tokens >= _LEAST_TOKENS:
            base = self._decode_seconds or 0.0 if num_decodes else 0.0
            self._seconds_per_prompt_token = _mean(
                self._seconds_per_prompt_token, max(seconds - base, 0.0) / num_prompt_tokens
            )


def _mean(before: float | None, value: float) -> float:
    return value if before is None else (1 - _WEIGHT) * before + _WEIGHT * value
