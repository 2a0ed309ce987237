"""fp8 of the GPU benchmark: models with quantised weights, and products checked and measured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from lab.bench.gpu.cases import Case
from lab.bench.gpu.figures import Figures, Skip
from lab.bench.gpu.machine import Bench, need_triton
from lab.bench.gpu.quantised import filled, quantise_layers
from triptych.model.kernel_check.product_problems import Fp8Shape, difference, empty_fp8, fp8_projection
from triptych.model.linear.base import Linear
from triptych.model.linear.float import FloatLinear
from triptych.model.linear.fp8 import FEW, Fp8Linear, unsupported
from triptych.model.network.transformer import Transformer

_BLOCK = (128, 128)
_BOUND = 2e-2  # of a product in bfloat16, relative to its largest value
_CHECKED_ROWS = (1, 7, 16, 17, 64, 300)
_MEASURED_ROWS = (1, 2, 4, 8, 16, 64, 256, 2048)
_BEYOND_CACHE = 256 << 20  # bytes of weights used in turn


def need_fp8(bench: Bench) -> None:
    """Raise `Skip` on a GPU that does not multiply fp8; a CPU computes it by the reference, or in the interpreter."""
    if bench.cuda and (why := unsupported(bench.device)) is not None:
        raise Skip(why)


def in_fp8(model: Transformer) -> Transformer:
    """Quantise the projections of all layers, one after the other, on the model's device and in place."""
    quantise_layers(model, _quantised)
    model.linear = replace(model.linear, fp8=("*.layers.*",))
    return model.requires_grad_(False).eval()


def _quantised(linear: FloatLinear) -> Fp8Linear:
    weight = linear.weight
    return filled(empty_fp8(linear.spec, weight.dtype, weight.device), linear)


def check_cases(bench: Bench) -> list[Case]:
    """Return the checks of products against torch in float32."""
    shapes = [Fp8Shape(4096, 4096), Fp8Shape(6144, 4096, _BLOCK), Fp8Shape(1000, 1360), Fp8Shape(1024, 14336, _BLOCK)]
    if bench.tiny:
        shapes = [Fp8Shape(96, 64), Fp8Shape(64, 96, (32, 32))]
    found = [Case(f"fp8 product, {shape}", partial(_check, shape=shape, dtype=bench.dtype), 8) for shape in shapes]
    if bench.cuda:  # outputs are not rounded to 16 bits, so the error is that of the sums
        found += [Case(f"fp8 product, {s}, float32", partial(_check, shape=s, dtype=torch.float32), 8) for s in shapes]
    return found


def _check(bench: Bench, *, shape: Fp8Shape, dtype: torch.dtype) -> Figures:
    """Compare products of several numbers of rows with torch's of the same factors, also captured and replayed."""
    need_triton(bench)
    need_fp8(bench)
    linear = fp8_projection(shape, bench.device, dtype)
    errors: dict[str, float] = {}
    same = True
    for rows in _CHECKED_ROWS[:4] if bench.tiny else _CHECKED_ROWS:
        torch.manual_seed(0)
        x = torch.randn(rows, shape.inputs).to(bench.device, dtype)
        found, expected = linear(x), linear.reference(x).float()
        errors[f"error_{rows}"] = difference(found, expected)
        if rows <= FEW:
            same = same and torch.equal(linear(x[:1]), found[:1])
        if bench.cuda:
            out = torch.empty_like(found)
            replay = bench.captured(lambda x=x, out=out: out.copy_(linear(x)))  # type: ignore[misc]
            out.zero_()
            replay()
            errors[f"captured_error_{rows}"] = difference(out, expected)
    way = "torch._scaled_mm" if linear.by_torch(x) else "triton"
    ok = max(errors.values()) <= _BOUND and same
    return {"ok": ok, "one_row_alone_is_the_same": same, "many_rows_by": way, **errors}


def product_cases(bench: Bench, shapes: dict[str, tuple[int, int]]) -> list[Case]:
    """Return the measurements of products with rows' scales and with blocks'."""
    blocks: tuple[tuple[int, int] | None, ...] = (None, (32, 32) if bench.tiny else _BLOCK)
    return [
        Case(f"fp8 product, {name}{', blocks' if block else ''}", partial(_measure, shape=Fp8Shape(*shape, block)), 10)
        for name, shape in shapes.items()
        for block in blocks
        if "head" not in name  # which stays as it is
    ]


def _measure(bench: Bench, *, shape: Fp8Shape) -> Figures:
    """Return, for each number of rows, microseconds with quantising the rows, and of that alone."""
    need_triton(bench)
    need_fp8(bench)
    count = 1 if bench.tiny else max(1, -(-_BEYOND_CACHE // (shape.outputs * shape.inputs)))
    linears: list[Linear] = [fp8_projection(shape, bench.device, bench.dtype) for _ in range(count)]
    table = []
    for rows in _MEASURED_ROWS[:3] if bench.tiny else _MEASURED_ROWS:
        x = torch.randn(rows, shape.inputs, device=bench.device).to(bench.dtype)
        turn = cycle(linears)
        seconds = bench.device_seconds(lambda x=x, turn=turn: next(turn)(x), calls=max(10, count), rounds=5)  # type: ignore[misc]
        found: Figures = {"rows": rows, "us": 1e6 * seconds}
        if bench.cuda:
            found |= _apart(bench, x, shape, turn)
        found["of_bandwidth"] = shape.outputs * shape.inputs / bench.ceilings.bytes_per_second / seconds
        found["of_bfloat16_rate"] = 2 * rows * shape.outputs * shape.inputs / bench.ceilings.flops_per_second / seconds
        table.append(found)
    return {"shape": str(shape), "table": table}


def _apart(bench: Bench, x: Tensor, shape: Fp8Shape, turn: cycle[Linear]) -> Figures:
    """Return microseconds of quantising alone, and of the Triton kernel where torch multiplies."""
    from triptych.model.linear import triton_fp8

    group = shape.block[1] if shape.block else 0
    numbers, scales = triton_fp8.quantize_rows(x, group)
    quantising = bench.device_seconds(lambda: triton_fp8.quantize_rows(x, group))

    def triton() -> Tensor:
        linear = next(turn)
        assert isinstance(linear, Fp8Linear)
        return triton_fp8.multiply(numbers, scales, linear.weight, linear.weight_scale, None, linear.block, x.dtype)

    return {"quantising_us": 1e6 * quantising, "triton_alone_us": 1e6 * bench.device_seconds(triton)}
