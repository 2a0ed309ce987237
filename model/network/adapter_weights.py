"""Loads the low-rank adapters of a checkpoint, which `torch.nn.utils.parametrize` has named beside the matrices."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint.tensor_files import StoredTensor, TensorReader, read_headers
from model.config.model import AdapterConfig, ModelConfig
from model.errors import CheckpointError
from model.families import family_for
from model.families.table.rules import LinearRule, Shape, TensorRule, ZeroRule
from model.network.adapters import Adapters, LowRank


def load_adapters(config: ModelConfig, files: Iterable[Path], device: torch.device) -> Adapters:
    """Read the adapters of a checkpoint whose matrices have been loaded.

    Raises `CheckpointError` unless every matrix has two for each adapter, of the shapes that it and `config` ask for.
    """
    adapters = config.adapters
    assert adapters is not None
    stored = read_headers(files)
    family = family_for(config)
    by_name = {family.canonical(name): tensor for name, tensor in stored.items()}
    matrices = {}
    with TensorReader(stored) as reader:
        for rule in family.rules(config):
            if isinstance(rule, ZeroRule) or (source := _adapted(rule)) is None:
                continue
            found = [by_name.pop(f"{source}.parametrizations.weight.0.lora_{part}", None) for part in "AB"]
            shapes = _shapes(by_name[f"{source}.weight"].shape, adapters, table=isinstance(rule, TensorRule))
            down, up = (_read(reader, *pair, source) for pair in zip(found, shapes, strict=True))
            if isinstance(rule, LinearRule):  # stored as what rows are multiplied by from the left
                down, up = down.transpose(1, 2), up.transpose(1, 2)
            joined = LowRank(down.transpose(0, 1).flatten(1).to(device), up.flatten(0, 1).to(device))
            matrices[rule.target.removesuffix(".weight")] = joined
    left = sorted(name for name in by_name if ".lora_" in name)
    if left:
        raise CheckpointError(f"adapters of what the network has not: {', '.join(left)}")
    return Adapters(adapters, matrices)


def _adapted(rule: TensorRule | LinearRule) -> str | None:
    """Return the stored name of a projection or a table of embeddings, without its tensor's; None for the rest."""
    if isinstance(rule, LinearRule):
        return rule.source
    return rule.source.removesuffix(".weight") if rule.source.startswith("embeddings.") else None


def _shapes(weight: Shape, config: AdapterConfig, *, table: bool) -> tuple[Shape, Shape]:
    """Return the shapes of `A` and `B` for a stored matrix; a table's are the other way round."""
    count, rank, (rows, columns) = len(config.names), config.rank, weight
    if table:
        return (count, rows, rank), (count, rank, columns)
    return (count, rank, columns), (count, rows, rank)


def _read(reader: TensorReader, tensor: StoredTensor | None, shape: Shape, source: str) -> Tensor:
    """Return a matrix of each adapter, `[adapters, rows, columns]`."""
    found = None if tensor is None else tensor.shape
    if tensor is None or found != shape or not tensor.holds(None):
        raise CheckpointError(f"{source}: expected matrices of adapters {list(shape)}, found {found and list(found)}")
    values = reader.region(tensor.name, shape[2], slice(0, shape[2]), 0, shape[0] * shape[1])
    return values.view(shape).float()
