"""Decodes the tensors of a storage (`triptych.model.config.formats`) from matrices that are stored in any other way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from triptych.model.checkpoint.tensor_files import DecodedTensor, Decoder, TensorReader
from triptych.model.config.formats import Storage
from triptych.model.families.table.rules import Shape


class StoredMatrix(Protocol):
    """A projection's matrix, whose stored tensors fit each other: rows are its outputs."""

    @property
    def layout(self) -> object:
        """How it is stored: what the numbers depend on apart from the bytes."""

    @property
    def shape(self) -> Shape:
        """Outputs and inputs."""

    @property
    def group(self) -> int:
        """Inputs that share a scale."""

    def integers(self, reader: TensorReader, first: int, last: int) -> Tensor:
        """Rows of integers around zero, int8 `[last - first, inputs]`."""

    def scales(self, reader: TensorReader, first: int, last: int) -> Tensor:
        """Their scales, float32 `[last - first, groups]`."""

    def offsets(self, reader: TensorReader, first: int, last: int) -> Tensor:
        """Return the offsets that are added to products, float32 `[last - first, groups]`."""

    def floats(self, reader: TensorReader, first: int, last: int) -> Tensor:
        """Rows of the numbers that are meant, float32 `[last - first, inputs]`."""


def decoded(stem: str, matrix: StoredMatrix, storage: Storage, *, least_rows: int = 1) -> Iterator[DecodedTensor]:
    """Yield the tensors of a storage that a matrix is read as; `least_rows` of it should be read at once."""
    outputs, inputs = matrix.shape

    def tensor(name: str, kind: str, columns: int, decoder: Decoder, least: int = 1) -> DecodedTensor:
        return DecodedTensor(
            name=f"{stem}.{name}", kind=kind, shape=(outputs, columns), decoder=decoder, least_rows=least
        )

    if storage.scale is None:
        yield tensor("weight", "F32", inputs, Floats(matrix), least_rows)
        return
    yield tensor("weight", "I8", inputs, Integers(matrix), least_rows)
    yield tensor(storage.scale, "F32", storage.scales_of(inputs), Scales(matrix, storage))
    if storage.offset is not None:
        yield tensor(storage.offset, "F32", storage.scales_of(inputs), Offsets(matrix, storage))


@dataclass(frozen=True, slots=True, repr=False)
class _Decoder:
    matrix: StoredMatrix

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.matrix.layout})"


class Floats(_Decoder):
    """Decodes rows of the numbers that are meant."""

    def rows(self, reader: TensorReader, first: int, last: int) -> Tensor:
        return self.matrix.floats(reader, first, last)


class Integers(_Decoder):
    """Decodes rows of integers."""

    def rows(self, reader: TensorReader, first: int, last: int) -> Tensor:
        return self.matrix.integers(reader, first, last)


@dataclass(frozen=True, slots=True, repr=False)
class Scales(_Decoder):
    """Decodes rows of scales, each as often as its group has groups of the storage."""

    storage: Storage

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.matrix.layout}, {self.storage.block})"

    def rows(self, reader: TensorReader, first: int, last: int) -> Tensor:
        return self._spread(self.matrix.scales(reader, first, last))

    def _spread(self, factors: Tensor) -> Tensor:
        begins = torch.arange(0, self.matrix.shape[1], self.storage.block[1])
        return factors[:, begins // self.matrix.group]


class Offsets(Scales):
    """Decodes rows of offsets, as `Scales` does those of scales."""

    def rows(self, reader: TensorReader, first: int, last: int) -> Tensor:
        return self._spread(self.matrix.offsets(reader, first, last))
