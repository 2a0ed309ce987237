"""How long a prompt may be: the model's context, and the text that can fit it before it is tokenised."""

from __future__ import annotations

from typing import NamedTuple

from service.core.errors import ApiError, invalid


class ContextBound(NamedTuple):
    """A context of `tokens`, and the most characters that a token of text stands for."""

    tokens: int
    characters_per_token: int

    @property
    def characters(self) -> int:
        return self.tokens * self.characters_per_token

    def check(self, text: str, param: str) -> None:
        """Refuse a text that is certain to have too many tokens."""
        if len(text) > self.characters:
            raise context_exceeded(self.tokens, f"{param} has {len(text)} characters", param)


def context_exceeded(tokens: int, found: str, param: str) -> ApiError:
    """Return the error for a prompt beyond the context; clients look for the words before the number."""
    message = f"this model's maximum context length is {tokens} tokens, but {found}"
    return invalid(message, param, "context_length_exceeded")
