"""Low-rank adapters: what each of several tasks adds to the matrices of one network (Hu et al. 2021: LoRA).

A row's adapter adds `scale * B A x` to a projection `W x`, and `scale * A[id] B` to an embedding. The matrices of all
adapters lie one behind the other, and a row's other adapters are masked, so rows of any adapters, and of none, are
computed together and do not depend on each other. They are kept, and multiplied, in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config.model import AdapterConfig


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

    def of_segments(self, chosen: Iterable[int | None], lengths: Iterable[int]) -> RowAdapters | None:
        """Return the rows' adapters, for segments of so many rows with one adapter each; None if there are none."""
        rows = [which for which, length in zip(chosen, lengths, strict=True) for _ in range(length)]
        if all(which is None for which in rows):
            return None
        device = next(iter(self.matrices.values())).up.device
        slots = torch.arange(len(self.config.names), device=device)
        at = torch.tensor([-1 if which is None else which for which in rows], device=device)
        mask = (at[:, None] == slots).repeat_interleave(self.config.rank, dim=1)
        return RowAdapters(self.matrices, mask * self.config.scale)


class RowAdapters:
    """The adapters of a step's rows."""

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
