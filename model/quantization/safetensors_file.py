"""Writes a safetensors file whose names, formats and shapes are known before its data."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from triptych.model.config.formats import STORED_BYTES
from triptych.model.errors import ConfigError

_ALIGNED = 8  # bytes that tensors begin at a multiple of


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor that is to be written."""

    name: str
    kind: str  # safetensors' name of the dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Raises `ConfigError` for a dtype that is not known."""
        if self.kind not in STORED_BYTES:
            raise ConfigError(f"{self.name}: numbers of dtype {self.kind} cannot be copied")
        return math.prod(self.shape) * STORED_BYTES[self.kind]


class SafetensorsFile:
    """A new file, in which bytes of any tensor can be written in any order; a context manager.

    Wide numbers come first, so that each tensor begins at a multiple of its numbers' size.
    """

    def __init__(self, path: Path, tensors: Iterable[Described]) -> None:
        ordered = sorted(tensors, key=lambda tensor: (-STORED_BYTES.get(tensor.kind, 0), tensor.name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        places, end = dict[str, tuple[int, int]](), 0
        for tensor in ordered:
            places[tensor.name] = (end, end + tensor.nbytes)
            end += tensor.nbytes
            header[tensor.name] = {
                "dtype": tensor.kind,
                "shape": list(tensor.shape),
                "data_offsets": list(places[tensor.name]),
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNED)
        begin = 8 + len(text)
        self._places: Mapping[str, tuple[int, int]] = {
            name: (begin + first, begin + last) for name, (first, last) in places.items()
        }
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.truncate(self._file, begin + end)
        _write_all(self._file, memoryview(len(text).to_bytes(8, "little") + text), 0)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                os.fsync(self._file)
        finally:
            os.close(self._file)

    def write(self, name: str, first: int, data: memoryview) -> None:
        """Write bytes of the tensor `name` from its byte `first` on."""
        begin, end = self._places[name]
        assert begin + first + data.nbytes <= end, name
        _write_all(self._file, data.cast("B"), begin + first)


def _write_all(file: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)
