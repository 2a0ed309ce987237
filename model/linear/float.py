"""Projections by torch, with weights as floats in the network's dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config.formats import Storage
from model.linear.base import Linear, LinearSpec, TensorShape, softcapped
from model.linear.scales import DequantizedWhileRead


class FloatLinear(Linear):
    """`x W^T + b` by torch; the one that can be trained."""

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        self.weight = nn.Parameter(torch.empty(spec.num_outputs, spec.inputs))
        self.bias = nn.Parameter(torch.empty(spec.num_outputs)) if spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return softcapped(functional.linear(x, self.weight, self.bias), self.spec.softcap)


class DequantizedLinear(DequantizedWhileRead, FloatLinear):
    """`x W^T + b` by torch, of a W that is stored as numbers times scales: multiplied as it is read."""

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, device: torch.device, storage: Storage) -> None:
        super().__init__(spec, dtype, device)
        self.expect(storage)


class TiedLinear(Linear):
    """`x W^T + b` with a W that is the network's elsewhere: a head over the token table."""

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, device: torch.device, tied: Callable[[], Tensor]) -> None:
        """`tied` gives W when it is needed: the table's tensor is made while weights are read."""
        super().__init__(spec, dtype, device)
        self.tied = tied
        self.bias = nn.Parameter(torch.empty(spec.num_outputs)) if spec.bias else None

    def tensors(self) -> Mapping[str, TensorShape]:
        return {name: shape for name, shape in super().tensors().items() if name != self.spec.weight}

    def forward(self, x: Tensor) -> Tensor:
        weight = self.tied().to(x.dtype)  # a table may be kept in fewer bits than the network computes in
        return softcapped(functional.linear(x, weight, self.bias), self.spec.softcap)
