"""Reads the settings of generation: generation_config.json's, or config.json's in folders from before that file.

`SETTINGS` says what is done with every key of the reference's `GenerationConfig`. A value that cannot be raises
`ConfigError`, which names the file and the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triptych.model.api.parameters import MAX_INT
from triptych.model.api.sampling_bounds import check_value
from triptych.model.api.sampling_params import SAMPLING
from triptych.model.checkpoint.json_files import Use, asked_for, read_json, table, unknown
from triptych.model.errors import ConfigError, listed
from triptych.model.families.table.token_rules import generation_rules, only_token
from triptych.model.system.folder_files import has_file

GENERATION = "generation_config.json"
_CONFIG = "config.json"
_IDENTITIES = ("bos_token_id", "eos_token_id", "decoder_start_token_id")
_RULES = (
    *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
    *("bad_words_ids", "sequence_bias"),
)
_OF_FOLDERS = {name: column for name, column in SAMPLING.items() if column.row.folder}
_SAMPLING = tuple(name for name, column in _OF_FOLDERS.items() if column.row.draws)  # with do_sample
_DEFAULT_TOP_K = 50  # of the reference, where a folder samples and sets none; 0 is off
_OTHERS = tuple(name for name in _OF_FOLDERS if name not in _SAMPLING)
_LENGTHS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens")
_SAMPLED_ONLY = ("top_h",)
SETTINGS = table(
    served=(*_IDENTITIES, *_RULES, *_SAMPLING, *_OTHERS, *_LENGTHS, "do_sample"),
    warned=(
        *_SAMPLED_ONLY,
        *("constraints", "diversity_penalty", "dola_layers", "force_words_ids", "guidance_scale", "max_time"),
        *("num_beam_groups", "penalty_alpha", "stop_strings", "token_healing", "watermarking_config"),
    ),
    unused=(
        # How it is computed, not what.
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory"),
        *("compile_config", "disable_compile", "continuous_batching_config", "remove_invalid_values"),
        # Drafts, whose results are those without.
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "use_mtp"),
        # Forms of the result, which a request chooses.
        *("num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        *("return_dict_in_generate", "transformers_version"),
        "pad_token_id",  # of batches; that of config.json may be part of the network's positions
    ),
    neutral={"guidance_scale": (1,), "num_beam_groups": (1,)},
)
SPEECH_SETTINGS = table(  # that only Whisper's generation_config.json has
    served=(
        *("alignment_heads", "is_multilingual", "lang_to_id", "task_to_id", "no_timestamps_token_id"),
        *("prev_sot_token_id", "max_initial_timestamp_index", "return_timestamps", "language", "task"),
        "forced_decoder_ids",
    ),
    warned=("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold", "condition_on_prev_tokens"),
    # Arguments of a call, which the reference only keeps there.
    unused=("force_unique_generate_call", "return_token_timestamps", "num_frames", "prompt_condition_type"),
    neutral={
        "compression_ratio_threshold": (2.4,),
        "logprob_threshold": (-1,),
        "no_speech_threshold": (0.6,),
        "condition_on_prev_tokens": (True,),
    },
)
_WHOLE = {*_LENGTHS, *(name for name, column in _OF_FOLDERS.items() if column.type is int)}


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """Holds what config.json's `task_specific_params` say of one task, such as a translation of T5's."""

    prefix: str = ""  # put in front of every prompt
    sampling_defaults: dict[str, Any] = field(default_factory=dict)  # instead of the checkpoint's


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """Holds a folder's settings of generation as they stand in `file`; null ones are left out."""

    values: dict[str, Any]
    file: str = GENERATION

    def token_rules(self) -> dict[str, Any]:
        """Return what the network's configuration holds: token ids that begin, end or never occur in an output.

        Raises `ConfigError` for what is no token id.
        """
        found = {name: self.values[name] for name in (*_IDENTITIES, *_RULES) if name in self.values}
        try:
            generation_rules(found)
            one = ("bos_token_id", "decoder_start_token_id")
            return found | {name: only_token(found, name) for name in one if name in found}
        except ConfigError as error:
            raise ConfigError(f"{self.file}: {error}") from None


def read_generation(path: Path, config: Mapping[str, Any]) -> GenerationSettings:
    """Return the settings of the folder `path`, of generation_config.json alone where it is there.

    `config` is config.json. Its ids of begin and end hold where the newer file has none.
    """
    file = path / GENERATION
    if has_file(file):
        return settings_of(read_json(file), config)
    values = {name: value for name, value in config.items() if name in SETTINGS and value is not None}
    for part in ("decoder", "generator", "text_config"):  # which hold what the whole does not say
        if isinstance(nested := config.get(part), Mapping):
            values = {name: value for name, value in nested.items() if name in SETTINGS and value is not None} | values
            break
    if config.get("force_bos_token_to_be_generated"):  # the oldest name
        values["forced_bos_token_id"] = config.get("bos_token_id")
    return GenerationSettings(values, _CONFIG)


def settings_of(generation: Mapping[str, Any], config: Mapping[str, Any]) -> GenerationSettings:
    """Return the settings of a generation_config.json, completed by config.json's token ids."""
    values = {name: value for name, value in generation.items() if value is not None}
    identities = {name: config[name] for name in _IDENTITIES if config.get(name) is not None}
    return GenerationSettings(identities | values)


def without_generation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without the token rules of generation, which the settings of the folder replace."""
    return {name: value for name, value in config.items() if name not in _RULES}


def sampling_defaults(settings: GenerationSettings, where: str | None = None) -> dict[str, Any]:
    """Return defaults for fields of `SamplingParams` that a request omits: greedy unless `do_sample` is true.

    `max_length` and `min_length` stay as they are: they count tokens before the output, which a request knows.
    """
    given, where = settings.values, where or settings.file
    sampling = given.get("do_sample") is True
    names = (*_OTHERS, "max_length", *(_SAMPLING if sampling else ()))
    defaults = {name: _value(given, name, where) for name in names if given.get(name) is not None}
    for name in set(_SAMPLING).intersection(given) - set(names):
        _value(given, name, where)
    if sampling:
        defaults.setdefault("temperature", 1.0)
        if not defaults.setdefault("top_k", _DEFAULT_TOP_K):
            del defaults["top_k"]
    if given.get("max_new_tokens") is not None:
        defaults["max_tokens"] = _value(given, "max_new_tokens", where)
    if given.get("min_new_tokens") is not None:
        defaults["min_tokens"] = _value(given, "min_new_tokens", where)
    elif given.get("min_length"):
        defaults["min_length"] = _value(given, "min_length", where)
    return {name: value for name, value in defaults.items() if value is not None}


def _value(given: Mapping[str, Any], name: str, where: str) -> Any:
    """Return a setting's value for its field of `SamplingParams`; None for one without effect."""
    value = given[name]
    if name == "early_stopping":
        if value not in (True, False, "never"):
            raise ConfigError(f'{where}: early_stopping must be true, false or "never", found {value!r}'[:300])
        return value if value == "never" else bool(value)
    if name == "renormalize_logits":
        return True if value is True else None
    if name == "exponential_decay_length_penalty":
        return _decay(value, where)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}: {name} must be a number, found {value!r}"[:300])
    if name in _WHOLE:
        if value != value or value in (float("inf"), float("-inf")) or value != int(value):
            raise ConfigError(f"{where}: {name} must be a whole number, found {value!r}")
        value = int(value)
    if name in ("top_p", "typical_p") and value >= 1:
        return None
    if name in ("epsilon_cutoff", "eta_cutoff") and not 0 < value < 1:
        return None
    if name == "top_p" and value == 0:
        return 1e-9  # the likeliest token alone, as there
    if name in ("max_length", "max_new_tokens"):
        value = min(value, MAX_INT)
    bounded = {"max_length": "max_tokens", "max_new_tokens": "max_tokens"}
    bounded |= {"min_length": "min_tokens", "min_new_tokens": "min_tokens"}
    try:
        check_value(bounded.get(name, name), value)
    except ConfigError as error:
        reason = str(error).removeprefix(bounded.get(name, name))
        raise ConfigError(f"{where}: {name}{reason}") from None
    return value


def _decay(value: Any, where: str) -> tuple[int, float]:
    """Return `exponential_decay_length_penalty`: after how many tokens it begins, and its factor."""
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(one) in (int, float) for one in value):
        raise ConfigError(
            f"{where}: exponential_decay_length_penalty must be a number of tokens and a factor, found {value!r}"[:300]
        )
    try:
        check_value("exponential_decay_length_penalty", value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return int(value[0]), float(value[1])


def generation_tasks(config: Mapping[str, Any], settings: GenerationSettings) -> dict[str, GenerationTask]:
    """Return the tasks of config.json by name, each with its settings over the folder's.

    A task's prefix overrides the one that config.json has for all tasks, as in the pipelines of `transformers` 4.
    """
    tasks = {}
    for name, own in _task_settings(config).items():
        where = f"{_CONFIG}: task_specific_params.{name}"
        prefix = own.get("prefix", config.get("prefix"))
        if prefix is not None and not isinstance(prefix, str):
            raise ConfigError(f"{where}: prefix must be a text, found {prefix!r}")
        together = GenerationSettings({**settings.values, **own})
        tasks[name] = GenerationTask(prefix or "", sampling_defaults(together, where))
    return tasks


def generation_warnings(config: Mapping[str, Any], settings: GenerationSettings, *, speech: bool) -> list[str]:
    """Return sentences that name what would change outputs and is ignored, and what the reference does not know.

    A task's settings are named after it. `config` is config.json; `speech`: the model writes down speech.
    """
    names = _ignored(settings.values)
    for task, own in _task_settings(config).items():
        names += [f"{task}.{name}" for name in _ignored_of_task(own, settings)]
    others = unknown(settings.values, SETTINGS if not speech else {**SETTINGS, **SPEECH_SETTINGS})
    found = [f"settings of generation that are not served: {listed(names)}"] if names else []
    return found + ([f"{settings.file}: unknown settings are ignored: {listed(others)}"] if others else [])


def _ignored_of_task(own: Mapping[str, Any], settings: GenerationSettings) -> list[str]:
    """Return which settings of a task differ from the folder's and are ignored, in order."""
    changed = {name: value for name, value in own.items() if value != settings.values.get(name)}
    ignored = _ignored(changed | {name: own[name] for name in ("do_sample", "num_beams") if name in own})
    ignored += [name for name in (*_IDENTITIES, *_RULES) if changed.get(name)]  # they hold for all requests
    ignored += [name for name in unknown(changed, SETTINGS) if name != "prefix"]
    return sorted(set(ignored))


def _ignored(values: Mapping[str, Any]) -> list[str]:
    """Return which settings are asked for and not served, in order."""
    sampling = values.get("do_sample") is True
    tables = {**SETTINGS, **SPEECH_SETTINGS}
    found = [name for name in asked_for(values, tables, Use.WARNED) if sampling or name not in _SAMPLED_ONLY]
    if sampling and (values.get("num_beams") or 1) != 1:
        found.append("do_sample with num_beams")  # beams are searched and not drawn
    return sorted(found)


def _task_settings(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tasks = config.get("task_specific_params") or {}
    if not isinstance(tasks, dict) or not all(isinstance(settings, dict) for settings in tasks.values()):
        raise ConfigError("config.json: task_specific_params must map names of tasks to their settings")
    return tasks
