"""Projections in C, whose matrices are packed into panels while their weights are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from triptych.model.config.formats import INT8_ROWS, NumberFormat, NumberKind, Storage, kept_as_stored
from triptych.model.config.sharding import Index, Shape
from triptych.model.linear.base import Linear, LinearSpec, Part, TensorShape
from triptych.model.linear.scales import DequantizedWhileRead
from triptych.model.native.library import KINDS, Kind, Library
from triptych.model.native.structures import PackedMatrix
from triptych.model.system.huge_pages import reserve

PANEL_WIDTH = 16  # outputs of a panel
_STEPS = {Kind.F32: 1, Kind.BF16: 2, Kind.INT8: 4, Kind.INT4: 8}  # of k that lie together, in 4 bytes
_DEPTHS = {Kind.F32: 1, Kind.BF16: 32, Kind.INT8: 64, Kind.INT4: 64}  # k is padded to a multiple: a row of a tile
_KERNELS = {
    (NumberKind.FLOAT32, NumberKind.FLOAT32): Kind.F32,
    (NumberKind.BFLOAT16, NumberKind.BFLOAT16): Kind.BF16,
    (NumberKind.INT8, NumberKind.INT8): Kind.INT8,
    (NumberKind.INT4, NumberKind.INT8): Kind.INT4,
}


class NativeLinear(Linear):
    """`x W^T + b` by the C product, which computes in float32 or, of bfloat16 matrices, as the CPU can.

    AMX tiles, where there are any, multiply every number of rows: they sum bfloat16 in another order than the vectors,
    and a row's bits must not depend on how many there are. Sums of integers are exact either way.
    """

    def __init__(
        self, spec: LinearSpec, kind: Kind, dtype: torch.dtype, library: Library | None, group: int = 0
    ) -> None:
        """`dtype` is the network's, which weights are rounded to before they are packed.

        With a `group` 32, 64 or 128 inputs share a scale: always of 4 bits, maybe of 8. Without a library it
        can only be asked for its size.
        """
        super().__init__(spec, dtype, torch.device("cpu"))
        self.library = library
        self.kind = kind
        self.group = group
        self._of_groups: tuple[str, ...] = ("scale",)  # arrays with a number for each output and group
        # Each expert's matrix begins with a panel of its own.
        self._rows_of_expert = _round_up(spec.outputs_of_expert, PANEL_WIDTH)
        rows = spec.num_outputs if spec.experts == 1 else spec.experts * self._rows_of_expert
        self._matrix = PackedMatrix(int(kind), rows, spec.inputs, group=group)
        self.arrays: dict[str, Tensor] = {}  # the bytes that the fields of `matrix` point to

    @property
    def matrix(self) -> PackedMatrix:
        """The packed matrix as C reads it."""
        self.reserve()
        return self._matrix

    def reserve(self) -> None:
        """Reserve the arrays, which are zero where no row and no column will be."""
        if self.arrays:
            return
        self.adopt({name: reserve(size) for name, size in self._sizes().items()})

    def array_specs(self) -> dict[str, tuple[torch.dtype, Shape]]:
        return {name: (torch.uint8, (size,)) for name, size in self._sizes().items()}

    def filled_arrays(self) -> dict[str, Tensor]:
        return self.arrays

    def adopt(self, arrays: Mapping[str, Tensor]) -> None:
        assert self.library is not None, f"{self.spec.name} was only planned"
        self._matrix.tiles = self.library.tiles
        self.arrays = dict(arrays)
        for name, array in self.arrays.items():
            setattr(self._matrix, name, array.data_ptr())

    def expert_matrix(self, expert: int) -> PackedMatrix:
        """One expert's part of the packed matrix."""
        matrix, first = self.matrix, expert * self._rows_of_expert
        part = PackedMatrix(matrix.dtype, self.spec.outputs_of_expert, matrix.k, tiles=matrix.tiles, group=matrix.group)
        for name, array in self.arrays.items():
            setattr(part, name, array.data_ptr() + first * len(array) // _round_up(matrix.n, PANEL_WIDTH))
        return part

    def _packed_rows(self, rows: slice) -> Iterator[tuple[int, slice]]:
        """Yield where rows of the whole matrix lie in the packed one: the first row there, and which rows follow it."""
        of_expert, first = self.spec.outputs_of_expert, rows.start
        while first < rows.stop:
            expert, row = divmod(first, of_expert)
            last = min(rows.stop, (expert + 1) * of_expert)
            yield expert * self._rows_of_expert + row, slice(first - rows.start, last - rows.start)
            first = last

    def fill(self, name: str, into: Index, values: Tensor) -> None:
        """Pack rows, or take values of the bias."""
        self._check(name, into, values)
        if values.dtype is not torch.bfloat16:  # which becomes float32 on the way, without loss
            values = values.to(self.dtype)
        if name == self.spec.weight:
            self._pack(into[0], values)
        else:
            self._set("bias", into[0], values)

    def _check(self, name: str, into: Index, values: Tensor) -> None:
        rows, *rest = self.tensors()[name].shape
        first, last = into[0].start, into[0].stop
        if len(into) > 1 or not 0 <= first <= last <= rows or tuple(values.shape) != (last - first, *rest):
            raise ValueError(f"rows {first} to {last} of {list(values.shape[1:])} are not those of {name}")

    def _pack(self, into: slice, rows: Tensor) -> None:
        if self.kind is Kind.BF16 or rows.dtype not in KINDS:
            rows = rows.to(torch.bfloat16 if self.kind is Kind.BF16 else torch.float32)
        matrix = self.matrix
        assert self.library is not None
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        for first, part in self._packed_rows(into):
            self.library.pack_rows(matrix, first, rows[part])

    def _set(self, array: str, into: slice, values: Tensor) -> None:
        """Put `[count]` floats into the array of this name."""
        self.reserve()
        floats = self.arrays[array].view(torch.float32)
        for first, part in self._packed_rows(into):
            floats[first : first + part.stop - part.start] = values[part]

    @property
    def nbytes(self) -> int:
        return sum(self._sizes().values())

    @property
    def num_groups(self) -> int:
        """How many scales a row has, padding included."""
        return padded_inputs(self.kind, self.spec.inputs, self.group) // self.group

    def _sizes(self) -> dict[str, int]:
        """Bytes of each array."""
        spec, rows = self.spec, self._matrix.n
        outputs = _round_up(rows, PANEL_WIDTH)
        sizes = {"data": packed_bytes(self.kind, rows, spec.inputs, self.group)}
        if spec.bias:
            sizes["bias"] = 4 * outputs
        if self.group:
            sizes |= dict.fromkeys(self._of_groups, 4 * outputs * self.num_groups)
        elif self.kind is Kind.INT8:
            sizes |= {"scale": 4 * outputs, "row_sums": 4 * outputs}
        return sizes

    @property
    def keeps_rows(self) -> bool:
        """Whether `rows` are what was stored, rounded to the network's dtype and no further."""
        return self.kind is Kind.F32 or (self.kind is Kind.BF16 and self.dtype is torch.bfloat16)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` `[count]` of the matrix, in the network's dtype; zeros for an id that it does not have."""
        assert self.library is not None
        return self.library.unpack_rows(self.matrix, ids.to(torch.int64).contiguous()).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.float().contiguous()
        out = torch.empty(rows.shape[0], self.spec.num_outputs)
        assert self.library is not None
        self.library.run_linear(self.matrix, rows, out, self.spec.softcap or 0.0)
        return out.to(x.dtype)

    def of_experts(self, x: Tensor, starts: Tensor) -> Tensor:
        rows, bounds = x.float().contiguous(), starts.tolist()
        out = torch.empty(rows.shape[0], self.spec.outputs_of_expert)
        assert self.library is not None
        for expert, (first, last) in enumerate(pairwise(bounds)):
            if first < last:
                self.library.run_linear(self.expert_matrix(expert), rows[first:last], out[first:last], 0.0)
        return out.to(x.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> NativeLinear:
        raise RuntimeError("packed weights stay where they are")


class Int8RowsLinear(NativeLinear):
    """A `NativeLinear` whose matrix is stored as it is kept: integers, and a scale for each row."""

    keeps_rows = True

    def tensors(self) -> Mapping[str, TensorShape]:
        scales = TensorShape((self.spec.num_outputs, 1), outputs=0)
        return {**super().tensors(), f"{self.spec.name}.weight_scale": scales}

    def fill(self, name: str, into: Index, values: Tensor) -> None:
        """Pack rows of integers, or take scales or values of the bias."""
        self._check(name, into, values)
        if name == f"{self.spec.name}.weight_scale":
            self._set("scale", into[0], values[:, 0])
        elif name == self.spec.weight:
            self._pack(into[0], values)
        else:
            super().fill(name, into, values)


class GivenIntegersLinear(NativeLinear):
    """A `NativeLinear` whose matrix is stored as it is kept: integers in groups, scales and maybe offsets."""

    def __init__(
        self, spec: LinearSpec, kind: Kind, dtype: torch.dtype, library: Library | None, storage: Storage
    ) -> None:
        super().__init__(spec, kind, dtype, library, storage.block[1])
        arrays = {storage.scale: "scale", storage.offset: "offset"}
        self._arrays = {f"{spec.name}.{tensor}": array for tensor, array in arrays.items() if tensor is not None}
        self._of_groups = tuple(self._arrays.values())

    @property
    def keeps_rows(self) -> bool:
        return "offset" not in self._of_groups

    def tensors(self) -> Mapping[str, TensorShape]:
        shape = (self.spec.num_outputs, -(-self.spec.inputs // self.group))
        factors = TensorShape(shape, outputs=0, inputs=1, block=self.group)
        return {**super().tensors(), **dict.fromkeys(self._arrays, factors)}

    def fill(self, name: str, into: Index, values: Tensor) -> None:
        """Pack rows of integers, or take scales, offsets or values of the bias."""
        self._check(name, into, values)
        if name in self._arrays:
            self.reserve()
            panels = self.arrays[self._arrays[name]].view(torch.float32).view(-1, self.num_groups, PANEL_WIDTH)
            for first, part in self._packed_rows(into[0]):
                rows = torch.arange(first, first + part.stop - part.start)
                panels[rows // PANEL_WIDTH, : values.shape[1], rows % PANEL_WIDTH] = values[part].float()
        elif name == self.spec.weight:
            self._pack(into[0], values)
        else:
            super().fill(name, into, values)


class DequantizedNativeLinear(DequantizedWhileRead, NativeLinear):
    """A `NativeLinear` whose matrix is stored as numbers times scales, and multiplied while it is read."""

    def __init__(
        self,
        spec: LinearSpec,
        kind: Kind,
        dtype: torch.dtype,
        library: Library | None,
        storage: Storage,
        group: int = 0,
    ) -> None:
        super().__init__(spec, kind, dtype, library, group)
        self.expect(storage)


def packed_matrix(linear: Linear) -> PackedMatrix:
    """Return the matrix of a projection that C computes."""
    if not isinstance(linear, NativeLinear):
        raise TypeError(f"{linear.spec.name} is not packed: C has no matrix of it")
    return linear.matrix


def native_linear(number_format: NumberFormat, spec: LinearSpec, dtype: torch.dtype, library: Library | None) -> Linear:
    """A projection whose numbers are stored, kept and multiplied as `number_format` says."""
    kind = kernel_of(number_format)
    if number_format.stored_as.scale is None:
        return NativeLinear(spec, kind, dtype, library, number_format.group)
    if number_format == kept_as_stored(number_format.stored_as):
        if number_format.stored_as == INT8_ROWS:
            return Int8RowsLinear(spec, kind, dtype, library)
        return GivenIntegersLinear(spec, kind, dtype, library, number_format.stored_as)
    return DequantizedNativeLinear(spec, kind, dtype, library, number_format.stored_as, number_format.group)


def kernel_of(number_format: NumberFormat) -> Kind:
    """Return the kernel, and so the packing, for weights and activations of a number format."""
    return _KERNELS[number_format.weight, number_format.activation]


def padded_inputs(kind: Kind, k: int, group: int = 0) -> int:
    """Return the k of panels."""
    return _round_up(k, max(_DEPTHS[kind], group))


def packed_bytes(kind: Kind, n: int, k: int, group: int = 0) -> int:
    """Return the bytes that the panels of a matrix `[n, k]` take."""
    return _round_up(n, PANEL_WIDTH) * padded_inputs(kind, k, group) * 4 // _STEPS[kind]


def packed_linear(
    library: Library, weight: Tensor, bias: Tensor | None = None, kind: Kind | None = None, group: int = 0
) -> NativeLinear:
    """Return the projection of a matrix `[n, k]` that is in memory; `kind` None keeps its dtype."""
    n, k = weight.shape
    spec = LinearSpec("matrix", k, (Part(n),), bias=bias is not None)
    linear = NativeLinear(spec, KINDS[weight.dtype] if kind is None else kind, weight.dtype, library, group)
    linear.fill("matrix.weight", (slice(0, n),), weight.detach())
    if bias is not None:
        linear.fill("matrix.bias", (slice(0, n),), bias.detach())
    return linear


def _round_up(size: int, step: int) -> int:
    return size + -size % step
