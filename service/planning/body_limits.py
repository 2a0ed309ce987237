"""Checks of a parsed body against `Limits`; each error names the field and its limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from model.api.request import Request
from service.core.errors import invalid, too_large
from service.schemas.bodies import GenerateBody
from service.schemas.encode_bodies import EncodeBody
from service.settings.service_settings import Limits


def check_generate(body: GenerateBody, limits: Limits) -> None:
    """Raise an `ApiError` for the first limit that `body` exceeds."""
    _at_most("n", body.n, limits.max_n)
    _at_most("num_beams", body.num_beams, limits.max_beams)
    _at_most("logprobs", body.logprobs, limits.max_logprobs)
    _at_most("prompt_logprobs", body.prompt_logprobs, limits.max_logprobs)
    _no_longer("stop_token_ids", len(body.stop_token_ids), limits.max_stop_token_ids)
    _no_longer("logit_bias", len(body.logit_bias), limits.max_logit_bias)
    _no_longer("allowed_token_ids", len(body.allowed_token_ids or ()), limits.max_logit_bias)
    _no_longer("suppress_tokens", len(body.suppress_tokens), limits.max_logit_bias)
    _no_longer("prompt", num_inputs(body.prompt), limits.max_prompts)
    _check_stop(body, limits)
    check_request(body.timeout_s, body.priority, limits)


def check_request(timeout_s: float | None, priority: int, limits: Limits) -> None:
    """Refuse a request that wants more time, or to come before more others, than it may."""
    check_timeout(timeout_s, limits)
    if priority < limits.min_priority:  # worded to be true for a dialect with negated priorities too
        message = f"priority asks to be served before others, more than min_priority ({limits.min_priority}) allows"
        raise invalid(message, "priority")


def check_logprobs(body: GenerateBody, requests: Sequence[Request], limits: Limits) -> None:
    """Refuse a request for more log-probabilities than one reply may have.

    An unstreamed reply has those of all its tokens. A stream sends those of each output token by itself, but those of
    its prompts together.
    """
    counts: dict[str, tuple[int, str]] = {}  # by field: their number, and its calculation in words
    if body.logprobs is not None and not body.stream:
        tokens, each = sum(one.params.max_tokens for one in requests), body.logprobs + 1
        counts["logprobs"] = body.n * tokens * each, f"{body.n} n x {tokens} max_tokens x {each}"
    if body.prompt_logprobs is not None:
        tokens, each = sum(one.num_sent_tokens for one in requests), body.prompt_logprobs + 1
        counts["prompt_logprobs"] = body.n * tokens * each, f"{body.n} n x {tokens} prompt tokens x {each}"
    total = sum(count for count, _ in counts.values())
    if total <= limits.max_reply_logprobs:
        return
    param = max(counts, key=lambda name: counts[name][0])
    made = " + ".join(words for _, words in counts.values())
    message = f"{param} asks for {made} = {total} log-probabilities, more than max_reply_logprobs"
    advice = "" if body.stream or param != "logprobs" else "; a stream may have them"
    raise invalid(f"{message} ({limits.max_reply_logprobs}){advice}", param)


def most_tokens_with_logprobs(body: GenerateBody, prompts: int, limits: Limits) -> int | None:
    """Return how many tokens an output may have if one reply must hold all log-probabilities; None: as many as it will.

    It bounds what a client left open; what a client asks for is refused where it is too much.
    """
    if body.logprobs is None or body.stream:
        return None
    return max(1, limits.max_reply_logprobs // (body.n * prompts * (body.logprobs + 1)))


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


def check_timeout(timeout_s: float | None, limits: Limits) -> None:
    """Raise an `ApiError` for a timeout above the limit."""
    if timeout_s is not None and timeout_s > limits.request_timeout_s:
        raise invalid(f"timeout_s must be at most {limits.request_timeout_s:g}", "timeout_s")


def num_inputs(value: object) -> int:
    """Return the number of prompts or inputs in a field; a string, or a list of ids, is one."""
    return len(value) if isinstance(value, list) and not isinstance(value[0], int) else 1


def stop_texts(body: GenerateBody) -> list[str]:
    """Return the stop strings of a body as a list."""
    if body.stop is None:
        return []
    return [body.stop] if isinstance(body.stop, str) else body.stop


def _check_stop(body: GenerateBody, limits: Limits) -> None:
    stop = stop_texts(body)
    _no_longer("stop", len(stop), limits.max_stop_strings)
    for index, text in enumerate(stop):
        if len(text) > limits.max_stop_characters:
            param = "stop" if isinstance(body.stop, str) else f"stop[{index}]"
            raise invalid(f"{param} must have at most {limits.max_stop_characters} characters", param)


def _at_most(name: str, value: int | None, bound: int) -> None:
    if value is not None and value > bound:
        raise invalid(f"{name} must be at most {bound}", name)


def _no_longer(name: str, size: int, bound: int) -> None:
    if size > bound:
        raise invalid(f"{name} has {size} entries, more than {bound}", name)
