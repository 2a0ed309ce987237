"""Sampling defaults of generation_config.json, and its settings that are not served."""

from __future__ import annotations

from typing import Any

from model.errors import ConfigError

_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "typical_p")  # used with do_sample
GENERATION_SETTINGS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "do_sample", "repetition_penalty", "no_repeat_ngram_size"),
    *("max_length", "min_length", "max_new_tokens", "min_new_tokens"),
    *("num_beams", "length_penalty", "early_stopping"),
)
_ALWAYS_DEFAULTS = (
    *("repetition_penalty", "no_repeat_ngram_size", "max_length"),
    *("num_beams", "length_penalty", "early_stopping"),
)
# Settings that would change outputs and are not served; without effect at 1, or at 0, null or empty.
_NOT_SERVED_UNLESS_ONE = ("encoder_repetition_penalty", "guidance_scale", "num_beam_groups")
_NOT_SERVED = (
    "constraints",
    "diversity_penalty",
    "dola_layers",
    "encoder_no_repeat_ngram_size",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "penalty_alpha",
    "sequence_bias",
    "stop_strings",
    "top_h",
    "watermarking_config",
)


def token_id_settings(generation: dict[str, Any]) -> dict[str, Any]:
    """Return the token id settings, which override config.json's as in `transformers`."""
    names = (
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "bad_words_ids"),
        *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
    )
    return {name: generation[name] for name in names if generation.get(name) is not None}


def sampling_defaults(generation: dict[str, Any], encoder_decoder: bool) -> dict[str, Any]:
    """Return defaults for fields of `SamplingParams` that a request omits: greedy unless `do_sample` is set."""
    for name in set(GENERATION_SETTINGS) - {"do_sample", "early_stopping"}:
        value = generation.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"generation_config.json: {name} must be a number, found {value!r}")
    sampling = _SAMPLING_DEFAULTS if generation.get("do_sample", False) else ()
    names = (*_ALWAYS_DEFAULTS, *sampling)
    defaults = {name: generation[name] for name in names if generation.get(name) is not None}
    if sampling:
        defaults.setdefault("temperature", 1.0)
    if generation.get("max_new_tokens"):
        defaults["max_tokens"] = generation["max_new_tokens"]
    if generation.get("min_new_tokens"):
        defaults["min_tokens"] = generation["min_new_tokens"]
    elif generation.get("min_length") and encoder_decoder:
        defaults["min_tokens"] = generation["min_length"] - 1  # min_length includes the start token
    return defaults


def not_served(generation: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of settings that would change outputs and are ignored."""
    names = {name for name in _NOT_SERVED if generation.get(name)}
    names |= {name for name in _NOT_SERVED_UNLESS_ONE if generation.get(name) not in (None, 1)}
    return tuple(sorted(names))
