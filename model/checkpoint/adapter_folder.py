"""Reads folders with a low-rank adapter (LoRA, Hu et al. 2021) as PEFT writes them: settings and headers, no weights.

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
from triptych.model.checkpoint.tensor_files import StoredTensor, read_headers
from triptych.model.errors import CheckpointError, ConfigError, listed, shown
from triptych.model.system.folder_files import has_file

_PREFIX = "base_model.model."
_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_MAX_RANK = 4096
_MAX_TENSORS = 100_000
_KNOWN = table(
    served=(
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "peft_type"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    ),
    refused=(
        *("bias", "lora_bias", "use_dora", "use_qalora", "use_bdlora", "layer_replication", "alora_invocation_tokens"),
        *("trainable_token_indices", "target_parameters", "modules_to_save", "arrow_config", "kasa_config"),
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
_OTHER_MATRICES = {
    "lora_embedding_A": "it adapts a table of embeddings",
    "lora_embedding_B": "it adapts a table of embeddings",
    "lora_magnitude_vector": "it is a DoRA adapter",
    "lora_B.bias": "it has lora_bias",
    "base_layer": "it adapts parameters of experts (target_parameters)",
    "token_adapter": "it has trainable tokens",
}


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """The stored matrices of one module of the base model, and what their product is multiplied by."""

    down: StoredTensor  # A: [rank, inputs]
    up: StoredTensor  # B: [outputs, rank]
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """What a folder's settings and headers say of an adapter."""

    path: Path
    base: str  # the name of the model that it was trained for; "" if the folder does not say
    modules: Mapping[str, AdaptedModule]  # by the module's name in transformers

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(module.down.path for module in self.modules.values()))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The different ranks, ascending."""
        return tuple(sorted({module.rank for module in self.modules.values()}))

    @property
    def size(self) -> int:
        """Numbers in all matrices."""
        return sum(math.prod(one.down.shape) + math.prod(one.up.shape) for one in self.modules.values())


def is_adapter(path: Path) -> bool:
    """Return whether the path is a folder with an adapter's settings."""
    return path.is_dir() and has_file(path / ADAPTER)


def read_adapter(path: Path, *, pickle: bool = True) -> AdapterFolder:
    """Describe an adapter's folder; raises `ConfigError`, which says what is not served or does not fit."""
    if not is_adapter(path):
        what = "a model" if path.is_dir() and has_file(path / "config.json") else describe_folder_of(path)
        raise ConfigError(f"{path}: expected the folder of a LoRA adapter, with {ADAPTER}; found {what}")
    raw = read_json(path / ADAPTER, required=True)
    _check_settings(raw)
    stored = read_headers([_weights(path, pickle=pickle)])
    if len(stored) > _MAX_TENSORS:
        raise CheckpointError(f"an adapter of {len(stored)} tensors, of at most {_MAX_TENSORS}")
    base = raw.get("base_model_name_or_path")
    return AdapterFolder(path, base if isinstance(base, str) else "", _modules(raw, stored))


def describe_folder_of(path: Path) -> str:
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


def _modules(raw: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> dict[str, AdaptedModule]:
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        match = _MATRIX.fullmatch(name.removeprefix(_PREFIX))
        if not name.startswith(_PREFIX) or match is None:
            raise CheckpointError(f"{listed([name], longest=120)}: {_why_not(name)}")
        found.setdefault(match["module"], {})[match["side"]] = tensor
    if not found:
        raise CheckpointError("the file of weights has no matrices")
    alone = [module for module, sides in found.items() if len(sides) != 2]
    if alone:
        raise CheckpointError(f"one of the matrices lora_A and lora_B is missing: {listed(alone, most=2)}")
    targets = _Targets(raw)
    scales = _Scales(raw)
    return {module: _module(module, sides["A"], sides["B"], scales, targets) for module, sides in found.items()}


def _why_not(name: str) -> str:
    why = next((why for part, why in _OTHER_MATRICES.items() if part in name), "")
    if why:
        return f"{why}, which is not served"
    return f"expected names as {_PREFIX}MODULE.lora_A.weight; other tensors (modules_to_save) are not served"


def _module(name: str, down: StoredTensor, up: StoredTensor, scales: _Scales, targets: _Targets) -> AdaptedModule:
    shapes = f"A {list(down.shape)} and B {list(up.shape)}"
    if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1] or not all((*down.shape, *up.shape)):
        raise CheckpointError(f"{name}: found {shapes}, expected [rank, inputs] and [outputs, rank]")
    if not (down.holds(None) and up.holds(None)):
        raise CheckpointError(f"{name}: expected floating-point numbers, found {down.kind} and {up.kind}")
    if not targets.have(name):
        raise CheckpointError(f"{name}: it has matrices, and {ADAPTER} does not name it in target_modules")
    rank = scales.rank(name)
    if down.shape[0] != rank:
        raise CheckpointError(f"{name}: found {shapes}, and {ADAPTER} says rank {rank}")
    return AdaptedModule(down, up, scales.scale(name, rank))


class _Targets:
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


class _Scales:
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{ADAPTER}: {key} is {shown(value)}, expected a number")
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
