"""Experts of the GPU benchmark: their products checked, eager and captured, for other rows of each expert."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from lab.bench.gpu.cases import Case
from lab.bench.gpu.figures import Figures
from lab.bench.gpu.machine import Bench, need_triton
from model.linear.base import LinearSpec, Part
from model.linear.float import ExpertsLinear

# Of outputs, relative to their largest: those of 16 bits are rounded once, in the interpreter towards 0.
_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True, slots=True)
class Shape:
    """Describes a projection of experts: how many, and the outputs and inputs of one."""

    experts: int
    outputs: int
    inputs: int
    bias: bool = False

    def __str__(self) -> str:
        return f"{self.experts} of {self.outputs} x {self.inputs}{', bias' if self.bias else ''}"


def check_cases(bench: Bench) -> list[Case]:
    """Return the checks of products in every type that the kernel multiplies; stored integers and fp8 become these."""
    uneven = Shape(32, 5760, 2880, bias=True)  # gpt-oss-20b; no tile divides its inputs
    wanted = [(shape, torch.bfloat16) for shape in (Shape(128, 1536, 2048), Shape(128, 2048, 768), uneven)]
    wanted += [(uneven, torch.float16), (uneven, torch.float32)]
    if bench.tiny:
        wanted = [(Shape(3, 40, 70, bias=True), torch.float32), (Shape(3, 40, 128), torch.bfloat16)]
    return [
        Case(f"experts' product, {shape}, {dtype}".replace("torch.", ""), partial(_check, shape=shape, dtype=dtype), 10)
        for shape, dtype in wanted
    ]


def make_projection(shape: Shape, device: torch.device, dtype: torch.dtype) -> ExpertsLinear:
    """Return a projection of random weights that Triton multiplies, on a CPU in its interpreter."""
    spec = LinearSpec("m", shape.inputs, (Part(shape.outputs),), bias=shape.bias, experts=shape.experts)
    with torch.device(device):
        linear = ExpertsLinear(spec, dtype, device).to(device, dtype).requires_grad_(False)
    for parameter in linear.parameters():
        parameter.normal_()
    linear.kernels = True
    return linear


def _check(bench: Bench, *, shape: Shape, dtype: torch.dtype) -> Figures:
    """Compare products with torch's in float32, also captured and replayed over other routes.

    The numbers of rows are the least and the most of each kind of launch: of either the first rows have the same bits.
    """
    need_triton(bench)
    torch.manual_seed(0)
    linear = make_projection(shape, bench.device, dtype)
    least = linear.tiled_rows
    found, same = Figures(), True
    for rows in sorted({*least, *(first - 1 for first in least[1:]), 7}):
        x = torch.randn(rows, shape.inputs, device=bench.device).to(dtype)
        starts = _routes(torch.randint(shape.experts, (rows,), device=bench.device), shape.experts)
        out = linear.of_experts(x, starts)
        found[f"error_{rows}"] = _difference(out, _expected(linear, x, starts))
        few = max(first for first in least if first <= rows)
        same = same and torch.equal(linear.of_experts(x[:few], starts.clamp(max=few)), out[:few])
        if bench.cuda:
            found[f"captured_error_{rows}"] = _replayed(bench, linear, x, starts)
            found[f"us_{rows}"] = 1e6 * bench.device_seconds(partial(linear.of_experts, x, starts))
    worst = max(value for key, value in found.items() if "error" in key)
    return {"ok": worst <= _BOUNDS[dtype] and same, "rows_alone_are_the_same": same, **found}


def _replayed(bench: Bench, linear: ExpertsLinear, x: Tensor, starts: Tensor) -> float:
    """Return the error of a recorded product with its own routes, with others, and with all rows at one expert."""
    count, rows = linear.spec.experts, len(x)
    out = x.new_empty(rows, linear.spec.outputs_of_expert)
    replay = bench.captured(lambda: out.copy_(linear.of_experts(x, starts)))
    others = torch.randint(count, (rows,), device=x.device), torch.full((rows,), count - 1, device=x.device)
    worst = 0.0
    for route in (starts.clone(), *(_routes(experts, count) for experts in others)):
        starts.copy_(route)
        out.zero_()
        replay()
        worst = max(worst, _difference(out, _expected(linear, x, starts)))
    return worst


def _routes(experts: Tensor, count: int) -> Tensor:
    """Return where each expert's rows begin if the rows have these experts, in any order."""
    return torch.searchsorted(experts.sort().values, torch.arange(count + 1, device=experts.device)).int()


def _expected(linear: ExpertsLinear, x: Tensor, starts: Tensor) -> Tensor:
    """Return the products by torch in float32, one expert after the other."""
    count = linear.spec.experts
    weights = linear.weight.unflatten(0, (count, -1))
    biases = None if linear.bias is None else linear.bias.unflatten(0, (count, -1)).float()
    out = torch.empty(len(x), linear.spec.outputs_of_expert, device=x.device)
    for expert, (first, last) in enumerate(pairwise(starts.tolist())):
        bias = None if biases is None else biases[expert]
        out[first:last] = functional.linear(x[first:last].float(), weights[expert].float(), bias)
    return out


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest error relative to the largest expected value; infinity for nan."""
    worst = ((found.float() - expected).abs().max() / expected.abs().max()).item()
    return worst if worst == worst else float("inf")
