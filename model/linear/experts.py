"""Projections with the matrices of several experts, as floats: by Triton on a GPU, elsewhere by torch."""

from __future__ import annotations

from collections.abc import Hashable
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from model.config.formats import Storage
from model.linear.base import LinearSpec
from model.linear.float import FloatLinear
from model.linear.scales import DequantizedWhileRead


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
        """What its kernels are compiled for, beside numbers of rows."""
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
