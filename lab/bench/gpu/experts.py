"""Experts of the GPU benchmark: their products checked, eager and captured, for other rows of each expert."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lab.bench.gpu.cases import Case
from lab.bench.gpu.figures import Figures
from lab.bench.gpu.machine import Bench, need_triton
from triptych.model.kernel_check.product_problems import (
    ExpertsShape,
    difference,
    experts_projection,
    experts_reference,
    routes_of,
)
from triptych.model.linear.float import ExpertsLinear

# Of outputs, relative to their largest: those of 16 bits are rounded once, in the interpreter towards 0.
_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def check_cases(bench: Bench) -> list[Case]:
    """Return the checks of products in every type that the kernel multiplies; stored integers and fp8 become these."""
    uneven = ExpertsShape(32, 5760, 2880, bias=True)  # gpt-oss-20b; no tile divides its inputs
    wanted = [
        (shape, torch.bfloat16) for shape in (ExpertsShape(128, 1536, 2048), ExpertsShape(128, 2048, 768), uneven)
    ]
    wanted += [(uneven, torch.float16), (uneven, torch.float32)]
    if bench.tiny:
        wanted = [(ExpertsShape(3, 40, 70, bias=True), torch.float32), (ExpertsShape(3, 40, 128), torch.bfloat16)]
    return [
        Case(f"experts' product, {shape}, {dtype}".replace("torch.", ""), partial(_check, shape=shape, dtype=dtype), 10)
        for shape, dtype in wanted
    ]


def _check(bench: Bench, *, shape: ExpertsShape, dtype: torch.dtype) -> Figures:
    """Compare products with torch's in float32, also captured and replayed over other routes.

    The numbers of rows are the least and the most of each kind of launch: of either the first rows have the same bits.
    """
    need_triton(bench)
    torch.manual_seed(0)
    linear = experts_projection(shape, bench.device, dtype)
    least = linear.tiled_rows
    found, same = Figures(), True
    for rows in sorted({*least, *(first - 1 for first in least[1:]), 7}):
        x = torch.randn(rows, shape.inputs, device=bench.device).to(dtype)
        starts = routes_of(torch.randint(shape.experts, (rows,), device=bench.device), shape.experts)
        out = linear.of_experts(x, starts)
        found[f"error_{rows}"] = difference(out, experts_reference(linear, x, starts))
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
    for route in (starts.clone(), *(routes_of(experts, count) for experts in others)):
        starts.copy_(route)
        out.zero_()
        replay()
        worst = max(worst, difference(out, experts_reference(linear, x, starts)))
    return worst
