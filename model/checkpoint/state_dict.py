"""Tensors of files that `torch.save` wrote, found without unpickling anything.

A pickle is a program, and the usual loader runs it. This one reads the few instructions that state dicts use. It knows
five functions by name and calls none: a tensor becomes the description of where its numbers lie in the file. Everything
else is a `CheckpointError`. Nothing that the file names is imported, called or written. Work and memory are bounded
before they are spent (`MAX_PROGRAM_BYTES`, `MAX_INSTRUCTIONS`).

Both layouts of such files are read. Since PyTorch 1.6 they are uncompressed zip archives: `NAME/data.pkl` is the
program, `NAME/data/KEY` the storages. Before, there were five pickles one after the other (magic number, version,
system, state dict, keys of the storages) and then the storages, each after its number of elements.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from triptych.model.checkpoint.pickle_program import Malformed, Program, Storage, TensorView
from triptych.model.config.formats import STORED_BYTES
from triptych.model.errors import CheckpointError
from triptych.model.families.table.rules import Shape

MAX_PROGRAM_BYTES = 64 << 20  # of the pickle without its tensors, which takes some 100 bytes a tensor
MAX_DIRECTORY_BYTES = 4 << 20  # of an archive's directory, which takes some 100 bytes a tensor too
# Modules with a matrix that may be tied to the embeddings, and stacks with a table that may be tied to a shared one.
_HEAD = re.compile(
    r"(lm_head|cls|predictions|lm_predictions|generator_lm_head|vocab_projector|lm_loss|embed_out|proj_out)\."
)
_STACK_TABLE = re.compile(r"(.*\.)?(encoder|decoder)\.embed_tokens\.")
_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C  # the first pickle of the older layout
_LEGACY_VERSION = 1001
_ZIP_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, length of the name, length of the extra field


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A stored tensor: element `i, j, ...` lies at `offset + item_bytes * (i * strides[0] + ...)`."""

    name: str
    kind: str  # as safetensors calls it
    shape: Shape
    strides: Shape  # in elements
    offset: int  # of the first element, in bytes from the beginning of the file

    @property
    def is_contiguous(self) -> bool:
        """Whether rows follow each other without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def read_state_dict(path: Path) -> list[SavedTensor]:
    """Return the tensors of a file of `torch.save`, in the order of its state dict; raises `CheckpointError`.

    Tied tensors are one place in the file with several names; one of them is given: the embeddings' rather than a
    head's, that of a table for both stacks rather than for one, else the first.
    """
    try:
        with path.open("rb") as file:
            found = _from_zip(file) if zipfile.is_zipfile(file) else _from_legacy(file)
    except (Malformed, zipfile.BadZipFile) as error:  # is_zipfile raises the second for an archive of several disks
        raise CheckpointError(f"{path.name} is not a state dict that can be read: {error}") from None
    places: dict[object, SavedTensor] = {}
    for tensor in found:
        place = (tensor.kind, tensor.shape, tensor.strides, tensor.offset) if math.prod(tensor.shape) else tensor.name
        if place not in places or _rank(tensor) < _rank(places[place]):
            places[place] = tensor
    return list(places.values())


def _rank(tensor: SavedTensor) -> int:
    if _HEAD.match(tensor.name):
        return 3 if ".decoder." in tensor.name else 2  # whose bias is the head's own too
    return 1 if _STACK_TABLE.match(tensor.name) else 0


class _Bounded:
    """A file that reads at most a directory's bytes at once: zipfile reads as much as the file asks for."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_DIRECTORY_BYTES:
            size = MAX_DIRECTORY_BYTES + 1  # zipfile asks for the rest of a file where it expects a few bytes
        found = self._file.read(size)
        if len(found) > MAX_DIRECTORY_BYTES:
            raise Malformed(f"its zip directory has more than {MAX_DIRECTORY_BYTES} bytes")
        return found


def _from_zip(file: BinaryIO) -> list[SavedTensor]:
    try:
        archive = zipfile.ZipFile(_Bounded(file))
        entries = {entry.filename: entry for entry in archive.infolist()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, UnicodeDecodeError) as error:
        raise Malformed(f"its zip directory is damaged ({error})") from None
    programs = [name for name in entries if name.endswith("/data.pkl")]
    if len(programs) != 1:
        raise Malformed(f"expected one data.pkl in the archive, found {len(programs)}")
    prefix = programs[0].removesuffix("data.pkl")
    size = file.seek(0, 2)

    def span(name: str) -> tuple[int, int]:
        if name not in entries:
            raise Malformed(f"{name} is missing from the archive")
        return _entry_span(file, entries[name], size)

    def content(name: str, limit: int) -> bytes:
        begin, length = span(name)
        if length > limit:
            raise Malformed(f"{name} has {length} bytes, expected at most {limit}")
        file.seek(begin)
        return file.read(length)

    if prefix + "byteorder" in entries and content(prefix + "byteorder", 16) != b"little":
        raise Malformed("its numbers are not little-endian")
    state, _ = Program(content(programs[0], MAX_PROGRAM_BYTES)).run(0)
    return _located(state, lambda storage: span(f"{prefix}data/{storage.key}"))


def _entry_span(file: BinaryIO, entry: zipfile.ZipInfo, file_size: int) -> tuple[int, int]:
    """Return the first byte and the length of an archive's uncompressed entry."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1:
        raise Malformed(f"{entry.filename} is compressed or encrypted")
    if not 0 <= entry.header_offset < file_size:
        raise Malformed(f"{entry.filename} begins outside of the file")
    file.seek(entry.header_offset)
    header = file.read(_ZIP_LOCAL_HEADER.size)
    if len(header) < _ZIP_LOCAL_HEADER.size or not header.startswith(b"PK\x03\x04"):
        raise Malformed(f"{entry.filename} has no header in the archive")
    _, name_length, extra_length = _ZIP_LOCAL_HEADER.unpack(header)
    begin = entry.header_offset + _ZIP_LOCAL_HEADER.size + name_length + extra_length
    if begin + entry.file_size > file_size:
        raise Malformed(f"{entry.filename} ends beyond the file")
    return begin, entry.file_size


def _from_legacy(file: BinaryIO) -> list[SavedTensor]:
    size = file.seek(0, 2)
    file.seek(0)
    program = Program(file.read(min(size, MAX_PROGRAM_BYTES)))
    magic, at = program.run(0)
    if magic != _MAGIC_NUMBER:
        raise Malformed("it begins neither as a zip archive nor with PyTorch's magic number")
    version, at = program.run(at)
    system, at = program.run(at)
    if version != _LEGACY_VERSION or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise Malformed("its version or byte order is not known")
    state, at = program.run(at)
    keys, at = program.run(at)
    if not isinstance(keys, list):
        raise Malformed("the list of its storages is missing")
    kinds = {tensor.storage.key: tensor.storage for tensor in _tensors(state).values()}
    spans: dict[str, tuple[int, int]] = {}
    for key in keys:
        storage = kinds.get(key) if isinstance(key, str) else None
        if storage is None:
            raise Malformed("a storage belongs to no tensor of the state dict")
        file.seek(at)
        count = file.read(8)
        length = storage.elements * STORED_BYTES[storage.kind]
        if len(count) < 8 or int.from_bytes(count, "little") != storage.elements or at + 8 + length > size:
            raise Malformed(f"storage {key[:40]!r} is cut short")
        spans[key] = (at + 8, length)
        at += 8 + length

    def span(storage: Storage) -> tuple[int, int]:
        if storage.key not in spans:
            raise Malformed(f"storage {storage.key[:40]!r} is missing")
        return spans[storage.key]

    return _located(state, span)


def _tensors(state: object) -> dict[str, TensorView]:
    """Return the tensors of a state dict; other values (epochs, settings) are no weights and are left out."""
    if not isinstance(state, dict):
        raise Malformed(f"expected a dictionary of tensors, found {type(state).__name__.lstrip('_').lower()}")
    found = {name: value for name, value in state.items() if isinstance(value, TensorView)}
    if not all(isinstance(name, str) for name in found):
        raise Malformed("a tensor's name is not a text")
    if not found:
        raise Malformed("its dictionary holds no tensors")
    return found


def _located(state: object, span: Callable[[Storage], tuple[int, int]]) -> list[SavedTensor]:
    """Return the state dict's tensors with their places in the file, each within its storage."""
    found = []
    for name, tensor in _tensors(state).items():
        begin, length = span(tensor.storage)
        item = STORED_BYTES[tensor.kind]
        steps = zip(tensor.shape, tensor.strides, strict=True)
        last = tensor.offset + sum((size - 1) * stride for size, stride in steps)
        if math.prod(tensor.shape) and (last + 1) * item > length:
            raise Malformed(f"{name[:200]} reaches beyond its storage")
        found.append(SavedTensor(name, tensor.kind, tensor.shape, tensor.strides, begin + tensor.offset * item))
    return found
