"""Stored tensors, read from files of safetensors or of `torch.save` a few rows at a time.

Nothing is mapped into memory: what is read goes into one buffer, which the next read overwrites, so a process holds
what it keeps and a few megabytes. The `safetensors` package checks the headers; what is read here is what they say.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.checkpoint.state_dict import read_state_dict
from model.errors import CheckpointError
from model.families.table.rules import Shape

BUFFER_BYTES = 16 << 20  # what is read at a time; a single row may be more
_MIN_RUN = 4096  # bytes of neighbouring columns that are worth a read of their own: a page of the file
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies."""

    path: Path
    name: str
    kind: str  # as safetensors calls the dtype
    shape: Shape
    offset: int  # of its first byte in the file
    strides: Shape | None = None  # in elements, where rows do not follow each other without gaps

    @property
    def holds_numbers(self) -> bool:
        """Whether they are floating-point, of a kind that can be read."""
        return self.kind in _DTYPES

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.kind]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_headers(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of all files by name, from their headers; raises `CheckpointError` for a file that is not valid."""
    return {tensor.name: tensor for path in paths for tensor in _header(path)}


def _header(path: Path) -> Iterator[StoredTensor]:
    if path.suffix == ".bin":
        for saved in read_state_dict(path):
            strides = None if saved.is_contiguous else saved.strides
            yield StoredTensor(path, saved.name, saved.kind, saved.shape, saved.offset, strides)
        return
    try:
        with safe_open(path, framework="numpy"):  # every offset is then within the file, and has its tensor's size
            pass
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} is not a valid safetensors file: {error}") from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            begin = 8 + length + entry["data_offsets"][0]
            yield StoredTensor(path, name, entry["dtype"], tuple(entry["shape"]), begin)


class TensorReader:
    """Reads stored tensors; a context, within which files stay open."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
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

    def rows(self, name: str, width: int, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """The rows `[first, last)` of a tensor seen as `[*, width]`, in pieces: first row, `[count, width]`.

        What is yielded is valid until the next is asked for.
        """
        stored = self._tensors[name]
        if stored.strides is not None:
            yield first, self._gathered(stored, width, first, last)
            return
        row_bytes = width * stored.dtype.itemsize
        step = max(1, BUFFER_BYTES // max(1, row_bytes))
        for begin in range(first, last, step):
            end = min(begin + step, last)
            data = self._room((end - begin) * row_bytes)
            self._read(stored, begin * row_bytes, data)
            yield begin, data.view(stored.dtype).view(end - begin, width)

    def columns(self, name: str, width: int, wanted: slice, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """As `rows`, of neighbouring columns alone; the others are not read unless that would save nothing."""
        size = self._tensors[name].dtype.itemsize
        run = (wanted.stop - wanted.start) * size
        if run < _MIN_RUN or run == width * size or self._tensors[name].strides is not None:
            yield from ((begin, rows[:, wanted]) for begin, rows in self.rows(name, width, first, last))
            return
        step = max(1, BUFFER_BYTES // run)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            data = self._room((end - begin) * run).view(end - begin, run)
            for row, line in enumerate(data, begin):
                self._read(self._tensors[name], (row * width + wanted.start) * size, line)
            yield begin, data.view(self._tensors[name].dtype)

    def region(self, name: str, width: int, wanted: slice, first: int, last: int) -> Tensor:
        """Columns of rows in memory of their own, `[last - first, columns]`."""
        found = torch.empty(last - first, wanted.stop - wanted.start, dtype=self._tensors[name].dtype)
        for begin, rows in self.columns(name, width, wanted, first, last):
            found[begin - first : begin - first + len(rows)] = rows
        return found

    def _gathered(self, stored: StoredTensor, width: int, first: int, last: int) -> Tensor:
        """Rows of a tensor that was saved transposed, or as a part of another: all of it is read at once."""
        assert stored.strides is not None
        extent = 1 + sum((size - 1) * stride for size, stride in zip(stored.shape, stored.strides, strict=True))
        data = self._room(extent * stored.dtype.itemsize)
        self._read(stored, 0, data)
        return data.view(stored.dtype).as_strided(stored.shape, stored.strides).reshape(-1, width)[first:last]

    def _room(self, size: int) -> Tensor:
        if len(self._buffer) < size:
            self._buffer = torch.empty(max(size, BUFFER_BYTES), dtype=torch.uint8)
        return self._buffer[:size]

    def _read(self, stored: StoredTensor, begin: int, into: Tensor) -> None:
        """Fill bytes with the tensor's from `begin` on; raises `CheckpointError` where the file ends before."""
        file = self._files.get(stored.path)
        if file is None:
            file = self._files[stored.path] = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
        view, done = memoryview(into.numpy().data), 0
        while done < len(view):
            count = os.preadv(file, [view[done:]], stored.offset + begin + done)
            if count == 0:
                raise CheckpointError(f"{stored.path.name} became shorter while {stored.name} was read")
            done += count
