"""Checks of sampling parameters by their table, for requests without HTTP and for folders. Stdlib only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triptych.model.api.parameters import Beams
from triptych.model.api.sampling_params import SAMPLING, SamplingParams
from triptych.model.errors import ConfigError

GREEDY_BELOW = 1e-4  # lower temperatures mean greedy: dividing logits by them overflows float32

_MOST_DECAY = 1000  # the factor of exponential_decay_length_penalty


def check_value(name: str, value: Any) -> None:
    """Raise `ConfigError` for a number (or NaN) outside the bounds of the `SamplingParams` field `name`."""
    row = SAMPLING[name].row
    if name == "exponential_decay_length_penalty" and value is not None:
        start, factor = value
        if not SAMPLING["min_tokens"].row.holds(start) or not 0 <= factor <= _MOST_DECAY:
            raise ConfigError(f"{name} must be a number of tokens from 0 and a factor from 0 to 1000, found {value}")
    elif isinstance(value, dict):
        if not all(row.holds(one) for one in value.values()):
            raise ConfigError(f"{name} must be {row.bounds}")
    elif isinstance(value, int | float) and not row.holds(value):
        raise ConfigError(f"{name} must be {row.bounds}, found {value}")


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise `ConfigError` for the first parameter that is invalid for a vocabulary of `vocab_size` tokens."""
    for name, column in SAMPLING.items():
        value = getattr(params, name)
        check_value(name, value)
        if column.is_tokens:
            _check_tokens(name, value, vocab_size)
    _check_tokens("begin_suppress_tokens", params.begin_suppress_tokens, vocab_size)
    if params.min_tokens > params.max_tokens:
        raise ConfigError(f"min_tokens ({params.min_tokens}) must be at most max_tokens ({params.max_tokens})")
    if params.num_beams > 1:
        _check_beams(params)
    if "" in params.stop:
        raise ConfigError("stop must be no empty text")
    if params.grammar and params.allowed_token_ids:
        raise ConfigError("allowed_token_ids has no meaning with a grammar, which says what is generated")
    if lacks_tokens(params.suppress_tokens, params.allowed_token_ids, vocab_size):
        raise ConfigError("suppress_tokens leaves no token that may be generated")


def lacks_tokens(suppressed: Sequence[int], allowed: Sequence[int] | None, vocab_size: int) -> bool:
    """Return whether no token may be generated."""
    return len(set(suppressed)) >= vocab_size or bool(allowed and set(suppressed).issuperset(allowed))


def _check_tokens(name: str, tokens: Any, vocab_size: int) -> None:
    if not all(0 <= token < vocab_size for token in tokens):
        raise ConfigError(f"{name} must be of token ids below {vocab_size}")


def _check_beams(params: SamplingParams) -> None:
    """Raise `ConfigError` for what a beam search cannot give."""
    if params.n > params.num_beams:
        raise ConfigError(f"n ({params.n}) must be at most num_beams ({params.num_beams})")
    for name, column in SAMPLING.items():
        value = getattr(params, name)
        is_off = value is None or (name == "num_speculative_tokens" and value == 0)
        if column.row.beams is Beams.NEVER and not is_off:
            raise ConfigError(f"{name} has no meaning with beam search")
