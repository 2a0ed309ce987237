"""Low-rank adapters that requests name (Hu et al. 2021: LoRA): what they add to projections of a loaded network.

An adapter adds `scale * B A x` to `W x`. Of projections that are fused in the network (q, k and v; gate and up) the
matrices A are one, and each of the checkpoint's projections has a part with its B. Rows of several adapters, and of
none, are computed in one step: `AdapterRuns` says which rows have which. Where C computes a stack it computes these
products too (`native_adapters`); elsewhere `added` does. A row's result does not depend on the other rows where the
base model's does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor
from torch.nn import functional

# Projections of a layer that may have adapters, in the order of `low_rank.h`; those of a source are never in C.
ADAPTED = ("attn.qkv", "attn.out", "cross.q", "cross.out", "mlp.up", "mlp.down")
OF_SOURCES = "cross.kv"
_numbers = itertools.count(1)


class Product(Protocol):
    """The product with a matrix `[n, k]` of an adapter."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[T, n]` for rows `[T, k]`."""


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """The product by torch."""

    matrix: Tensor

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(self.matrix.dtype), self.matrix)


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """The part of an adapter that adds to the outputs `[first, first + outputs)` of a projection."""

    first: int
    outputs: int
    first_rank: int
    rank: int
    scale: float
    up: Product  # [T, rank] to [T, outputs]


@dataclass(frozen=True, slots=True)
class LowRankProjection:
    """The addition of an adapter to a projection; its parts read ranks of one product with the rows."""

    ranks: int
    down: Product  # [T, inputs] to [T, ranks]
    parts: tuple[LowRankPart, ...]

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + sum(part.up.nbytes for part in self.parts)


@dataclass(eq=False, slots=True)
class LoraAdapter:
    """The matrices of one adapter in memory."""

    name: str
    projections: Mapping[str, LowRankProjection]  # by their names in the network
    number: int = field(default_factory=lambda: next(_numbers))  # no other adapter of the process has it
    tables: dict[int, object] = field(default_factory=dict)  # the same as C reads it, by stack
    classifier: Callable[[Tensor], Tensor] | None = None  # in place of the base model's; None: that one
    classifier_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.classifier_bytes + sum(one.nbytes for one in self.projections.values())

    @property
    def changes_heads(self) -> bool:
        """Whether vectors and scores that are made of hidden states are other ones too."""
        return self.classifier is not None or "pooler" in self.projections

    def added(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Add to outputs `y` `[T, outputs]` of rows `x` `[T, inputs]` what it adds, in place."""
        if (found := self.projections.get(name)) is None:
            return y
        ranks = found.down(x)  # [T, ranks]
        for part in found.parts:
            more = part.up(ranks[:, part.first_rank : part.first_rank + part.rank]) * part.scale
            y[:, part.first : part.first + part.outputs] += more.to(y.dtype)
        return y


class AdapterRuns:
    """Which of a step's rows have which adapter."""

    def __init__(self, runs: Sequence[tuple[int, int, LoraAdapter]]) -> None:
        """`runs`: rows [first, last) and their adapter, ascending; rows of no run have none."""
        self.runs = runs

    @classmethod
    def of_segments(cls, chosen: Iterable[LoraAdapter | None], lengths: Iterable[int]) -> AdapterRuns | None:
        """Return the runs of segments of these lengths, with one adapter each; None if none has one."""
        runs: list[tuple[int, int, LoraAdapter]] = []
        row = 0
        for adapter, length in zip(chosen, lengths, strict=True):
            if adapter is not None and runs and runs[-1][1] == row and runs[-1][2] is adapter:
                runs[-1] = (runs[-1][0], row + length, adapter)
            elif adapter is not None:
                runs.append((row, row + length, adapter))
            row += length
        return cls(runs) if runs else None

    def added(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Add to outputs `y` `[T, outputs]` of rows `x` `[T, inputs]` what the adapters add, in place."""
        for first, last, adapter in self.runs:
            adapter.added(name, x[first:last], y[first:last])
        return y

    def embedded(self, name: str, ids: Tensor, vectors: Tensor) -> Tensor:
        """Return `vectors`: tables have no adapters."""
        return vectors
