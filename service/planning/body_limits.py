"""Checks of a parsed body against `Limits`; each error names the field and its limit."""

from __future__ import annotations

from typing import NamedTuple

from service.core.errors import too_large
from service.planning.admission import check_timeout
from service.schemas.encode_bodies import EncodeBody
from service.settings.service_settings import Limits


class EncodeBounds(NamedTuple):
    """How many inputs, and tokens of all of them, a request may have; `uncounted` of the inputs are free (a query)."""

    inputs: int
    tokens: int
    uncounted: int = 0

    def check_inputs(self, count: int) -> None:
        """Raise a 413 for more inputs of the model, with windows and labels."""
        if count > self.inputs + self.uncounted:
            message = f"input makes more than {self.inputs} inputs of the model, with labels and windows"
            raise too_large(message, "input", "too_many_inputs")

    def check_tokens(self, tokens: int) -> None:
        """Raise a 413 for more tokens."""
        if tokens > self.tokens:
            raise too_large(f"input has {tokens} tokens in all, more than {self.tokens}", "input", "too_many_tokens")


def encode_bounds(limits: Limits, *, detailed: bool, uncounted: int = 0) -> EncodeBounds:
    """Return the bounds of a request; `detailed` ones have results for each token, or images."""
    if detailed:
        return EncodeBounds(limits.max_detailed_inputs, limits.max_detailed_tokens, uncounted)
    return EncodeBounds(limits.max_encode_inputs, limits.max_encode_tokens, uncounted)


def check_encode(body: EncodeBody, limits: Limits, bounds: EncodeBounds) -> None:
    """Raise an `ApiError` for the first limit that `body` exceeds; the limit on tokens is checked after tokenising."""
    count = num_inputs(body.input) - bounds.uncounted
    if count > bounds.inputs:
        message = f"input has {count} entries, more than {bounds.inputs}"
        raise too_large(message, "input", "too_many_inputs")
    if body.chunks is not None and len(body.chunks) > limits.max_encode_inputs:
        message = f"chunks has {len(body.chunks)} entries, more than {limits.max_encode_inputs}"
        raise too_large(message, "chunks", "too_many_inputs")
    check_timeout(body.timeout_s, limits)


def num_inputs(value: object) -> int:
    """Return the number of prompts or inputs in a field; a string, or a list of ids, is one."""
    return len(value) if isinstance(value, list) and not isinstance(value[0], int) else 1
