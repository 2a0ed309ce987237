"""Reads the headers of an adapter's matrices, and says which module of the base model each pair belongs to."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych.model.checkpoint.adapter_folder import AdapterSettings, read_adapter_settings
from triptych.model.checkpoint.json_files import ADAPTER
from triptych.model.checkpoint.tensor_files import StoredTensor, read_headers
from triptych.model.errors import CheckpointError, listed

_PREFIX = "base_model.model."
_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_OF_TASKS = frozenset({"classifier", "score"})  # PEFT lists both for a classifier, whichever the model has
_MAX_TENSORS = 100_000
_OTHER_MATRICES = {
    "lora_embedding_A": "it adapts a table of embeddings",
    "lora_embedding_B": "it adapts a table of embeddings",
    "lora_magnitude_vector": "it is a DoRA adapter",
    "lora_B.bias": "it has lora_bias",
    "base_layer": "it adapts the output, a table of embeddings or parameters of experts",
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
    saved: Mapping[str, StoredTensor]  # tensors of modules that replace the base model's, by names in transformers

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


def read_adapter(path: Path, *, pickle: bool = True) -> AdapterFolder:
    """Describe an adapter's folder; raises `ConfigError`, which says what is not served or does not fit."""
    settings = read_adapter_settings(path, pickle=pickle)
    stored = read_headers([settings.weights])
    if len(stored) > _MAX_TENSORS:
        raise CheckpointError(f"an adapter of {len(stored)} tensors, of at most {_MAX_TENSORS}")
    saved = {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items() if _is_saved(name, settings)}
    absent = [one for one in settings.saved - _OF_TASKS if not any(one in name.split(".") for name in saved)]
    if absent:
        raise CheckpointError(
            f"{ADAPTER}: modules_to_save names {listed(absent)}, and the file of weights has none of it"
        )
    if odd := [name for name, tensor in saved.items() if not tensor.holds(None)]:
        raise CheckpointError(f"{listed(odd, most=2)}: expected floating-point numbers, found {saved[odd[0]].kind}")
    return AdapterFolder(path, settings.base, _modules(settings, stored), saved)


def _is_saved(name: str, settings: AdapterSettings) -> bool:
    """Return whether a tensor is one of a module that modules_to_save lists: PEFT saves names that end so."""
    parts = name.removeprefix(_PREFIX).split(".")[:-1]
    listed = any(part.endswith(one) for part in parts for one in settings.saved)
    return name.startswith(_PREFIX) and listed and "lora_" not in name


def _modules(settings: AdapterSettings, stored: Mapping[str, StoredTensor]) -> dict[str, AdaptedModule]:
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        if _is_saved(name, settings):
            continue
        match = _MATRIX.fullmatch(name.removeprefix(_PREFIX))
        if not name.startswith(_PREFIX) or match is None:
            raise CheckpointError(f"{listed([name], longest=120)}: {_why_not(name)}")
        found.setdefault(match["module"], {})[match["side"]] = tensor
    if not found:
        raise CheckpointError("the file of weights has no matrices")
    alone = [module for module, sides in found.items() if len(sides) != 2]
    if alone:
        raise CheckpointError(f"one of the matrices lora_A and lora_B is missing: {listed(alone, most=2)}")
    return {module: _module(module, sides["A"], sides["B"], settings) for module, sides in found.items()}


def _why_not(name: str) -> str:
    why = next((why for part, why in _OTHER_MATRICES.items() if part in name), "")
    if why:
        return f"{why}, which is not served"
    return f"expected names as {_PREFIX}MODULE.lora_A.weight; other tensors are served if modules_to_save names them"


def _module(name: str, down: StoredTensor, up: StoredTensor, settings: AdapterSettings) -> AdaptedModule:
    shapes = f"A {list(down.shape)} and B {list(up.shape)}"
    if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1] or not all((*down.shape, *up.shape)):
        raise CheckpointError(f"{name}: found {shapes}, expected [rank, inputs] and [outputs, rank]")
    if not (down.holds(None) and up.holds(None)):
        raise CheckpointError(f"{name}: expected floating-point numbers, found {down.kind} and {up.kind}")
    if not settings.targets.have(name):
        raise CheckpointError(f"{name}: it has matrices, and {ADAPTER} does not name it in target_modules")
    rank = settings.scales.rank(name)
    if down.shape[0] != rank:
        raise CheckpointError(f"{name}: found {shapes}, and {ADAPTER} says rank {rank}")
    return AdaptedModule(down, up, settings.scales.scale(name, rank))
