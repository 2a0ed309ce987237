"""Projections with weights as floats, of one matrix or of several experts: by torch, experts on a GPU by Triton."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config.formats import Storage
from model.linear.base import Linear, LinearSpec, TensorShape, softcapped
from model.linear.scales import DequantizedWhileRead

# -- Projections by torch, with weights as floats in the network's dtype.


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


# -- Projections with the matrices of several experts, as floats: by Triton on a GPU, elsewhere by torch.


class ExpertsLinear(FloatLinear):
    """`x W^T + b` of rows that come in the order of their experts, each with its expert's W and b.

    On a GPU nothing of a launch depends on how many rows an expert has, so steps can be recorded. Of up to 16 rows an
    expert on the average, of up to 64, and of more, a row's bits do not depend on the other rows.
    """

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        self.kernels = device.type == "cuda" and find_spec("triton") is not None

    @property
    def compiled_for(self) -> Hashable:
        """What its kernels are compiled for, apart from numbers of rows."""
        return self.spec.experts, self.spec.outputs_of_expert, self.spec.inputs, self.bias is None

    @property
    def tiled_rows(self) -> tuple[int, ...]:
        """The first number of rows of each kind of launch."""
        return 1, 16 * self.spec.experts + 1, 64 * self.spec.experts + 1

    def of_experts(self, x: Tensor, starts: Tensor) -> Tensor:
        count = self.spec.experts
        weights = self.weight.unflatten(0, (count, -1))
        biases = None if self.bias is None else self.bias.unflatten(0, (count, -1))
        if self.kernels:
            from model.linear import triton_experts

            with torch.cuda.device_of(x):
                return triton_experts.multiply(x, weights, biases, starts)
        y = x.new_empty(len(x), self.spec.outputs_of_expert)
        for expert, (first, last) in enumerate(pairwise(starts.tolist())):
            if first < last:
                bias = None if biases is None else biases[expert]
                y[first:last] = functional.linear(x[first:last], weights[expert], bias)
        return y


class DequantizedExpertsLinear(DequantizedWhileRead, ExpertsLinear):
    """As `ExpertsLinear`, of matrices that are stored as numbers times scales: multiplied as they are read."""

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, device: torch.device, storage: Storage) -> None:
        super().__init__(spec, dtype, device)
        self.expect(storage)
