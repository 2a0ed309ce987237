"""Projections with weights in integers of 4 or 8 bits on a GPU, multiplied with activations in floats.

Up to `MOST` rows a Triton kernel multiplies: it reads packed weights once for each tile of rows and makes floats of
them in registers. For more rows all weights become floats in memory, rounded to the network's dtype, and torch
multiplies. Up to 16 rows, and from 17 to 64, a row's bits do not depend on how many there are.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from triptych.model.config.formats import FLOAT, NumberFormat, Storage, kept_as_stored
from triptych.model.config.sharding import Index
from triptych.model.linear.base import CompiledLinear, LinearSpec, TensorShape
from triptych.model.linear.scales import DequantizedWhileRead, StoredScales

# -- Rounding of floats to integers in groups that share a scale, by the rules of the C kernels (`quantise.c`).

# Values that are tried for the largest number of a group, before rounding to -8 ... 7.
_LARGEST = (-8, -7, -7.25, -7.5, -7.75, -8.25, -8.5, -8.75, -9, -9.25, -6.75, -6.5, 7, 6.75, 7.25, 7.5, 6.5, 7.75)
_LEAST = 1e-30  # a group without anything larger is zeros


def rounded_in_groups(rows: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Rows `[R, K]` as integers of 4 or 8 bits, int8 `[R, K]`, and a float32 scale for each `group` of a row; 0: one.

    In 8 bits the largest absolute value becomes 127. In 4 bits several scales are tried and that with the least
    squared error is kept. What is no number makes its scale NaN.
    """
    width = rows.shape[1]
    wide = pad(rows.float(), (0, -width % group if group else 0)).unflatten(1, (-1, group or width))
    numbers, scales = _rounded_to_4_bits(wide) if bits == 4 else _rounded_to_8_bits(wide)
    return numbers.to(torch.int8).flatten(1)[:, :width], scales


def _rounded_to_8_bits(wide: Tensor) -> tuple[Tensor, Tensor]:
    scales = wide.abs().amax(-1) / 127
    return (wide / scales.clamp(min=_LEAST)[..., None]).nan_to_num(0, 0, 0).round(), scales


def _rounded_to_4_bits(wide: Tensor) -> tuple[Tensor, Tensor]:
    """The best scale of integers q is sum(x q) / sum(q q), with the error sum(x x) - sum(x q)^2 / sum(q q)."""
    most = wide.gather(-1, wide.abs().argmax(-1, keepdim=True))
    usable = most.isfinite() & (most.abs() >= _LEAST)
    whole = torch.where(usable, wide, 0)
    best, scale, inverse = (torch.zeros_like(most) for _ in range(3))
    for largest in _LARGEST:
        times = largest / torch.where(usable, most, 1)
        numbers = (whole * times).round().clamp(-8, 7)
        product, square = (whole * numbers).sum(-1, keepdim=True), (numbers * numbers).sum(-1, keepdim=True)
        found = product / square.clamp(min=1)
        better = found * product > best
        best = torch.where(better, found * product, best)
        scale, inverse = torch.where(better, found, scale), torch.where(better, times, inverse)
    scale = torch.where(usable, scale, most - most)
    return (whole * inverse).round().clamp(-8, 7), scale[..., 0]


MOST = 256  # rows that the Triton kernel multiplies


def unsupported(device: torch.device) -> str | None:
    """Why weights are not multiplied in integers by torch on a device; None: they are."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"a {device.type.upper()} multiplies them in C"


class IntegerLinear(CompiledLinear):
    """`x W^T + b` with W in integers as they are stored, or rounded as it is read: W = integers * scales + offsets.

    Scales and offsets are `[groups, outputs]`. Offsets that are whole numbers of scales are kept as such, in int8;
    other factors in 16 bits if these hold them exactly, else in float32.
    """

    tiled_rows = (1, 17, 65, MOST + 1)

    def __init__(
        self, spec: LinearSpec, dtype: torch.dtype, device: torch.device, kept: NumberFormat, storage: Storage = FLOAT
    ) -> None:
        """`kept` says how many bits a weight has, and how many inputs share a scale."""
        super().__init__(spec, dtype, device)
        self.bits, self.group = kept.weight.bits, kept.group
        self._half = min(self.group or 64, 64)
        span = 2 * self._half
        self._inputs = spec.inputs + -spec.inputs % span  # padded with zeros
        groups = self._inputs // self.group if self.group else 1
        factors = (groups, spec.num_outputs)
        self.weight = _empty((spec.num_outputs, self._inputs * self.bits // 8), self.kept_dtype("weight"))
        self.weight_scale = _empty(factors, dtype)
        self.weight_offset = _empty(factors, dtype) if storage.offset is not None else None
        self.bias = _empty((spec.num_outputs,), dtype) if spec.bias else None
        self.kernels = unsupported(device) is None  # else torch multiplies, by `reference`
        self._given = None if storage.scale is None else StoredScales(spec, storage, device)
        self._factors = {} if self._given is None else self._given.tensors()

    @property
    def compiled_for(self) -> Hashable:
        factors = None if self.weight_offset is None else self.weight_offset.dtype, self.weight_scale.dtype
        return IntegerLinear, self.spec.num_outputs, self.spec.inputs, self.bits, self.group, factors, self.bias is None

    def kept_dtype(self, name: str) -> torch.dtype:
        if name in ("weight_scale", "weight_offset") and self._given is not None:
            return torch.float32  # at most: `finish` keeps what is stored in as few bits as hold it
        return {"weight": torch.uint8 if self.bits == 4 else torch.int8}.get(name, self.dtype)

    def tensors(self) -> Mapping[str, TensorShape]:
        return {**super().tensors(), **self._factors}

    def fill(self, name: str, into: Index, values: Tensor) -> None:
        """Take rows of W as integers, or as floats, which are rounded; scales, offsets or values of the bias."""
        if name in self._factors:
            assert self._given is not None, f"{self.spec.name} is finished"
            self._given.fill(name, into, values)
        elif name != self.spec.weight:
            super().fill(name, into, values.to(self.device, self.dtype))
        elif self._given is not None:
            self._pack(into, values.to(self.device))
        else:
            numbers, scales = rounded_in_groups(values.to(self.device, self.dtype), self.bits, self.group)
            self._pack(into, numbers)
            kept = self.parameter(f"{self.spec.name}.weight_scale")
            kept[:, into[0]] = pad(scales, (0, len(kept) - scales.shape[1])).T.to(kept.dtype)

    def _pack(self, into: Index, numbers: Tensor) -> None:
        numbers = pad(numbers, (0, self._inputs - self.spec.inputs))
        if self.bits == 4:
            halves = (numbers + 8).to(torch.uint8).unflatten(1, (-1, 2, self._half))
            numbers = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
        self.parameter(f"{self.spec.name}.weight")[into[0]] = numbers

    def finish(self) -> None:
        """Keep scales and offsets that were stored in as few bits as hold them."""
        if self.device.type == "cuda":
            from triptych.model.linear.triton_integers import counters

            counters(self.device)  # made before steps are recorded
        if self._given is None:
            return
        scales, offsets = self._given.values, self._given.offsets
        assert scales is not None
        padding = (0, len(self.weight_scale) - scales.shape[1])
        if offsets is not None:
            whole = (offsets / scales).nan_to_num(0, 0, 0).round().clamp(-128, 127)
            kept = whole.to(torch.int8) if torch.equal(whole * scales, offsets) else _narrowed(offsets, self.dtype)
            self.weight_offset = nn.Parameter(pad(kept, padding).T.contiguous(), requires_grad=False)
        kept = pad(_narrowed(scales, self.dtype), padding)
        self.weight_scale = nn.Parameter(kept.T.contiguous(), requires_grad=False)
        self._given = None

    def by_kernels(self, x: Tensor) -> Tensor:
        return self.by_triton(x) if len(x) <= MOST else self.by_torch(x)

    def by_triton(self, x: Tensor) -> Tensor:
        """Return the product of packed weights."""
        from triptych.model.linear.triton_integers import multiply

        packed = (self.weight, self.weight_scale, self.weight_offset)
        return multiply(x, *packed, self.bias, self.bits, self.group)

    def by_torch(self, x: Tensor) -> Tensor:
        """Return the product of weights that become floats in memory first."""
        from triptych.model.linear.triton_integers import dequantized

        packed = (self.weight, self.weight_scale, self.weight_offset)
        weight = dequantized(*packed, self.bits, self.group, self.spec.inputs, x.dtype)
        return linear(x, weight, self.bias)

    def reference(self, x: Tensor) -> Tensor:
        """Compute the product by torch in float32: the kernels are compared with it."""
        bias = None if self.bias is None else self.bias.float()
        return linear(x.float(), self.weights(), bias).to(x.dtype)

    def weights(self) -> Tensor:
        """W as float32 `[outputs, inputs]`."""
        numbers = self.weight.detach()
        if self.bits == 4:
            halves = numbers.unflatten(1, (-1, 1, self._half))
            numbers = torch.cat((halves & 15, halves >> 4), 2).flatten(1).to(torch.int8) - 8
        group = self.group or self._inputs
        scales = self.weight_scale.float().T.repeat_interleave(group, dim=1)
        weights = numbers.float() * scales
        if self.weight_offset is not None:
            offsets = self.weight_offset.float().T.repeat_interleave(group, dim=1)
            if self.weight_offset.dtype is torch.int8:
                offsets *= scales
            weights += offsets
        return weights[:, : self.spec.inputs]


class DequantizedIntegerLinear(DequantizedWhileRead, IntegerLinear):
    """An `IntegerLinear` whose matrix is stored as other numbers times scales, and multiplied while it is read."""

    def __init__(
        self, spec: LinearSpec, dtype: torch.dtype, device: torch.device, kept: NumberFormat, storage: Storage
    ) -> None:
        super().__init__(spec, dtype, device, kept)
        self.expect(storage)


def integer_linear(
    spec: LinearSpec, dtype: torch.dtype, device: torch.device, kept: NumberFormat, storage: Storage
) -> IntegerLinear:
    """A projection that is kept so, whatever it is stored as."""
    if storage.scale is None or kept_as_stored(storage) is not None:
        return IntegerLinear(spec, dtype, device, kept, storage)
    return DequantizedIntegerLinear(spec, dtype, device, kept, storage)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _narrowed(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 factors in a type of 16 bits that holds them exactly, the network's first."""
    for narrow in (dtype, torch.float16, torch.bfloat16):
        if narrow.itemsize == 2 and torch.equal(factors.to(narrow).float(), factors):
            return factors.to(narrow)
    return factors
