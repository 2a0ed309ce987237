"""Reads packed integers, their scales and zero points as the tensors of a storage (`triptych.model.config.formats`).

weight = (integer - zero point) * scale becomes integer * scale + offset with integers around zero. Both are exact in
float32 where scales have 16 bits, as published ones have. Rows are unpacked as they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.model.checkpoint.coded_decoders import coded
from triptych.model.checkpoint.coded_layouts import CodedLayout
from triptych.model.checkpoint.layouts import Along, IntegerLayout, Packed
from triptych.model.checkpoint.matrix_decoders import decoded
from triptych.model.checkpoint.tensor_files import DecodedTensor, StoredTensor, TensorReader, TensorSource
from triptych.model.config.formats import Storage
from triptych.model.errors import CheckpointError
from triptych.model.families.table.rules import Shape

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of its eight numbers a word has, from the lowest bits on
_LEAST_LINE = 1024  # words of a line that are read at once where a tensor is transposed
_FEW_WORDS = 1 << 17  # that are unpacked at once
_FEW_ROWS = 32  # that are multiplied at once, within the caches
_FLOATS = ("F16", "BF16", "F32")


def unpacked(stored: Mapping[str, StoredTensor], packed: Mapping[str, Packed]) -> dict[str, TensorSource]:
    """Return the tensors of a checkpoint as they are read; raises `CheckpointError` where what is packed does not fit.

    `packed` says how, by projections' stored names.
    """
    tensors: dict[str, TensorSource] = dict(stored)
    for stem, one in packed.items():
        for name in one.layout.names:
            tensors.pop(f"{stem}.{name}", None)
        if isinstance(one.layout, CodedLayout):
            found = coded(stem, one.layout, one.storage, stored)
        else:
            found = _decoded(stem, one.layout, one.storage, stored)
        tensors |= {tensor.name: tensor for tensor in found}
    return tensors


def _decoded(
    stem: str, layout: IntegerLayout, storage: Storage, stored: Mapping[str, StoredTensor]
) -> Iterator[DecodedTensor]:
    def find(name: str | None, kinds: tuple[str, ...]) -> StoredTensor | None:
        if name is None:
            return None
        found = stored.get(f"{stem}.{name}")
        if found is None or found.kind not in kinds or len(found.shape) != (1 if name == layout.order else 2):
            told = "none" if found is None else f"{found.kind} {list(found.shape)}"
            raise CheckpointError(f"{stem}.{name}: expected a tensor of {' or '.join(kinds)}, found {told}")
        return found

    words = ("I8",) if layout.words is None else ("I32",)
    weight, scale = find(layout.weight, words), find(layout.scale, _FLOATS)
    assert weight is not None and scale is not None
    zeros = find(layout.zeros, ("I8",) if layout.zero_words is None else ("I32",))
    matrix = _Matrix(layout, weight, scale, zeros, find(layout.order, ("I32", "I64")))
    matrix.check(stem)
    outputs = matrix.shape[0]
    least = min(outputs, _LEAST_LINE * (layout.per_word if layout.words is Along.OUTPUTS else 1))
    yield from decoded(stem, matrix, storage, least_rows=least if layout.inputs_first else 1)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The stored tensors of one projection."""

    layout: IntegerLayout
    weight: StoredTensor
    scale: StoredTensor
    zeros: StoredTensor | None
    order: StoredTensor | None

    @property
    def shape(self) -> Shape:
        """Outputs and inputs."""
        layout, shape = self.layout, self.weight.shape
        outputs, inputs = reversed(shape) if layout.inputs_first else shape
        outputs *= layout.per_word if layout.words is Along.OUTPUTS else 1
        inputs *= layout.per_word if layout.words is Along.INPUTS else 1
        return outputs, layout.inputs if inputs - layout.per_word < layout.inputs < inputs else inputs

    @property
    def group(self) -> int:
        return self.layout.group or self.shape[1]

    @property
    def groups(self) -> int:
        return -(-self.shape[1] // self.group)

    def check(self, stem: str) -> None:
        """Raise `CheckpointError` unless scales, zero points and order fit the integers."""
        layout, (outputs, inputs), groups = self.layout, self.shape, self.groups
        per_word = layout.per_word
        wanted: dict[str, tuple[StoredTensor | None, Shape]] = {layout.scale: (self.scale, (outputs, groups))}
        zeros = {
            None: (outputs, groups),
            Along.OUTPUTS: (-(-outputs // per_word), groups),
            Along.INPUTS: (outputs, -(-groups // per_word)),
        }[layout.zero_words]
        wanted[layout.zeros or ""] = self.zeros, zeros
        wanted[layout.order or ""] = self.order, (inputs,)
        for name, (tensor, shape) in wanted.items():
            shape = shape[::-1] if layout.inputs_first else shape
            if tensor is None or tensor.shape == shape:
                continue
            if layout.padded_groups and tensor.shape[0] == shape[0] and tensor.shape[1] >= shape[1]:
                continue
            raise CheckpointError(
                f"{stem}.{name}: found {list(tensor.shape)}, expected {list(shape)} with {layout.weight} "
                f"{list(self.weight.shape)} of {layout.bits} bits in groups of {layout.group or inputs}"
            )

    def integers(self, reader: TensorReader, first: int, last: int) -> Tensor:
        """Return rows of integers around zero, int8 `[last - first, inputs]`."""
        layout, width = self.layout, self.weight.shape[1]
        if not layout.inputs_first:
            words = reader.region(self.weight, width, slice(0, width), first, last)
            if layout.words is None:
                return self._checked(words)
            return _around_zero(_numbers(words, layout), layout)[:, : self.shape[1]]
        below = layout.words is Along.OUTPUTS
        columns, begins, inputs = slice(first, last), first, layout.per_word
        if below:
            columns, inputs = slice(first // layout.per_word, -(-last // layout.per_word)), 1
            begins = columns.start * layout.per_word
        found = torch.empty(last - first, self.shape[1], dtype=torch.int8)
        few = max(1, _FEW_WORDS // (columns.stop - columns.start))
        for begin, many in reader.columns(self.weight, width, columns, 0, self.weight.shape[0]):
            for row, words in enumerate(many.split(few)):
                numbers = _around_zero((_numbers_below if below else _numbers)(words.t(), layout), layout)
                at = (begin + row * few) * inputs
                found[:, at : at + numbers.shape[1]] = numbers[first - begins : last - begins]
        return found

    def _checked(self, integers: Tensor) -> Tensor:
        """Return the integers, checked to fit the layout's bits; bytes may hold larger ones, which would be cut off."""
        midst = self.layout.midst
        if self.layout.bits < 8 and len(integers) and not -midst <= int(integers.min()) <= int(integers.max()) < midst:
            found = f"integers from {int(integers.min())} to {int(integers.max())}"
            raise CheckpointError(f"{self.weight.name}: found {found}, expected {self.layout.bits} bits")
        return integers

    def scales(self, reader: TensorReader, first: int, last: int) -> Tensor:
        """Return the scales of rows, float32 `[last - first, groups]`."""
        return self._of_rows(reader, self.scale, first, last)[:, : self.groups].float()

    def offsets(self, reader: TensorReader, first: int, last: int) -> Tensor:
        """Return what is added to the products of rows, float32 `[last - first, groups]`."""
        scales, layout = self.scales(reader, first, last), self.layout
        if self.zeros is None:
            return torch.zeros_like(scales)
        if layout.zero_words is None:
            return -scales * self._of_rows(reader, self.zeros, first, last)
        if layout.zero_words is Along.INPUTS:
            zeros = _numbers(self._of_rows(reader, self.zeros, first, last), layout)[:, : self.groups]
        else:
            begin, end = first // layout.per_word, -(-last // layout.per_word)
            words = self._of_rows(reader, self.zeros, begin, end)  # [words, groups]
            begins = begin * layout.per_word
            zeros = _numbers_below(words, layout)[first - begins : last - begins]
        most = (1 << layout.bits) - 1
        return scales * (layout.midst - ((zeros.int() + layout.zeros_less) & most))

    def _of_rows(self, reader: TensorReader, tensor: StoredTensor, first: int, last: int) -> Tensor:
        if self.layout.inputs_first:
            return reader.region(tensor, tensor.shape[1], slice(first, last), 0, tensor.shape[0]).t()
        return reader.region(tensor, tensor.shape[1], slice(0, tensor.shape[1]), first, last)

    def floats(self, reader: TensorReader, first: int, last: int) -> Tensor:
        """Return rows of the numbers that integers stand for, float32 `[last - first, inputs]`."""
        groups = self._groups_of_inputs(reader)
        integers, scales = self.integers(reader, first, last), self.scales(reader, first, last)
        offsets = None if self.zeros is None else self.offsets(reader, first, last)
        found = torch.empty(integers.shape)
        for begin in range(0, len(found), _FEW_ROWS):
            few = slice(begin, begin + _FEW_ROWS)
            torch.mul(integers[few], scales[few].index_select(1, groups), out=found[few])
            if offsets is not None:
                found[few] += offsets[few].index_select(1, groups)
        return found

    def _groups_of_inputs(self, reader: TensorReader) -> Tensor:
        """Return the group of each input."""
        inputs = self.shape[1]
        if self.order is None:
            return torch.arange(inputs) // self.group
        order = reader.region(self.order, 1, slice(0, 1), 0, inputs)[:, 0].long()
        if int(order.min()) < 0 or int(order.max()) >= self.groups:
            raise CheckpointError(f"{self.order.name} names groups beyond the {self.groups} that there are")
        return order


def _numbers(words: Tensor, layout: IntegerLayout) -> Tensor:
    """Return the unsigned numbers of words, uint8 `[rows, numbers]`, of int32 `[rows, words]`."""
    data = words.reshape(-1).view(torch.uint8).view(len(words), -1)
    if layout.bits == 4:  # each byte becomes the two of a number of 16 bits
        pairs = data.to(torch.int16)
        pairs |= pairs << 4
        pairs &= 0x0F0F
        data = pairs.view(torch.uint8)
    return data


def _numbers_below(words: Tensor, layout: IntegerLayout) -> Tensor:
    """Return numbers as `_numbers` does, below each other: `[numbers, columns]` of `[words, columns]`."""
    data = words.reshape(-1).view(torch.uint8).view(*words.shape, 4).transpose(1, 2)  # [words, bytes, columns]
    if layout.bits == 8:
        return data.flatten(0, 1)
    places = _AWQ_ORDER if layout.interleaved else range(2 * data.shape[1])
    data, found = data.contiguous(), torch.empty(len(data), len(places), data.shape[2], dtype=torch.uint8)
    for place, to in enumerate(places):
        byte = data[:, place // 2]
        found[:, to] = byte >> 4 if place % 2 else byte & 15
    return found.flatten(0, 1)


def _around_zero(numbers: Tensor, layout: IntegerLayout) -> Tensor:
    """Return unsigned numbers less what stands for zero, as int8; in place."""
    numbers = numbers.view(torch.int8)
    return numbers.bitwise_xor_(-128) if layout.bits == 8 else numbers.sub_(layout.midst)
