"""Bounds of a prompt's length: in tokens by the model's context, in text before it is tokenised."""

from __future__ import annotations

from typing import NamedTuple

from triptych.service.core.errors import ApiError, invalid


class ContextBound(NamedTuple):
    """A context of `tokens`, the most characters of text for one token, and the most bytes of any text."""

    tokens: int
    characters_per_token: int
    text_bytes: int

    @property
    def characters(self) -> int:
        return self.tokens * self.characters_per_token

    def check(self, text: str, param: str) -> None:
        """Refuse a text that certainly has too many tokens, or that is too long for any context."""
        if len(text) > self.characters:
            raise context_exceeded(self.tokens, f"{param} has {len(text)} characters", param)
        self.check_bytes(text, param)

    def check_rendered(self, text: str, param: str) -> None:
        """Refuse a text of a conversation that is longer than what its template may render."""
        if len(text) > self.characters:
            raise self.too_long(param)
        self.check_bytes(text, param)

    def too_long(self, param: str) -> ApiError:
        """Return the error for a conversation whose text is longer than `characters`."""
        return context_exceeded(self.tokens, f"{param} give a text of more than {self.characters} characters", param)

    def check_bytes(self, text: str, param: str) -> None:
        """Refuse a text that is too long for any context: its tokens would block the event loop."""
        most_of_each = 1 if text.isascii() else 4  # bytes of a character
        if len(text) * most_of_each <= self.text_bytes:
            return
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > self.text_bytes:
            message = f"{param} has {size} bytes, more than {self.text_bytes} (max_text_bytes)"
            raise invalid(message, param, "text_too_long")


def context_exceeded(tokens: int, found: str, param: str) -> ApiError:
    """Return the error for a prompt beyond the context; clients search for the words before the number."""
    message = f"this model's maximum context length is {tokens} tokens, but {found}"
    return invalid(message, param, "context_length_exceeded")
