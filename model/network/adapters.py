"""Low-rank adapters: what each of several tasks adds to the matrices of one network (Hu et al. 2021: LoRA)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from triptych.model.checkpoint.tensor_files import StoredTensor, TensorReader, read_headers
from triptych.model.config.model import AdapterConfig, ModelConfig
from triptych.model.errors import CheckpointError
from triptych.model.families import family_for
from triptych.model.families.table.rules import LinearRule, Shape, TensorRule, ZeroRule

# -- Low-rank adapters: what each of several tasks adds to the matrices of one network (Hu et al. 2021: LoRA). A row's
# adapter adds `scale * B A x` to a projection `W x`, and `scale * A[id] B` to an embedding. The matrices of all
# adapters are concatenated, and a row's other adapters are masked, so rows of any adapters, and of none, are
# computed together and do not depend on each other. They are kept, and multiplied, in float32.


class RowAdapters(Protocol):
    """The adapters of a step's rows."""

    def added(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Return a projection's outputs `y` `[T, outputs]` of rows `x` `[T, inputs]` with what the adapters add."""

    def embedded(self, name: str, ids: Tensor, vectors: Tensor) -> Tensor:
        """Return a table's rows `vectors` `[T, E]` at `ids` `[T]` with what the adapters add."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The matrices of all adapters of one projection or table: `[inputs, adapters * rank]`, `[that, outputs]`."""

    down: Tensor
    up: Tensor


class Adapters:
    """The adapters of one model, by the names of what they adapt in the network."""

    def __init__(self, config: AdapterConfig, matrices: Mapping[str, LowRank]) -> None:
        self.config = config
        self.matrices = matrices

    def of_segments(self, chosen: Iterable[int | None], lengths: Iterable[int]) -> MaskedAdapters | None:
        """Return the rows' adapters, for segments of these `lengths` with one adapter each; None if there are none."""
        rows = [which for which, length in zip(chosen, lengths, strict=True) for _ in range(length)]
        if all(which is None for which in rows):
            return None
        device = next(iter(self.matrices.values())).up.device
        slots = torch.arange(len(self.config.names), device=device)
        at = torch.tensor([-1 if which is None else which for which in rows], device=device)
        mask = (at[:, None] == slots).repeat_interleave(self.config.rank, dim=1)
        return MaskedAdapters(self.matrices, mask * self.config.scale)


class MaskedAdapters:
    """The adapters of a step's rows, all of the checkpoint's own at once."""

    def __init__(self, matrices: Mapping[str, LowRank], mask: Tensor) -> None:
        """`mask` `[T, adapters * rank]` is the scale at a row's own adapter, and 0 at the others."""
        self._matrices = matrices
        self._mask = mask

    def added(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Return a projection's outputs `y` `[T, outputs]` of rows `x` `[T, inputs]` with what the adapters add."""
        found = self._matrices[name]
        return y + (((x.float() @ found.down) * self._mask) @ found.up).to(y.dtype)

    def embedded(self, name: str, ids: Tensor, vectors: Tensor) -> Tensor:
        """Return a table's rows `vectors` `[T, E]` at `ids` `[T]` with what the adapters add."""
        found = self._matrices[name]
        return vectors + ((found.down[ids] * self._mask) @ found.up).to(vectors.dtype)


# -- Loads the low-rank adapters of a checkpoint, named by `torch.nn.utils.parametrize`.


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
        raise CheckpointError(f"adapters for tensors that are not in the network: {', '.join(left)}")
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
