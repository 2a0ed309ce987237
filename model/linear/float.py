"""Projections with weights as floats, of one matrix or of several experts: by torch, experts on a GPU by Triton."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.model.config.formats import Storage
from triptych.model.linear.base import Linear, LinearSpec, Split, TensorShape, softcapped
from triptych.model.linear.scales import DequantizedWhileRead
from triptych.model.system import fallbacks
from triptych.model.system.devices import has_triton

# -- Products of floats: by torch, and on a GPU in the way that is fastest for the number of rows and of outputs.

_MIN_ROW_WORK = 1 << 20  # numbers of a matrix from which a kernel for one row is worth its compilation
_MIN_UNALIGNED = 4096  # outputs
_ALIGNED = 64  # outputs that are multiplied together: 16 bytes is what the fast kernels of cuBLAS need
_ROW_KERNEL = "products of one row are cuBLAS's"


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + b` of rows x `[T, K]` and a matrix W `[N, K]`."""
    if x.is_cuda and x.dim() == 2 and x.dtype in (torch.bfloat16, torch.float16) and not torch.is_grad_enabled():
        if has_row_kernel(x, weight):
            return _row_product(x, weight, bias)
        if weight.shape[0] % 8 and weight.shape[0] >= _MIN_UNALIGNED:
            return unaligned_product(x, weight, bias)
    return functional.linear(x, weight, bias)


def has_row_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether a product has one row and a matrix that is large enough for the kernel of one row."""
    return x.shape[0] == 1 and weight.numel() >= _MIN_ROW_WORK and weight.dtype is x.dtype and has_triton(x.device)


def row_kernel_kind(linear: Linear) -> Hashable | None:
    """Return what the kernel of one row is compiled for by a projection; None if it may not be used."""
    spec = linear.spec
    if not isinstance(linear, FloatLinear | TiedLinear) or isinstance(linear, ExpertsLinear):
        return None
    if linear.device.type != "cuda" or spec.num_outputs * spec.inputs < _MIN_ROW_WORK:
        return None
    return spec.bias, spec.num_outputs % 16 == 0, spec.inputs % 16 == 0


def use_cublas(error: Exception) -> None:
    """Multiply one row as any other number of rows from now on, as the kernel for it is broken."""
    fallbacks.note_once(_ROW_KERNEL, error)


def _row_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Any = NotImplemented
    if not fallbacks.noted(_ROW_KERNEL):
        from triptych.model.linear import triton_floats

        found = fallbacks.attempt(_ROW_KERNEL, triton_floats.multiply_row, x.contiguous(), weight.contiguous(), bias)
    return functional.linear(x, weight, bias) if found is NotImplemented else found


def unaligned_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + b` for a number of outputs that is no multiple of 8, as of GPT-2's vocabulary of 50,257.

    cuBLAS has only slow kernels for it: 167 us instead of 33 for 128 rows of BART's head on an H200. Most outputs are
    multiplied by a fast one, the last few apart. Rows of the result are longer than N.
    """
    count = len(weight)
    even = count // _ALIGNED * _ALIGNED
    out = x.new_empty(len(x), even + _ALIGNED)[:, :count]
    torch.mm(x, weight[:even].t(), out=out[:, :even])
    torch.mm(x, weight[even:].t(), out=out[:, even:])
    return out if bias is None else out.add_(bias)


# -- Projections by torch, with weights as floats in the network's dtype.


class FloatLinear(Linear):
    """`x W^T + b` by torch; the one that can be trained."""

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        self.weight = nn.Parameter(torch.empty(spec.num_outputs, spec.inputs))
        self.bias = nn.Parameter(torch.empty(spec.num_outputs)) if spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return softcapped(product(x, self.weight, self.bias), self.spec.softcap)


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
        return softcapped(product(x, weight, self.bias), self.spec.softcap)


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
        """The settings its kernels are compiled for, numbers of rows apart."""
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
            from triptych.model.linear import triton_experts

            return triton_experts.multiply(x, weights, biases, starts, out=self._out(x))
        y = self._out(x)
        for expert, (first, last) in enumerate(pairwise(starts.tolist())):
            if first < last:
                bias = None if biases is None else biases[expert]
                y[first:last] = functional.linear(x[first:last], weights[expert], bias)
        return y

    def _out(self, x: Tensor) -> Tensor:
        """Return memory for the products of rows x; zeros where some rows are of experts that another rank has."""
        fill = x.new_zeros if self.spec.split is Split.EXPERTS else x.new_empty
        return fill(len(x), self.spec.outputs_of_expert)


class DequantizedExpertsLinear(DequantizedWhileRead, ExpertsLinear):
    """An `ExpertsLinear` whose matrices are stored as numbers times scales, and multiplied while they are read."""

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, device: torch.device, storage: Storage) -> None:
        super().__init__(spec, dtype, device)
        self.expect(storage)
