"""Bounds of the sampling parameters, the same as those of `/generate`, for requests without HTTP. Stdlib only."""

from __future__ import annotations

from typing import Any

from model.api.engine_config import MAX_SPECULATIVE_TOKENS
from model.api.request import SamplingParams
from model.errors import ConfigError

GREEDY_BELOW = 1e-4  # lower temperatures mean greedy: dividing logits by them overflows float32

MAX_LENGTH = 2**31 - 1  # tokens, and the largest number of any parameter
_MAX_INT = MAX_LENGTH
_PROBABILITIES = ("top_p", "typical_p")  # above 0, at most 1
_BOUNDS: dict[str, tuple[float, float]] = {
    "max_tokens": (1, _MAX_INT),
    "min_tokens": (0, _MAX_INT),
    "temperature": (0, 100),
    "top_k": (0, _MAX_INT),
    "min_p": (0, 1),
    "epsilon_cutoff": (0, 1),
    "eta_cutoff": (0, 1),
    "seed": (0, 2**63 - 1),
    "n": (1, _MAX_INT),
    "num_beams": (1, _MAX_INT),
    "length_penalty": (-10, 10),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "no_repeat_ngram_size": (0, _MAX_INT),
    "encoder_no_repeat_ngram_size": (0, _MAX_INT),
    "encoder_repetition_penalty": (0.01, 100),
    "logprobs": (0, _MAX_INT),
    "prompt_logprobs": (0, _MAX_INT),
    "num_speculative_tokens": (0, MAX_SPECULATIVE_TOKENS),
}
_MAX_BIAS = 100


def check_value(name: str, value: Any) -> None:
    """Raise `ConfigError` for a number (or NaN) outside the bounds of the `SamplingParams` field `name`."""
    if name in _PROBABILITIES and not 0 < value <= 1:
        raise ConfigError(f"{name} must be above 0 and at most 1, found {value}")
    if name == "exponential_decay_length_penalty" and value is not None:
        start, factor = value
        if not 0 <= start <= _MAX_INT or not 0 <= factor <= 1000:
            raise ConfigError(f"{name} must be a number of tokens from 0 and a factor from 0 to 1000, found {value}")
    if name in _BOUNDS and value is not None:
        low, high = _BOUNDS[name]
        if not low <= value <= high:
            raise ConfigError(f"{name} must be {low} to {high}, found {value}")


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise `ConfigError` for the first parameter that is invalid for a vocabulary of `vocab_size` tokens."""
    for name in (*_BOUNDS, *_PROBABILITIES, "exponential_decay_length_penalty"):
        check_value(name, getattr(params, name))
    if params.min_tokens > params.max_tokens:
        raise ConfigError(f"min_tokens ({params.min_tokens}) must be at most max_tokens ({params.max_tokens})")
    _check_beams(params)
    if "" in params.stop:
        raise ConfigError("stop must be no empty text")
    if not all(abs(bias) <= _MAX_BIAS for bias in params.logit_bias.values()):
        raise ConfigError(f"logit_bias must be -{_MAX_BIAS} to {_MAX_BIAS}")
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "suppress_tokens", "begin_suppress_tokens"):
        if not all(0 <= token < vocab_size for token in getattr(params, name)):
            raise ConfigError(f"{name} must be of token ids below {vocab_size}")
    if params.grammar and params.allowed_token_ids:
        raise ConfigError("allowed_token_ids has no meaning with a grammar, which says what is generated")
    suppressed = set(params.suppress_tokens)
    if len(suppressed) >= vocab_size or (params.allowed_token_ids and suppressed.issuperset(params.allowed_token_ids)):
        raise ConfigError("suppress_tokens leaves no token that may be generated")


def _check_beams(params: SamplingParams) -> None:
    """Raise `ConfigError` for what a beam search cannot give."""
    if params.num_beams == 1:
        return
    if params.n > params.num_beams:
        raise ConfigError(f"n ({params.n}) must be at most num_beams ({params.num_beams})")
    for name, given in (
        ("num_speculative_tokens", params.num_speculative_tokens),
        ("logprobs", params.logprobs is not None),
        ("prompt_logprobs", params.prompt_logprobs is not None),
    ):
        if given:
            raise ConfigError(f"{name} has no meaning with beam search")
