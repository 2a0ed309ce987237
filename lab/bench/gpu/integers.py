"""Integer weights of the GPU benchmark: models with rounded weights, and products checked and measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from lab.bench.gpu.cases import Case
from lab.bench.gpu.figures import Figures, Skip
from lab.bench.gpu.machine import Bench, need_triton
from lab.bench.gpu.quantised import filled, quantise_layers
from model.config.formats import QUANTIZED_LAYERS, NumberFormat, NumberKind, integers, integers_in_groups
from model.linear.base import LinearSpec, Part
from model.linear.float import FloatLinear
from model.linear.integers import MOST, IntegerLinear, unsupported
from model.network.transformer import Transformer

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


@dataclass(frozen=True, slots=True)
class Shape:
    """Describes a projection: outputs, inputs, bits of a weight, inputs that share a scale (0: all), zero points."""

    outputs: int
    inputs: int
    bits: int
    group: int
    zeros: bool = False

    def __str__(self) -> str:
        scaled = f"groups of {self.group}" if self.group else "rows"
        return f"{self.outputs} x {self.inputs}, int{self.bits}, {scaled}{', zero points' if self.zeros else ''}"

    @property
    def nbytes(self) -> float:
        """Bytes that a product reads of weights and scales."""
        scales = self.outputs * (self.inputs // self.group if self.group else 1)
        return self.outputs * self.inputs * self.bits / 8 + scales * (3 if self.zeros else 2)


def make_projection(shape: Shape, device: torch.device, dtype: torch.dtype) -> IntegerLinear:
    """Return a projection of random integers, as a checkpoint stores them."""
    kept = integers(NumberKind.INT4 if shape.bits == 4 else NumberKind.INT8, shape.group)
    group, rows = shape.group or shape.inputs, (slice(0, shape.outputs),)
    storage = replace(integers_in_groups(shape.bits, group, offsets=shape.zeros), block=(1, shape.group))
    with torch.device("meta"):
        made = IntegerLinear(
            LinearSpec("m", shape.inputs, (Part(shape.outputs),), bias=False), dtype, device, kept, storage
        )
    factors, most = (shape.outputs, -(-shape.inputs // group)), 1 << (shape.bits - 1)
    scales = (torch.rand(factors, device=device) + 0.5).to(dtype)
    made.fill("m.weight_scale", rows, scales)
    if shape.zeros:
        made.fill("m.weight_offset", rows, scales.float() * torch.randint(-8, 8, factors, device=device))
    numbers = torch.randint(-most, most, (shape.outputs, shape.inputs), dtype=torch.int8, device=device)
    made.fill("m.weight", rows, numbers)
    made.finish()
    return made


def check_cases(bench: Bench) -> list[Case]:
    """Return the checks of products against torch in float32."""
    shapes = [
        Shape(4096, 4096, 4, 64),
        Shape(28672, 4096, 4, 128, zeros=True),
        Shape(1000, 1360, 4, 32),
        Shape(1024, 14336, 4, 64, zeros=True),
        Shape(4096, 4096, 8, 128),
        Shape(1024, 2048, 8, 0),
    ]
    if bench.tiny:
        shapes = [Shape(32, 528, 4, 32, zeros=True), Shape(64, 96, 8, 0)]
    return [Case(f"integer product, {shape}", partial(_check, shape=shape), 8) for shape in shapes]


def _check(bench: Bench, *, shape: Shape) -> Figures:
    """Compare products of several numbers of rows with torch's of the same factors, also captured and replayed twice.

    Parts of the inputs are counted on the device: a count that is not reset spoils the second replay.
    """
    need_triton(bench)
    need_integers(bench)
    linear = make_projection(shape, bench.device, bench.dtype)
    errors: dict[str, float] = {}
    same = True
    for rows in _CHECKED_ROWS[:4] if bench.tiny else _CHECKED_ROWS:
        torch.manual_seed(0)
        x = torch.randn(rows, shape.inputs).to(bench.device, bench.dtype)
        found, expected = linear(x), linear.reference(x).float()
        errors[f"error_{rows}"] = _difference(found, expected)
        if rows <= 64:
            least = 1 if rows <= 16 else 17
            same = same and all(torch.equal(linear(x[:least]), found[:least]) for _ in range(3))
        if bench.cuda:
            out = torch.empty_like(found)
            replay = bench.captured(lambda x=x, out=out: out.copy_(linear(x)))  # type: ignore[misc]
            for _ in range(2):
                out.zero_()
                replay()
            errors[f"captured_error_{rows}"] = _difference(out, expected)
    return {"ok": max(errors.values()) <= _BOUND and same, "rows_alone_are_the_same": same, **errors}


def _difference(found: Tensor, expected: Tensor) -> float:
    worst = ((found.float() - expected).abs().max() / expected.abs().max()).item()
    return worst if worst == worst else float("inf")


def product_cases(bench: Bench, shapes: dict[str, tuple[int, int]]) -> list[Case]:
    """Return the measurements of products in 4 bits, with and without zero points, and of heads in 8."""
    kinds = ((4, 64, False), (4, 128, True)), ((8, 128, False),)
    return [
        Case(
            f"integer product, {name}, {'zero points' if zeros else f'{bits} bits'}",
            partial(_measure, shape=Shape(*shape, bits, group, zeros)),
            10,
        )
        for name, shape in shapes.items()
        for bits, group, zeros in kinds["head" in name]
        if "8b" in name or not zeros
    ]


def _measure(bench: Bench, *, shape: Shape) -> Figures:
    """Return, for each number of rows, microseconds of the kernel, and with all weights made floats before."""
    need_triton(bench)
    if (why := unsupported(bench.device)) is not None:
        raise Skip(why)
    count = 1 if bench.tiny else max(1, -(-_BEYOND_CACHE // int(shape.nbytes)))
    turn = cycle([make_projection(shape, bench.device, bench.dtype) for _ in range(count)])
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
