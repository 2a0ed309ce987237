"""Projections of which each rank multiplies some of the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from model.config.sharding import Index, Range, Shard
from model.linear.base import Linear, LinearSpec, TensorShape


class Collective(Protocol):
    """What ranks compute together; each call is made by all of them."""

    @property
    def shard(self) -> Shard:
        """Which rank this is, of how many."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place; the same bits on each."""

    def concatenate(self, part: Tensor, ranges: Sequence[Range]) -> Tensor:
        """Join the columns `[N, last - first]` of every rank to `[N, V]`."""


class ParallelLinear(Linear):
    """`x W^T + b` where a rank has some of the columns of x and of W, and every rank the whole of b."""

    def __init__(self, spec: LinearSpec, product: Linear, collective: Collective) -> None:
        """`product` is this rank's part of `x W^T`, in whatever number format."""
        super().__init__(spec, product.dtype, product.device)
        self.product = product
        self.bias = nn.Parameter(torch.empty(spec.num_outputs)) if spec.bias else None
        self.collective = collective

    def tensors(self) -> Mapping[str, TensorShape]:
        return {**super().tensors(), **self.product.tensors()}

    def reserve(self) -> None:
        self.product.reserve()

    def fill(self, name: str, into: Index, values: Tensor) -> None:
        if name in self.product.tensors():
            self.product.fill(name, into, values)
        else:
            super().fill(name, into, values)

    def finish(self) -> None:
        self.product.finish()

    @property
    def nbytes(self) -> int:
        return self.product.nbytes + (0 if self.bias is None else self._nbytes("bias", self.bias))

    def forward(self, x: Tensor) -> Tensor:
        whole = self.collective.sum(self.product(x))
        return whole if self.bias is None else whole + self.bias
