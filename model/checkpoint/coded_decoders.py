"""Reads projections of `coded_layouts` as integers with scales where C has these, else as floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from triptych.model.checkpoint.coded_layouts import CodedLayout, E2M1Layout, Int8RowsLayout, TableLayout
from triptych.model.checkpoint.matrix_decoders import decoded
from triptych.model.checkpoint.tensor_files import DecodedTensor, StoredTensor, TensorReader
from triptych.model.config.formats import Storage
from triptych.model.errors import CheckpointError
from triptych.model.families.table.rules import Shape

_TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # by the 3 bits without the sign
_HALF_E8M0 = (*(2.0 ** (exponent - 128) for exponent in range(255)), math.nan)
_Tensors = Mapping[str, StoredTensor]  # of one projection, by their own names


def coded(
    stem: str, layout: CodedLayout, storage: Storage, stored: Mapping[str, StoredTensor]
) -> Iterator[DecodedTensor]:
    """Yield the tensors of a storage that a projection's are read as; raise `CheckpointError` unless they fit."""
    tensors = {}
    for name in layout.needed:
        if f"{stem}.{name}" not in stored:
            raise CheckpointError(f"{stem}.{name} is missing, found other tensors of {layout.tool}")
        tensors[name] = stored[f"{stem}.{name}"]
    make = next(make for kind, make in _MATRICES.items() if isinstance(layout, kind))
    matrix: _Matrix = make(layout, tensors)
    yield from decoded(stem, matrix, storage)


class _Matrix:
    """The stored tensors of one projection."""

    def __init__(self, layout: CodedLayout, tensors: _Tensors, shape: Shape) -> None:
        self.layout, self.tensors, self.shape = layout, tensors, shape

    def floats(self, reader: TensorReader, first: int, last: int) -> Tensor:
        """Rows of the numbers that are meant, float32 `[last - first, inputs]`."""
        inputs = self.shape[1]
        spread = self.scales(reader, first, last).repeat_interleave(self.group, dim=1)[:, :inputs]
        return self.integers(reader, first, last).float() * spread

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        raise NotImplementedError

    def integers(self, reader: TensorReader, first: int, last: int) -> Tensor:
        """Rows of int8 `[last - first, inputs]`."""
        raise NotImplementedError

    def scales(self, reader: TensorReader, first: int, last: int) -> Tensor:
        """Their scales, float32 `[last - first, groups]`."""
        raise NotImplementedError

    def offsets(self, reader: TensorReader, first: int, last: int) -> Tensor:
        """None, for a projection that is fused with one that has them: zeros, float32 `[last - first, groups]`."""
        return torch.zeros(last - first, -(-self.shape[1] // self.group))

    def rows(self, reader: TensorReader, name: str, first: int, last: int) -> Tensor:
        """Rows of a stored tensor."""
        tensor = self.tensors[name]
        return reader.region(tensor, tensor.shape[1], slice(0, tensor.shape[1]), first, last)


class _Table(_Matrix):
    """bitsandbytes in 4 bits: no integers."""

    def __init__(self, layout: TableLayout, tensors: _Tensors) -> None:
        super().__init__(layout, tensors, layout.shape)
        self._table, outputs, inputs = layout, *layout.shape
        codes = tensors["weight"]
        self._codes = replace(codes, kind="U8", shape=(codes.nbytes, 1))  # which may be called floats (quant_storage)
        blocks = -(-outputs * inputs // layout.block)
        wanted = {"weight.absmax": ("U8" if layout.nested_block else "F32", blocks), "weight.quant_map": ("F32", 16)}
        if layout.nested_block:
            nested = -(-blocks // layout.nested_block)
            wanted |= {"weight.nested_absmax": ("F32", nested), "weight.nested_quant_map": ("F32", 256)}
        if 2 * codes.nbytes != outputs * inputs + outputs * inputs % 2:
            raise CheckpointError(f"{codes.name}: {codes.nbytes} bytes are not {outputs} x {inputs} numbers of 4 bits")
        for name, (kind, count) in wanted.items():
            if tensors[name].kind != kind or tensors[name].shape != (count,):
                found = f"{tensors[name].kind} {list(tensors[name].shape)}"
                raise CheckpointError(f"{tensors[name].name}: expected {kind} [{count}], found {found}")

    def floats(self, reader: TensorReader, first: int, last: int) -> Tensor:
        inputs, block = self.shape[1], self._table.block
        begin, end = first * inputs, last * inputs
        pairs = reader.region(self._codes, 1, slice(0, 1), begin // 2, -(-end // 2))[:, 0]
        codes = torch.stack((pairs >> 4, pairs & 15), dim=1).flatten()[begin % 2 : begin % 2 + end - begin]
        scales = self._absmax(reader, begin // block, -(-end // block))
        spread = scales.repeat_interleave(block)[begin % block : begin % block + end - begin]
        return (self._whole(reader, "weight.quant_map")[codes.long()] * spread).view(last - first, inputs)

    def _absmax(self, reader: TensorReader, first: int, last: int) -> Tensor:
        """Return the scales of blocks."""
        stored = reader.region(self.tensors["weight.absmax"], 1, slice(0, 1), first, last)[:, 0]
        if not self._table.nested_block:
            return stored
        nested = self._whole(reader, "weight.nested_absmax")[torch.arange(first, last) // self._table.nested_block]
        return self._whole(reader, "weight.nested_quant_map")[stored.long()] * nested + self._table.nested_offset

    def _whole(self, reader: TensorReader, name: str) -> Tensor:
        return reader.region(self.tensors[name], 1, slice(0, 1), 0, self.tensors[name].shape[0])[:, 0]


class _Int8Rows(_Matrix):
    """LLM.int8()."""

    def __init__(self, layout: Int8RowsLayout, tensors: _Tensors) -> None:
        weight, largest = tensors["weight"], tensors["SCB"]
        if weight.kind != "I8" or len(weight.shape) != 2 or largest.kind != "F32" or largest.shape != weight.shape[:1]:
            told = f"{weight.kind} {list(weight.shape)} with {largest.kind} {list(largest.shape)}"
            raise CheckpointError(f"{weight.name}: expected int8 rows with a float32 for each, found {told}")
        super().__init__(layout, tensors, weight.shape)

    @property
    def group(self) -> int:
        return self.shape[1]

    def integers(self, reader: TensorReader, first: int, last: int) -> Tensor:
        return self.rows(reader, "weight", first, last)

    def scales(self, reader: TensorReader, first: int, last: int) -> Tensor:
        return reader.region(self.tensors["SCB"], 1, slice(0, 1), first, last) / 127.0


class _E2M1(_Matrix):
    """MXFP4 and NVFP4: integers are twice the numbers."""

    def __init__(self, layout: E2M1Layout, tensors: _Tensors) -> None:
        packed, scale, self._group = tensors["weight_packed"], tensors["weight_scale"], layout.group
        outputs, inputs = (packed.shape[0], 2 * packed.shape[1]) if len(packed.shape) == 2 else (0, 0)
        kind = "U8" if layout.is_exact else "F8_E4M3"
        whole = tensors.get("weight_global_scale")
        fits = outputs > 0 and scale.shape == (outputs, -(-inputs // layout.group))
        if packed.kind != "U8" or scale.kind != kind or not fits:
            told = f"{packed.kind} {list(packed.shape)} with {scale.kind} {list(scale.shape)}"
            raise CheckpointError(
                f"{packed.name}: expected bytes with a scale for {layout.group} numbers, found {told}"
            )
        if whole is not None and (whole.kind != "F32" or whole.shape not in ((), (1,))):
            raise CheckpointError(f"{whole.name}: expected one float32, found {whole.kind} {list(whole.shape)}")
        super().__init__(layout, tensors, (outputs, inputs))

    @property
    def group(self) -> int:
        return self._group

    def integers(self, reader: TensorReader, first: int, last: int) -> Tensor:
        pairs = self.rows(reader, "weight_packed", first, last)
        codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
        twice = torch.tensor(_TWICE_E2M1, dtype=torch.int8)
        return torch.cat((twice, -twice))[codes.long()]

    def scales(self, reader: TensorReader, first: int, last: int) -> Tensor:
        stored = self.rows(reader, "weight_scale", first, last)
        if "weight_global_scale" not in self.tensors:
            return torch.tensor(_HALF_E8M0)[stored.long()]
        whole = reader.region(self.tensors["weight_global_scale"], 1, slice(0, 1), 0, 1)
        return stored.float() / whole * 0.5


_MATRICES: Mapping[type[CodedLayout], Callable[..., _Matrix]] = {
    TableLayout: _Table,
    Int8RowsLayout: _Int8Rows,
    E2M1Layout: _E2M1,
}
