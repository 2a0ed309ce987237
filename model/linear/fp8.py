"""Projections with weights in float8_e4m3fn, for GPUs of compute capability 8.9 and later.

Activations are quantised when they come, with a scale for each token, or for each token and block of inputs where the
weights have scales for blocks. Factors are the same for any number of rows. Up to 16 rows, and for blocks always, a
Triton kernel multiplies: a row's bits do not depend on how many of up to 16 there are. More rows, of weights with a
scale for each output, are multiplied by `torch._scaled_mm`, which adds in another order.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from triptych.model.config.formats import FLOAT, NumberKind, Storage
from triptych.model.config.sharding import Index
from triptych.model.linear.base import CompiledLinear, LinearSpec, TensorShape
from triptych.model.linear.scales import StoredScales
from triptych.model.system import fallbacks

LARGEST = 448.0  # of float8_e4m3fn
FEW = 16  # rows that the Triton kernel multiplies, of weights with a scale for each output
_CAPABILITY = (8, 9)  # the first that multiplies fp8
_LEAST_BLOCK = 32  # inputs of a product of tensor cores
_WITHOUT = "fp8 products of many rows are Triton's"


def unsupported(device: torch.device) -> str | None:
    """Why weights are not kept in fp8 on a device; None: they are."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return None if (major, minor) >= _CAPABILITY else f"compute capability {major}.{minor} does not multiply fp8"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return f"a {device.type.upper()} does not multiply fp8"
    return None


def keeps(storage: Storage) -> bool:
    """Whether `Fp8Linear` multiplies what is stored so."""
    if storage == FLOAT:
        return True
    inputs = storage.block[1]
    return storage.numbers is NumberKind.FLOAT8 and (
        inputs == 0 or (inputs >= _LEAST_BLOCK and inputs & (inputs - 1) == 0)
    )


class Fp8Linear(CompiledLinear):
    """`x W^T + b` with W in float8_e4m3fn as it is stored, or quantised with a scale for each output as it is read."""

    tiled_rows = (1, FEW + 1, 65)

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, device: torch.device, storage: Storage) -> None:
        super().__init__(spec, dtype, device)
        self.storage = storage
        self.block = (1, storage.block[1])  # outputs and inputs that share a scale, as it is kept
        shape = (spec.num_outputs, spec.inputs)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float8_e4m3fn), requires_grad=False)
        scales = torch.empty(spec.num_outputs, storage.scales_of(spec.inputs))
        self.weight_scale = nn.Parameter(scales, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(spec.num_outputs)) if spec.bias else None
        self.kernels = _has_kernels(device)  # else torch multiplies, by `reference`
        self._scales = None if storage == FLOAT else StoredScales(spec, storage, device)
        self._stored = {} if self._scales is None else self._scales.tensors()

    @property
    def compiled_for(self) -> Hashable:
        return Fp8Linear, self.weight.shape, self.block, self.bias is None

    def kept_dtype(self, name: str) -> torch.dtype:
        return {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32}.get(name, self.dtype)

    def tensors(self) -> Mapping[str, TensorShape]:
        return {**super().tensors(), **self._stored}

    def fill(self, name: str, into: Index, values: Tensor) -> None:
        """Take rows of W, quantised if they are not stored so, scales, or values of the bias."""
        if name in self._stored:
            assert self._scales is not None, f"{self.spec.name} is finished"
            self._scales.fill(name, into, values)
        elif name == self.spec.weight and self.storage == FLOAT:
            numbers, scales = quantized(values.to(self.device, self.dtype), 0)
            self.parameter(name)[into] = numbers
            self.parameter(f"{self.spec.name}.weight_scale")[into[0]] = scales
        else:
            self.parameter(name)[into] = values.to(self.device, self.kept_dtype(name.rpartition(".")[2]))

    def finish(self) -> None:
        """Keep one scale for a block of outputs where there is one for whole blocks."""
        if self.device.type == "cuda":
            scales_rows(self.device)  # which waits for the device, as no step may
        if self._scales is None:
            return
        scales, high = self._scales.values, self.storage.block[0]
        assert scales is not None
        if self.block[1] and high > 1 and len(scales) % high == 0:
            blocks = scales.unflatten(0, (-1, high))
            if torch.equal(blocks, blocks[:, :1].expand_as(blocks)):
                scales, self.block = blocks[:, 0].contiguous(), (high, self.block[1])
        self.weight_scale = nn.Parameter(scales, requires_grad=False)
        self._scales = None

    def by_kernels(self, x: Tensor) -> Tensor:
        from triptych.model.linear import triton_fp8

        numbers, scales = triton_fp8.quantize_rows(x, self.block[1])
        if len(x) > FEW and self.by_torch(x):
            return torch._scaled_mm(
                numbers, self.weight.t(), scales, self.weight_scale.t(), bias=self.bias, out_dtype=x.dtype
            )
        return triton_fp8.multiply(numbers, scales, self.weight, self.weight_scale, self.bias, self.block, x.dtype)

    def by_torch(self, x: Tensor) -> bool:
        """Whether `_scaled_mm` multiplies: with a scale for each row, it gives bfloat16 of sizes that 16 divides."""
        sizes = (self.spec.num_outputs, self.spec.inputs)
        rows = x.dtype is torch.bfloat16 and self.block == (1, 0) and all(size % 16 == 0 for size in sizes)
        return rows and x.device.type == "cuda" and scales_rows(x.device)

    def reference(self, x: Tensor) -> Tensor:
        """Compute the product of the same factors by torch in float32: the kernels are compared with it."""
        numbers, scales = quantized(x, self.block[1])
        factors = numbers.float() * _spread(scales, self.block[1], x.shape[1])
        high = self.block[0]
        rows = self.weight_scale.repeat_interleave(high, dim=0)[: self.spec.num_outputs]
        weight = self.weight.float() * _spread(rows, self.block[1], x.shape[1])
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(factors, weight, bias).to(x.dtype)


def quantized(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Rows `[M, K]` as float8 and a float32 scale for each `group` inputs of a row, `[M, groups]`; 0: one for all."""
    width = x.shape[1]
    wide = nn.functional.pad(x.float(), (0, -width % group if group else 0))
    wide = wide.unflatten(1, (-1, group or width))  # [M, groups, K / groups]
    most = wide.abs().amax(-1)
    levels = torch.full_like(most, LARGEST)  # a number's reciprocal would be multiplied with, on a GPU
    numbers = (wide * (levels / most.clamp(min=1e-30))[..., None]).clamp(-LARGEST, LARGEST)
    return numbers.flatten(1)[:, :width].to(torch.float8_e4m3fn), most / levels


def _spread(scales: Tensor, group: int, width: int) -> Tensor:
    """One scale for each input."""
    return scales.repeat_interleave(group, dim=1)[:, :width] if group else scales


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@cache
def scales_rows(device: torch.device) -> bool:
    """Whether `_scaled_mm` takes a scale for each row here, tried once; CUDA or torch may be too old."""
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randn(size, 64, device=device, generator=generator) for size in (32, 48))
    (x_numbers, x_scales), (numbers, scales) = quantized(x, 0), quantized(weight, 0)
    try:
        found = torch._scaled_mm(x_numbers, numbers.t(), x_scales, scales.t(), out_dtype=torch.bfloat16)
        expected = (x_numbers.float() * x_scales) @ (numbers.float() * scales).T
        if not torch.allclose(found.float(), expected, rtol=0.02, atol=0.05):
            raise RuntimeError("the product of scaled rows is wrong")
    except Exception as error:
        fallbacks.note(_WITHOUT, error)
        return False
    return True
