"""Sampling defaults of generation_config.json and of config.json's tasks, and their settings that are not served."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
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
_WITHOUT_EFFECT = ("use_cache", "num_return_sequences", "output_scores", "return_dict_in_generate")
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


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """Holds what config.json's `task_specific_params` say of one task, such as a translation of T5's."""

    prefix: str = ""  # put in front of every prompt
    sampling_defaults: dict[str, Any] = field(default_factory=dict)  # instead of the checkpoint's


def token_id_settings(generation: dict[str, Any]) -> dict[str, Any]:
    """Return the token id settings, which override config.json's as in `transformers`."""
    names = (
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "bad_words_ids"),
        *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
    )
    return {name: generation[name] for name in names if generation.get(name) is not None}


def generation_settings(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return generation_config.json's settings over those that older folders keep in config.json."""
    names = (*GENERATION_SETTINGS, *_NOT_SERVED, *_NOT_SERVED_UNLESS_ONE)
    return {name: config[name] for name in names if name in config} | dict(generation)


def sampling_defaults(
    generation: Mapping[str, Any], encoder_decoder: bool, where: str = "generation_config.json"
) -> dict[str, Any]:
    """Return defaults for fields of `SamplingParams` that a request omits: greedy unless `do_sample` is set."""
    for name in set(GENERATION_SETTINGS) - {"do_sample", "early_stopping"}:
        value = generation.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{where}: {name} must be a number, found {value!r}")
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


def generation_tasks(
    config: Mapping[str, Any], generation: Mapping[str, Any], encoder_decoder: bool
) -> dict[str, GenerationTask]:
    """Return the tasks of config.json by name, each with its settings over `generation`.

    A task's prefix overrides the one that config.json has for all tasks, as in the pipelines of `transformers` 4.
    """
    tasks = {}
    for name, settings in _task_settings(config).items():
        where = f"config.json: task_specific_params.{name}"
        prefix = settings.get("prefix", config.get("prefix"))
        if prefix is not None and not isinstance(prefix, str):
            raise ConfigError(f"{where}: prefix must be a text, found {prefix!r}")
        defaults = sampling_defaults({**generation, **settings}, encoder_decoder, where)
        tasks[name] = GenerationTask(prefix or "", defaults)
    return tasks


def not_served(config: Mapping[str, Any], generation: Mapping[str, Any], encoder_decoder: bool) -> tuple[str, ...]:
    """Return the names of settings that would change outputs and are ignored, a task's behind its name."""
    names = _ignored(generation, _NOT_SERVED, encoder_decoder)
    for task, settings in _task_settings(config).items():
        known = (*GENERATION_SETTINGS, *_WITHOUT_EFFECT, "prefix")
        others = {name for name in settings if name not in known and settings[name] != generation.get(name)}
        names += [f"{task}.{name}" for name in _ignored(settings, others, encoder_decoder)]
    return tuple(names)


def _ignored(settings: Mapping[str, Any], names: Collection[str], encoder_decoder: bool) -> list[str]:
    """Return in order which of `names`, and of those that are off at 1, are set."""
    found = {name for name in set(names) - set(_NOT_SERVED_UNLESS_ONE) if settings.get(name)}
    found |= {name for name in _NOT_SERVED_UNLESS_ONE if settings.get(name) not in (None, 1)}
    if settings.get("min_length") and not encoder_decoder and not settings.get("min_new_tokens"):
        found.add("min_length")  # there it counts the prompt
    return sorted(found)


def _task_settings(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tasks = config.get("task_specific_params") or {}
    if not isinstance(tasks, dict) or not all(isinstance(settings, dict) for settings in tasks.values()):
        raise ConfigError("config.json: task_specific_params must map names of tasks to their settings")
    return tasks
