"""Reads the settings of folders with a low-rank adapter (LoRA, Hu et al. 2021), as PEFT writes them. No torch.

An adapter adds `scale * B A x` to projections `W x` of a base model. What PEFT computes in another way is refused by
its name. Which modules are adapted follows from the stored tensors, because PEFT stores those and no others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.model.checkpoint.folder_kind import describe_folder, lfs_pointer
from triptych.model.checkpoint.json_files import ADAPTER, ADAPTER_WEIGHTS, Use, asked_for, read_json, table, unknown
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError, listed, shown
from triptych.model.system.folder_files import has_file

_MAX_RANK = 4096
_MAX_NUMBER = 1e9  # of ranks and factors
_KNOWN = table(
    served=(
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "peft_type"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    ),
    refused=(
        *("bias", "lora_bias", "use_dora", "use_qalora", "use_bdlora", "layer_replication", "alora_invocation_tokens"),
        *("trainable_token_indices", "target_parameters", "arrow_config", "kasa_config"),
        *("megatron_config", "monteclora_config"),
    ),
    unused=(
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("lora_dropout", "fan_in_fan_out", "init_lora_weights", "megatron_core", "qalora_group_size"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "runtime_config"),
        *("ensure_weight_tying", "lora_magnitude_vector"),
    ),
    neutral={"bias": ("none",)},
)
# Ways to begin that also change the base model's weights, which the folder does not have.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "kasa")


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What the settings of an adapter's folder say, and the file that has its matrices."""

    weights: Path
    base: str  # the name of the model that it was trained for; "" if the folder does not say
    targets: Targets
    scales: Scales
    saved: frozenset[str]  # names of modules that the folder has whole, in place of the base model's


def check_base(config: ModelConfig, *, split: bool) -> None:
    """Raise `ConfigError` for a model that serves no adapters; `split` over several ranks is one."""
    if split:
        raise ConfigError("a model that is split over ranks (tensor_parallel_size) serves no adapters")
    if config.adapters is not None:
        raise ConfigError("the base model has adapters of its own (task), and serves no others")


def is_adapter(path: Path) -> bool:
    """Return whether the path is a folder with an adapter's settings."""
    return path.is_dir() and has_file(path / ADAPTER)


def read_adapter_settings(path: Path, *, pickle: bool = True) -> AdapterSettings:
    """Read the settings of an adapter's folder; raises `ConfigError`, which says what is not served."""
    if not is_adapter(path):
        what = "a model" if path.is_dir() and has_file(path / "config.json") else _described(path)
        raise ConfigError(f"{path}: expected the folder of a LoRA adapter, with {ADAPTER}; found {what}")
    raw = read_json(path / ADAPTER, required=True)
    _check_settings(raw)
    base = raw.get("base_model_name_or_path")
    weights = _weights(path, pickle=pickle)
    return AdapterSettings(
        weights,
        base if isinstance(base, str) else "",
        Targets(raw),
        Scales(raw),
        _names(raw, "modules_to_save") or frozenset(),
    )


def _described(path: Path) -> str:
    """Say what a path is that has no adapter."""
    return describe_folder(path) if path.is_dir() else ("a file" if path.exists() else "no such folder")


def _weights(path: Path, *, pickle: bool) -> Path:
    for name in ADAPTER_WEIGHTS if pickle else ADAPTER_WEIGHTS[:1]:
        if has_file(path / name):
            if lfs_pointer(path / name):
                raise ConfigError(f"{name}: a Git LFS pointer, not the weights: run `git lfs pull`")
            return path / name
    if has_file(path / ADAPTER_WEIGHTS[1]):
        raise ConfigError(
            f"its weights are in {ADAPTER_WEIGHTS[1]}, which --no-pickle refuses; no {ADAPTER_WEIGHTS[0]}"
        )
    raise ConfigError(f"{ADAPTER_WEIGHTS[0]} is missing (or {ADAPTER_WEIGHTS[1]})")


def _check_settings(raw: Mapping[str, Any]) -> None:
    kind = raw.get("peft_type", "LORA")
    if kind != "LORA":
        raise ConfigError(f"{ADAPTER}: peft_type is {shown(kind)}; adapters of type LORA are served")
    if refused := list(asked_for(raw, _KNOWN, Use.REFUSED)):
        values = listed([f"{key}={shown(raw[key], 40)}" for key in refused], most=4, longest=100)
        raise ConfigError(
            f"{ADAPTER}: {values} changes what is computed, and is not served: merge the adapter (PEFT: "
            "merge_and_unload) and serve the model that comes of it"
        )
    others = [key for key in unknown(raw, _KNOWN) if raw[key]]
    if others:
        raise ConfigError(
            f"{ADAPTER}: {listed(others)} is not known, and may change what is computed; with null or "
            "false the adapter is served without it"
        )
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise ConfigError(
            f"{ADAPTER}: init_lora_weights is {shown(start)}, which changes the base model too: save the "
            "adapter as a plain one (PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )


class Targets:
    """Which modules the settings name. A regular expression of a file is not run: the stored tensors say the same."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._named = _names(raw, "target_modules")
        self._excluded = _names(raw, "exclude_modules")

    def have(self, module: str) -> bool:
        named = self._named is None or _ends_with(module, self._named)
        return named and not (self._excluded is not None and _ends_with(module, self._excluded))


def _names(raw: Mapping[str, Any], key: str) -> frozenset[str] | None:
    """Return a list of names; None where there is none, or a pattern."""
    value = raw.get(key)
    if not value or isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{ADAPTER}: {key} is {shown(value)}, expected a list of names or a text")
    return frozenset(value)


def _ends_with(module: str, names: frozenset[str]) -> bool:
    """Return whether a name is the module's, or its end from a dot on."""
    parts = module.split(".")
    return any(".".join(parts[at:]) in names for at in range(len(parts)))


class Scales:
    """Ranks and factors by module: the settings' own, or those of the first pattern that fits."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._rank = _number(raw, "r", 8)
        self._alpha = _number(raw, "lora_alpha", 8)
        self._by_root = bool(raw.get("use_rslora"))
        self._ranks, self._alphas = _patterns(raw, "rank_pattern"), _patterns(raw, "alpha_pattern")

    def rank(self, module: str) -> int:
        rank = _of(self._ranks, module, self._rank)
        if rank != int(rank) or not 1 <= rank <= _MAX_RANK:
            raise ConfigError(
                f"{ADAPTER}: the rank of {module} is {rank:g}, expected a whole number of 1 to {_MAX_RANK}"
            )
        return int(rank)

    def scale(self, module: str, rank: int) -> float:
        return _of(self._alphas, module, self._alpha) / (math.sqrt(rank) if self._by_root else rank)


def _number(values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_NUMBER:
        raise ConfigError(f"{ADAPTER}: {key} is {shown(value)}, expected a number up to {_MAX_NUMBER:g}")
    return value


_LITERAL = re.compile(r"\^?[\w.-]+")
_SIMPLE = re.compile(
    r"\^?(?:[\w.|-]|\\[.dw]|\[[\w-]+\]|\((?:\?:)?[\w.|-]+\))+(?:[*+](?:[\w.|-]|\\[.dw]|\[[\w-]+\])*){0,3}"
)
_MAX_PATTERNS = 500


def _patterns(raw: Mapping[str, Any], key: str) -> list[tuple[re.Pattern[str], float]]:
    """Return names or patterns of ends of modules' names, and their numbers, in the file's order."""
    found = raw.get(key) or {}
    if not isinstance(found, dict) or len(found) > _MAX_PATTERNS:
        raise ConfigError(f"{ADAPTER}: {key} is {shown(found)}, expected up to {_MAX_PATTERNS} names with numbers")
    patterns = []
    for name in found:
        if _LITERAL.fullmatch(name) is None and (len(name) > 200 or _SIMPLE.fullmatch(name) is None):
            raise ConfigError(
                f"{ADAPTER}: {key} has the pattern {shown(name)}; names and simple patterns are read: "
                "letters, dots, [0-9], (a|b), and up to three * or +"
            )
        patterns.append((re.compile(name), _number(found, name, 0)))
    return patterns


def _of(patterns: list[tuple[re.Pattern[str], float]], module: str, otherwise: float) -> float:
    if not patterns:
        return otherwise
    starts = [0, *(at + 1 for at, letter in enumerate(module) if letter == ".")]
    for pattern, value in patterns:
        if any(pattern.fullmatch(module, start) for start in starts):
            return value
    return otherwise
