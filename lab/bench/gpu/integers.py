"""Integer weights of the GPU benchmark: models with rounded weights, and products checked and measured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import cycle

import torch

from lab.bench.gpu.cases import Case
from lab.bench.gpu.figures import Figures, Skip
from lab.bench.gpu.machine import Bench, need_triton
from lab.bench.gpu.quantised import filled, quantise_layers
from triptych.model.config.formats import QUANTIZED_LAYERS, NumberFormat
from triptych.model.kernel_check.product_problems import IntegerShape, difference, integer_projection
from triptych.model.linear.float import FloatLinear
from triptych.model.linear.integers import MOST, IntegerLinear, unsupported
from triptych.model.network.transformer import Transformer

_BOUND = 2e-2  # of a product in bfloat16, relative to its largest value
_CHECKED_ROWS = (1, 7, 16, 17, 64, 65, 256, 300)
_MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
_BEYOND_CACHE = 256 << 20  # bytes of weights used in turn


def need_integers(bench: Bench) -> None:
    """Raise `Skip` on a GPU without Triton; a CPU computes by the reference, or in the interpreter."""
    if bench.cuda and (why := unsupported(bench.device)) is not None:
        raise Skip(why)


def in_integers(model: Transformer, quantization: str) -> Transformer:
    """Round the projections of all layers, and a head of its own, one after the other, in place."""
    in_layers, in_head = QUANTIZED_LAYERS[quantization]
    quantise_layers(model, partial(_rounded, kept=in_layers))
    if isinstance(model.head, FloatLinear):
        model.head = _rounded(model.head, in_head)
    model.linear = replace(model.linear, integers=(("*.layers.*", in_layers),), quantization=quantization)
    return model.requires_grad_(False).eval()


def bytes_of_weights(quantization: str) -> tuple[float, float]:
    """Return the bytes of a weight of the layers and of the head, with its part of a scale of 16 bits."""
    in_layers, in_head = QUANTIZED_LAYERS[quantization]
    layers, head = (one.weight.bits / 8 + (2 / one.group if one.group else 0) for one in (in_layers, in_head))
    return layers, head


def _rounded(linear: FloatLinear, kept: NumberFormat) -> IntegerLinear:
    weight = linear.weight
    with torch.device("meta"):
        made = IntegerLinear(linear.spec, weight.dtype, weight.device, kept)
    return filled(made, linear)


def check_cases(bench: Bench) -> list[Case]:
    """Return the checks of products against torch in float32."""
    shapes = [
        IntegerShape(4096, 4096, 4, 64),
        IntegerShape(28672, 4096, 4, 128, zeros=True),
        IntegerShape(1000, 1360, 4, 32),
        IntegerShape(1024, 14336, 4, 64, zeros=True),
        IntegerShape(4096, 4096, 8, 128),
        IntegerShape(1024, 2048, 8, 0),
    ]
    if bench.tiny:
        shapes = [IntegerShape(32, 528, 4, 32, zeros=True), IntegerShape(64, 96, 8, 0)]
    return [Case(f"integer product, {shape}", partial(_check, shape=shape), 8) for shape in shapes]


def _check(bench: Bench, *, shape: IntegerShape) -> Figures:
    """Compare products of several numbers of rows with torch's of the same factors, also captured and replayed twice.

    Parts of the inputs are counted on the device: a count that is not reset spoils the second replay.
    """
    need_triton(bench)
    need_integers(bench)
    linear = integer_projection(shape, bench.device, bench.dtype)
    errors: dict[str, float] = {}
    same = True
    for rows in _CHECKED_ROWS[:4] if bench.tiny else _CHECKED_ROWS:
        torch.manual_seed(0)
        x = torch.randn(rows, shape.inputs).to(bench.device, bench.dtype)
        found, expected = linear(x), linear.reference(x).float()
        errors[f"error_{rows}"] = difference(found, expected)
        if rows <= 64:
            least = 1 if rows <= 16 else 17
            same = same and all(torch.equal(linear(x[:least]), found[:least]) for _ in range(3))
        if bench.cuda:
            out = torch.empty_like(found)
            replay = bench.captured(lambda x=x, out=out: out.copy_(linear(x)))  # type: ignore[misc]
            for _ in range(2):
                out.zero_()
                replay()
            errors[f"captured_error_{rows}"] = difference(out, expected)
    return {"ok": max(errors.values()) <= _BOUND and same, "rows_alone_are_the_same": same, **errors}


def product_cases(bench: Bench, shapes: dict[str, tuple[int, int]]) -> list[Case]:
    """Return the measurements of products in 4 bits, with and without zero points, and of heads in 8."""
    kinds = ((4, 64, False), (4, 128, True)), ((8, 128, False),)
    return [
        Case(
            f"integer product, {name}, {'zero points' if zeros else f'{bits} bits'}",
            partial(_measure, shape=IntegerShape(*shape, bits, group, zeros)),
            10,
        )
        for name, shape in shapes.items()
        for bits, group, zeros in kinds["head" in name]
        if "8b" in name or not zeros
    ]


def _measure(bench: Bench, *, shape: IntegerShape) -> Figures:
    """Return, for each number of rows, microseconds of the kernel, and with all weights made floats before."""
    need_triton(bench)
    if (why := unsupported(bench.device)) is not None:
        raise Skip(why)
    count = 1 if bench.tiny else max(1, -(-_BEYOND_CACHE // int(shape.nbytes)))
    turn = cycle([integer_projection(shape, bench.device, bench.dtype) for _ in range(count)])
    calls = max(10, count)
    table = []
    for rows in _MEASURED_ROWS[:3] if bench.tiny else _MEASURED_ROWS:
        x = torch.randn(rows, shape.inputs, device=bench.device).to(bench.dtype)
        seconds = bench.device_seconds(lambda x=x: next(turn).by_triton(x), calls=calls)  # type: ignore[misc]
        other = bench.device_seconds(lambda x=x: next(turn).by_torch(x), calls=calls)  # type: ignore[misc]
        found: Figures = {"rows": rows, "us": 1e6 * seconds, "dequantised_us": 1e6 * other}
        found["of_bandwidth"] = shape.nbytes / bench.ceilings.bytes_per_second / seconds
        found["of_bfloat16_rate"] = 2 * rows * shape.outputs * shape.inputs / bench.ceilings.flops_per_second / seconds
        table.append(found)
    return {"shape": str(shape), "most": MOST, "table": table}
