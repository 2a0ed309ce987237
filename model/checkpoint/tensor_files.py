"""Reads stored tensors from safetensors or `torch.save` files, some rows at a time.

What a tool packed (integers of 4 bits in words of 32) is a `DecodedTensor`: its rows are computed from stored tensors
as they are read, so a reader needs to know nothing of packing.

Files are not mapped into memory: each read goes into one buffer, which the next read overwrites, so reading takes a few
megabytes of memory. The `safetensors` package validates the headers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from triptych.model.checkpoint.state_dict import read_state_dict
from triptych.model.config.formats import NumberKind
from triptych.model.errors import CheckpointError
from triptych.model.families.table.rules import Shape

BUFFER_BYTES = 16 << 20  # of a read; a single row may be larger
_MIN_RUN = 4096  # bytes of adjacent columns that are read separately: a page of the file
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """A tensor of a checkpoint that can be read: its name and its format."""

    name: str
    kind: str  # safetensors' name of the dtype
    shape: Shape

    def holds(self, numbers: NumberKind | None) -> bool:
        """Whether the tensor has these numbers, in a dtype that can be read; None: floating-point numbers."""
        if numbers is None:
            return self.kind in _DTYPES and self.dtype.is_floating_point
        return self.kind in _DTYPES and str(self.dtype) == f"torch.{numbers}"

    @property
    def dtype(self) -> torch.dtype:
        """Raises `CheckpointError` for one that is not read."""
        if self.kind not in _DTYPES:
            raise CheckpointError(f"{self.name}: numbers of the dtype {self.kind} are not read")
        return _DTYPES[self.kind]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor(TensorSource):
    """A tensor's place in a file."""

    path: Path
    offset: int  # of its first byte in the file
    strides: Shape | None = None  # in elements; None: contiguous


class Decoder(Protocol):
    """Computes the rows of a tensor of what is stored. Its `repr` tells how: packed weights are found by it."""

    def rows(self, reader: TensorReader, first: int, last: int) -> Tensor:
        """Return rows `[first, last)` as `[last - first, width]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedTensor(TensorSource):
    """A tensor that is stored in another form."""

    decoder: Decoder
    least_rows: int = 1  # that are decoded at once, where fewer would be read in vain


def read_headers(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of all files by name, from their headers; raises `CheckpointError` for an invalid file."""
    return {tensor.name: tensor for path in paths for tensor in _header(path)}


def _header(path: Path) -> Iterator[StoredTensor]:
    if path.suffix in (".bin", ".pt"):
        for saved in read_state_dict(path):
            strides = None if saved.is_contiguous else saved.strides
            yield StoredTensor(
                path=path, name=saved.name, kind=saved.kind, shape=saved.shape, offset=saved.offset, strides=strides
            )
        return
    try:
        with safe_open(path, framework="numpy"):  # validates that offsets match the file and the tensors' sizes
            pass
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} is not a valid safetensors file: {error}") from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            begin = 8 + length + entry["data_offsets"][0]
            yield StoredTensor(path=path, name=name, kind=entry["dtype"], shape=tuple(entry["shape"]), offset=begin)


class TensorReader:
    """Reads stored tensors; a context manager, within which files stay open."""

    def __init__(self, tensors: Mapping[str, TensorSource]) -> None:
        self._tensors = tensors
        self._files: dict[Path, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def rows(self, tensor: str | TensorSource, width: int, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows `[first, last)` of a tensor viewed as `[*, width]` in chunks: first row, `[count, width]`.

        The tensor is one of the reader's by its name, or any other, as what decodes tensors reads. A chunk is valid
        until the next one.
        """
        source = self._source(tensor)
        row_bytes = width * source.dtype.itemsize
        step = max(1, BUFFER_BYTES // max(1, row_bytes))
        if isinstance(source, DecodedTensor):
            most = max(step, source.least_rows)
            for begin in range(first, last, most):
                decoded = source.decoder.rows(self, begin, min(begin + most, last))
                for at in range(0, len(decoded), step):
                    yield begin + at, decoded[at : at + step]
            return
        assert isinstance(source, StoredTensor)
        if source.strides is not None:
            yield first, self._read_strided(source, width, first, last)
            return
        for begin in range(first, last, step):
            end = min(begin + step, last)
            data = self._reserve((end - begin) * row_bytes)
            self._read(source, begin * row_bytes, data)
            yield begin, data.view(source.dtype).view(end - begin, width)

    def columns(
        self, tensor: str | TensorSource, width: int, wanted: slice, first: int, last: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield adjacent columns of rows as `rows` does; other columns are read only where skipping saves nothing."""
        source = self._source(tensor)
        size = source.dtype.itemsize
        run = (wanted.stop - wanted.start) * size
        skips = isinstance(source, StoredTensor) and source.strides is None and _MIN_RUN <= run != width * size
        if not skips:
            yield from ((begin, rows[:, wanted]) for begin, rows in self.rows(source, width, first, last))
            return
        assert isinstance(source, StoredTensor)
        step = max(1, BUFFER_BYTES // run)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            data = self._reserve((end - begin) * run).view(end - begin, run)
            for row, line in enumerate(data, begin):
                self._read(source, (row * width + wanted.start) * size, line)
            yield begin, data.view(source.dtype)

    def region(self, tensor: str | TensorSource, width: int, wanted: slice, first: int, last: int) -> Tensor:
        """Return columns of rows as a new tensor `[last - first, columns]`."""
        source = self._source(tensor)
        region = torch.empty(last - first, wanted.stop - wanted.start, dtype=source.dtype)
        for begin, rows in self.columns(source, width, wanted, first, last):
            region[begin - first : begin - first + len(rows)] = rows
        return region

    def _source(self, tensor: str | TensorSource) -> TensorSource:
        return self._tensors[tensor] if isinstance(tensor, str) else tensor

    def _read_strided(self, stored: StoredTensor, width: int, first: int, last: int) -> Tensor:
        """Return rows of a tensor that was saved transposed or as a view of another; reads all of them at once."""
        assert stored.strides is not None
        if len(stored.shape) == 2 and width == stored.shape[1]:  # no more than these rows
            at = stored.offset + first * stored.strides[0] * stored.dtype.itemsize
            stored = replace(stored, shape=(last - first, width), offset=at)
            first, last = 0, last - first
        assert stored.strides is not None
        extent = 1 + sum((size - 1) * stride for size, stride in zip(stored.shape, stored.strides, strict=True))
        data = self._reserve(extent * stored.dtype.itemsize)
        self._read(stored, 0, data)
        return data.view(stored.dtype).as_strided(stored.shape, stored.strides).reshape(-1, width)[first:last]

    def _reserve(self, size: int) -> Tensor:
        """Return `size` bytes of the buffer, which grows if necessary."""
        if len(self._buffer) < size:
            self._buffer = torch.empty(max(size, BUFFER_BYTES), dtype=torch.uint8)
        return self._buffer[:size]

    def _read(self, stored: StoredTensor, begin: int, into: Tensor) -> None:
        """Fill `into` with the tensor's bytes from `begin` on; raises `CheckpointError` if the file is too short."""
        file = self._files.get(stored.path)
        if file is None:
            file = self._files[stored.path] = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
        view, done = memoryview(into.numpy().data), 0
        while done < len(view):
            count = os.preadv(file, [view[done:]], stored.offset + begin + done)
            if count == 0:
                raise CheckpointError(f"{stored.path.name} became shorter while {stored.name} was read")
            done += count


def bytes_in_flight(tensor: TensorSource) -> int:
    """Return the bytes that a tensor takes while it is read some rows at a time."""
    if not isinstance(tensor, DecodedTensor):
        return BUFFER_BYTES
    least = min(tensor.least_rows, tensor.shape[0]) * tensor.nbytes // max(1, tensor.shape[0])
    return BUFFER_BYTES + 3 * max(BUFFER_BYTES, least)  # as it is stored, unpacked, and as it is handed on
