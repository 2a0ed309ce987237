"""Low-rank adapters that requests name (Hu et al. 2021: LoRA): what they add to projections of a loaded network.

An adapter adds `scale * B A x` to `W x`. Projections that are fused in the network (q, k and v; gate and up) have a
part for each of the checkpoint's. Rows of several adapters, and of none, are computed in one step: `AdapterRuns` says
which rows have which. Where C computes a stack it computes these products too (`native_adapters`); elsewhere `added`
does. A row's result does not depend on the other rows where the base model's does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

# Projections of a layer that may have adapters, in the order of `low_rank.h`; those of a source are never in C.
ADAPTED = ("attn.qkv", "attn.out", "cross.q", "cross.out", "mlp.up", "mlp.down")
OF_SOURCES = "cross.kv"
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """What an adapter adds to the outputs `[first, first + outputs)` of a projection."""

    first: int
    outputs: int
    rank: int
    scale: float
    down: Callable[[Tensor], Tensor]  # [T, inputs] to [T, rank]
    up: Callable[[Tensor], Tensor]  # [T, rank] to [T, outputs]
    nbytes: int


@dataclass(eq=False, slots=True)
class LoraAdapter:
    """The matrices of one adapter in memory."""

    name: str
    parts: Mapping[str, tuple[LowRankPart, ...]]  # by the projection's name in the network
    number: int = field(default_factory=lambda: next(_numbers))  # no other adapter of the process has it
    tables: dict[int, object] = field(default_factory=dict)  # the same as C reads it, by stack
    classifier: Callable[[Tensor], Tensor] | None = None  # in place of the base model's; None: that one
    classifier_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.classifier_bytes + sum(part.nbytes for parts in self.parts.values() for part in parts)

    @property
    def changes_heads(self) -> bool:
        """Whether vectors and scores that are made of hidden states are other ones too."""
        return self.classifier is not None or "pooler" in self.parts

    def added(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Add to outputs `y` `[T, outputs]` of rows `x` `[T, inputs]` what it adds, in place."""
        for part in self.parts.get(name, ()):
            more = part.up(part.down(x)) * part.scale
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
