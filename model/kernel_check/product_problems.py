"""Projections of random weights in each format that Triton multiplies, generated on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from triptych.model.checkpoint.stored_formats import fp8_storage
from triptych.model.config.formats import FLOAT, NumberKind, integers, integers_in_groups
from triptych.model.linear.base import LinearSpec, Part
from triptych.model.linear.float import ExpertsLinear
from triptych.model.linear.fp8 import Fp8Linear
from triptych.model.linear.integers import IntegerLinear


def difference(found: Tensor, expected: Tensor, *, least: float = 1e-30) -> float:
    """Return the largest error relative to the largest expected value, `least` or more; infinity for nan."""
    worst = ((found.float() - expected).abs().max() / expected.abs().max().clamp(min=least)).item()
    return worst if worst == worst else float("inf")


@dataclass(frozen=True, slots=True)
class IntegerShape:
    """Describes a projection: outputs, inputs, bits of a weight, inputs that share a scale (0: all), zero points."""

    outputs: int
    inputs: int
    bits: int
    group: int
    zeros: bool = False
    whole: bool = True  # zero points are whole numbers
    bias: bool = False

    def __str__(self) -> str:
        scaled = f"groups of {self.group}" if self.group else "rows"
        return f"{self.outputs} x {self.inputs}, int{self.bits}, {scaled}{', zero points' if self.zeros else ''}"

    @property
    def nbytes(self) -> float:
        """Bytes that a product reads of weights and scales."""
        scales = self.outputs * (self.inputs // self.group if self.group else 1)
        return self.outputs * self.inputs * self.bits / 8 + scales * (3 if self.zeros else 2)


def integer_projection(shape: IntegerShape, device: torch.device, dtype: torch.dtype) -> IntegerLinear:
    """Return a projection of random integers, as a checkpoint stores them."""
    kept = integers(NumberKind.INT4 if shape.bits == 4 else NumberKind.INT8, shape.group)
    group, rows = shape.group or shape.inputs, (slice(0, shape.outputs),)
    storage = replace(integers_in_groups(shape.bits, group, offsets=shape.zeros), block=(1, shape.group))
    with torch.device("meta"):
        spec = LinearSpec("m", shape.inputs, (Part(shape.outputs),), bias=shape.bias)
        made = IntegerLinear(spec, dtype, device, kept, storage)
    factors, most = (shape.outputs, -(-shape.inputs // group)), 1 << (shape.bits - 1)
    scales = (torch.rand(factors, device=device) + 0.5).to(dtype)
    made.fill("m.weight_scale", rows, scales)
    if shape.zeros:
        points = torch.randint(-8, 8, factors, device=device) + (0 if shape.whole else torch.rand(1, device=device))
        made.fill("m.weight_offset", rows, (scales.float() * points).to(torch.float32 if shape.whole else dtype))
    if shape.bias:
        made.fill("m.bias", rows, torch.randn(shape.outputs, device=device))
    numbers = torch.randint(-most, most, (shape.outputs, shape.inputs), dtype=torch.int8, device=device)
    made.fill("m.weight", rows, numbers)
    made.finish()
    return made


@dataclass(frozen=True, slots=True)
class Fp8Shape:
    """Describes a projection: outputs, inputs, and what shares a scale (None: each output has its own)."""

    outputs: int
    inputs: int
    block: tuple[int, int] | None = None
    bias: bool = False

    def __str__(self) -> str:
        scaled = "rows" if self.block is None else f"blocks of {self.block[0]} x {self.block[1]}"
        return f"{self.outputs} x {self.inputs}, {scaled}"


def empty_fp8(
    spec: LinearSpec, dtype: torch.dtype, device: torch.device, block: tuple[int, int] | None = None
) -> Fp8Linear:
    """Return a projection without storage, to be filled."""
    with torch.device("meta"):
        return Fp8Linear(spec, dtype, device, FLOAT if block is None else fp8_storage(block))


def fp8_projection(shape: Fp8Shape, device: torch.device, dtype: torch.dtype) -> Fp8Linear:
    """Return a projection of random weights with a scale for each output, or for each block."""
    outputs, inputs, block = shape.outputs, shape.inputs, shape.block
    linear = empty_fp8(LinearSpec("m", inputs, (Part(outputs),), bias=shape.bias), dtype, device, block)
    rows = (slice(0, outputs),)
    weight = torch.randn(outputs, inputs, device=device)
    if block is not None:
        scales = torch.rand(-(-outputs // block[0]), -(-inputs // block[1]), device=device) + 0.5
        linear.fill("m.weight_scale", rows, scales.repeat_interleave(block[0], 0)[:outputs])
        weight = weight.to(torch.float8_e4m3fn)
    linear.fill("m.weight", rows, weight)
    if shape.bias:
        linear.fill("m.bias", rows, torch.randn(outputs, device=device))
    linear.finish()
    return linear


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Describes a projection of experts: how many, and the outputs and inputs of one."""

    experts: int
    outputs: int
    inputs: int
    bias: bool = False

    def __str__(self) -> str:
        return f"{self.experts} of {self.outputs} x {self.inputs}{', bias' if self.bias else ''}"


def experts_projection(shape: ExpertsShape, device: torch.device, dtype: torch.dtype) -> ExpertsLinear:
    """Return a projection of random weights that Triton multiplies, on a CPU in its interpreter."""
    spec = LinearSpec("m", shape.inputs, (Part(shape.outputs),), bias=shape.bias, experts=shape.experts)
    with torch.device(device):
        linear = ExpertsLinear(spec, dtype, device).to(device, dtype).requires_grad_(False)
    for parameter in linear.parameters():
        parameter.normal_()
    linear.kernels = True
    return linear


def routes_of(experts: Tensor, count: int) -> Tensor:
    """Return where each expert's rows begin if the rows have these experts, in any order."""
    return torch.searchsorted(experts.sort().values, torch.arange(count + 1, device=experts.device)).int()


def experts_reference(linear: ExpertsLinear, x: Tensor, starts: Tensor) -> Tensor:
    """Return the products by torch in float32, one expert after the other."""
    count = linear.spec.experts
    weights = linear.weight.unflatten(0, (count, -1))
    biases = None if linear.bias is None else linear.bias.unflatten(0, (count, -1)).float()
    out = torch.empty(len(x), linear.spec.outputs_of_expert, device=x.device)
    for expert, (first, last) in enumerate(pairwise(starts.tolist())):
        bias = None if biases is None else biases[expert]
        out[first:last] = functional.linear(x[first:last].float(), weights[expert].float(), bias)
    return out
