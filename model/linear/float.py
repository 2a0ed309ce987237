"""Projections by torch, with weights as floats in the network's dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config.sharding import Index
from model.linear.base import Linear, LinearSpec, TensorShape


class FloatLinear(Linear):
    """`x W^T + b` by torch; the one that can be trained."""

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        self.weight = nn.Parameter(torch.empty(spec.num_outputs, spec.inputs))
        self.bias = nn.Parameter(torch.empty(spec.num_outputs)) if spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return _softcapped(functional.linear(x, self.weight, self.bias), self.spec.softcap)


class DequantizedLinear(FloatLinear):
    """`x W^T + b` by torch, of a W that is stored as integers: multiplied by the scales of its rows once it is read."""

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        self._scales: Tensor | None = None  # [outputs, 1], until they are multiplied in

    def tensors(self) -> Mapping[str, TensorShape]:
        scales = TensorShape((self.spec.num_outputs, 1), outputs=0)
        return {**super().tensors(), f"{self.spec.name}.weight_scale": scales}

    def fill(self, name: str, into: Index, values: Tensor) -> None:
        if name != f"{self.spec.name}.weight_scale":
            super().fill(name, into, values)
            return
        if self._scales is None:
            self._scales = torch.empty(self.spec.num_outputs, 1, dtype=torch.float32, device=self.device)
        self._scales[into].copy_(values)

    def finish(self) -> None:
        if self._scales is not None:
            self.weight.detach().mul_(self._scales)
            self._scales = None


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
        return _softcapped(functional.linear(x, weight, self.bias), self.spec.softcap)


def _softcapped(outputs: Tensor, softcap: float | None) -> Tensor:
    return outputs if softcap is None else torch.tanh(outputs / softcap) * softcap
