"""Checks of sampling parameters by their table, for requests without HTTP and for folders. Stdlib only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


BEAM_FIELDS = ("num_beams", *(name for name, column in SAMPLING.items() if column.row.beams is Beams.ONLY))
_LENGTHS = ("max_tokens", "max_length", "min_length")  # how they count is for `start` to say


def over_defaults(defaults: Mapping[str, Any], given: Mapping[str, Any], start: int) -> dict[str, Any]:
    """Return fields of `SamplingParams`: the given ones, else the folder's.

    `start` tokens come before the output; the folder's `min_length` counts them. Beams are searched where the request
    or the folder says so, and not where the request gives a temperature.
    """
    chosen = {name: value for name, value in defaults.items() if name not in (*_LENGTHS, *BEAM_FIELDS)}
    if "min_length" in defaults:
        chosen["min_tokens"] = max(0, defaults["min_length"] - start)
    chosen |= given
    if chosen.get("temperature", 0.0) < GREEDY_BELOW:
        chosen["temperature"] = 0.0
    beams = beams_of(defaults, given.get("num_beams"), given.get("temperature"))
    if beams > 1:
        chosen = {name: defaults[name] for name in BEAM_FIELDS if name in defaults} | chosen | {"num_beams": beams}
    return chosen


def beams_of(defaults: Mapping[str, Any], num_beams: int | None, temperature: float | None) -> int:
    """Return the number of beams for a request with these fields."""
    if num_beams is not None:
        return num_beams
    return 1 if temperature else int(defaults.get("num_beams", 1))


def length_of(defaults: Mapping[str, Any], start: int, *, whole: bool) -> int | None:
    """Return how many tokens the folder lets follow `start` tokens; None where it does not say.

    `whole`: its `max_length` counts, not only its `max_new_tokens`.
    """
    if "max_tokens" in defaults:
        return int(defaults["max_tokens"])
    return int(defaults["max_length"]) - start if whole and "max_length" in defaults else None
