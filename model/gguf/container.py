"""Reads the header of a GGUF file: its metadata, and where its tensors lie. Version 2 and 3, little-endian.

The layout is that of ggml's docs/gguf.md: magic, version, numbers of tensors and of metadata entries, the entries, the
tensors' descriptions, then, aligned, the tensors. A file is not trusted: every count, length and place in it is
checked against the file's size before anything is read or reserved by it, and what is wrong is named in a
`ConfigError`.

Long arrays (vocabularies) are passed over, and read when they are asked for.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from triptych.model.errors import ConfigError
from triptych.model.gguf.paths import MAGIC, SHARD
from triptych.model.gguf.types import BLOCK_TYPES, SERVED_NAMES, BlockType, reason

_VERSIONS = (2, 3)
_MAX_TENSORS, _MAX_ENTRIES, _MAXSHARDS = 1 << 20, 1 << 16, 1 << 10
_MAX_KEY, _MAX_NAME, _MAX_DIMENSIONS = 1 << 16, 1 << 10, 4
_MAX_ALIGNMENT = 1 << 20
_MAX_ELEMENTS = 1 << 24  # of an array of strings, or that is read: each takes some 50 bytes then
_MAX_STRING = 1 << 28  # bytes; a whole tokenizer.json may be one
_MAX_SHOWN = 100  # characters of a value in a message
_DEFAULT_ALIGNMENT = 32
# Metadata types by number: the format of `struct`; strings and arrays have lengths of their own.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_MIN_STRING = 8  # bytes: the length alone


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor's place: `shape` as torch has it, the dimension whose elements are adjacent last."""

    path: Path
    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, of `shape[-1]` numbers."""
        return self.shape[-1] // self.type.block * self.type.bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class _Array:
    """Where an array of metadata lies."""

    type: int
    count: int
    offset: int


@dataclass(frozen=True)
class GGUFModel:
    """The metadata and the tensors of a model: one file, or several that one was split into."""

    paths: tuple[Path, ...]
    tensors: Mapping[str, GGUFTensor]
    _scalars: Mapping[str, Any]
    _arrays: Mapping[str, _Array]

    @property
    def name(self) -> str:
        """The first file's name, for messages."""
        return self.paths[0].name

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    @property
    def dtype(self) -> str:
        """The number format of most of the numbers, for people."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            counts[tensor.type.name] = counts.get(tensor.type.name, 0) + math.prod(tensor.shape)
        name = max(counts, key=lambda one: counts[one], default="F32")
        return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(name, name)

    def __contains__(self, key: str) -> bool:
        return key in self._scalars or key in self._arrays

    def __iter__(self) -> Iterator[str]:
        """Yield the keys of all metadata."""
        yield from self._scalars
        yield from self._arrays

    def get(self, key: str, default: Any = None) -> Any:
        """Return a single value, or a short array as a list."""
        return self.array(key) if key in self._arrays else self._scalars.get(key, default)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string; raises `ConfigError` if it is something else, or missing without a default."""
        found = self._scalars.get(key, default)
        if not isinstance(found, str):
            raise ConfigError(f"{self.name}: {key} must be a string, found {shown(found)}")
        return found

    def integer(self, key: str, default: int | None = None) -> int | None:
        """Return a whole number; raises `ConfigError` if it is something else."""
        found = self._scalars.get(key, default)
        if found is not None and type(found) is not int:
            raise ConfigError(f"{self.name}: {key} must be a whole number, found {shown(found)}")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value; raises `ConfigError` if it is something else."""
        found = self._scalars.get(key, default)
        if not isinstance(found, bool):
            raise ConfigError(f"{self.name}: {key} must be true or false, found {shown(found)}")
        return found

    def array(self, key: str) -> list[Any]:
        """Return all elements of an array; [] if there is none. Raises `ConfigError`."""
        found = self._arrays.get(key)
        if found is None:
            return []
        if found.count > _MAX_ELEMENTS:
            raise ConfigError(f"{self.name}: {key} has {found.count} elements, of 2^24 at most")
        with _Header(self.paths[0]) as header:
            header.at = found.offset
            return header.elements(found.type, found.count, key)

    def numbers(self, key: str) -> GGUFTensor | None:
        """Return an array of float32 as a tensor, which its numbers are read as; None: there is no such array.

        Raises `ConfigError` if its numbers are others.
        """
        found = self._arrays.get(key)
        if found is None:
            return None
        if found.type != _FLOAT32:
            raise ConfigError(f"{self.name}: {key} must be an array of float32, found {shown(self.get(key))}")
        return GGUFTensor(self.paths[0], key, BLOCK_TYPES[0], (found.count,), found.offset)


class _Header:
    """A file's bytes from the beginning on, mapped; every read is checked against its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = 0
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size < 24:
                    raise ConfigError(f"{path.name} is no GGUF file: it has only {self.size} bytes")
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ConfigError(f"{path.name}: {error.strerror}") from None

    def __enter__(self) -> _Header:
        return self

    def __exit__(self, *raised: object) -> None:
        self._bytes.close()

    def fail(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path.name} is damaged: {what}")

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            raise self.fail(f"{what} has {count} bytes at {self.at}, beyond the end of the file at {self.size}")
        self.at += count
        return self._bytes[self.at - count : self.at]

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def string(self, what: str, limit: int = _MAX_STRING) -> str:
        length = self.number("<Q", f"the length of {what}")
        if length > limit:
            raise self.fail(f"{what} has a length of {length}, of {limit} at most")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def elements(self, kind: int, count: int, what: str) -> list[Any]:
        """Read an array, whose length is known to fit."""
        if kind == _STRING:
            return [self.string(what) for _ in range(count)]
        form = f"<{count}{_SCALARS[kind][1]}"
        return list(struct.unpack(form, self.take(struct.calcsize(form), what)))

    def array(self, what: str) -> _Array:
        """Pass over an array."""
        kind, count = self.number("<I", f"the type of {what}"), self.number("<Q", f"the length of {what}")
        if kind != _STRING and kind not in _SCALARS:
            raise self.fail(f"{what} is an array of type {kind}, which is not known or not served")
        smallest = _MIN_STRING if kind == _STRING else struct.calcsize(_SCALARS[kind])
        if count > (self.size - self.at) // smallest:
            raise self.fail(f"{what} has {count} elements, more than fit into the file")
        if kind == _STRING and count > _MAX_ELEMENTS:  # which are passed over one by one
            raise self.fail(f"{what} has {count} strings, of 2^24 at most")
        found = _Array(kind, count, self.at)
        if kind == _STRING:
            self._pass_strings(count, what)
        else:
            self.at += count * smallest
        return found

    def _pass_strings(self, count: int, what: str) -> None:
        at, unpack, data = self.at, struct.Struct("<Q").unpack_from, self._bytes
        try:
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
        except (struct.error, OverflowError):
            at = self.size + 1
        if at > self.size:
            raise self.fail(f"{what} has a string beyond the end of the file at {self.size}")
        self.at = at


def shown(value: Any) -> str:
    """Return a value of metadata for a message, cut if it is long."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value[:3]))}{', ...' if len(value) > 3 else ''}]"
    if isinstance(value, str) and len(value) > _MAX_SHOWN:
        return f"{value[:_MAX_SHOWN]!r}..."
    return repr(value)


def read_gguf(path: Path) -> GGUFModel:
    """Read the headers of a model; `path` is its only or first file. Raises `ConfigError`."""
    try:
        return _read_cached(path, _sign(path), *(_sign(other) for other in _other_parts(path) if other.is_file()))
    except OSError as error:
        raise ConfigError(f"{path.name}: {error.strerror}") from None


def _sign(path: Path) -> tuple[int, int, int]:
    """Return numbers that differ if the file is replaced."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _other_parts(path: Path) -> list[Path]:
    """Return the files of a model that follow its first one, as its name counts them."""
    shard = SHARD.fullmatch(path.name)
    if shard is None:
        return []
    count = min(int(shard["count"]), _MAXSHARDS)
    return [path.with_name(f"{shard['stem']}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]


@lru_cache(maxsize=4)  # starting a model reads its header several times
def _read_cached(path: Path, *signs: tuple[int, int, int]) -> GGUFModel:
    first = _read_file(path)
    count = first.integer("split.count", 1) or 1
    if count == 1:
        return first
    shard = SHARD.fullmatch(path.name)
    if shard is None or int(shard["number"]) != 1 or int(shard["count"]) != count or count > _MAXSHARDS:
        raise ConfigError(f"{path.name} is a part of a model in {count} files: give the one that ends in 00001-of-...")
    others = _other_parts(path)
    missing = [other.name for other in others if not other.is_file()]
    if missing:
        raise ConfigError(f"{path.name}: files of the model are missing: {', '.join(missing)}")
    tensors = dict(first.tensors)
    for other in others:
        more = _read_file(other).tensors
        if twice := sorted(tensors.keys() & more.keys()):
            raise ConfigError(f"{other.name}: the tensor {twice[0]} is in another file of the model too")
        tensors |= more
    return GGUFModel((path, *others), tensors, first._scalars, first._arrays)


def _read_file(path: Path) -> GGUFModel:
    with _Header(path) as header:
        num_tensors, num_entries = _counts(header)
        scalars: dict[str, Any] = {}
        arrays: dict[str, _Array] = {}
        for number in range(num_entries):
            key = header.string(f"the key of metadata entry {number}", _MAX_KEY)
            if key in scalars or key in arrays:
                raise header.fail(f"{key} is there twice")
            kind = header.number("<I", f"the type of {key}")
            if kind == _ARRAY:
                arrays[key] = header.array(key)
            elif kind == _STRING:
                scalars[key] = header.string(key)
            elif kind in _SCALARS:
                scalars[key] = header.number(_SCALARS[kind], key)
            else:
                raise header.fail(f"{key} has the unknown type {kind}")
        alignment = scalars.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise header.fail(f"general.alignment must be a power of two up to 2^20, found {alignment!r}")
        described = list(_descriptions(header, num_tensors, alignment))
        begin = header.at + -header.at % alignment
        tensors = _placed(header, described, begin)
        return GGUFModel((path,), tensors, scalars, arrays)


def _counts(header: _Header) -> tuple[int, int]:
    """Read the first fields: the numbers of tensors and of metadata entries."""
    if (magic := header.take(4, "the magic")) != MAGIC:
        pointer = ", as a Git LFS pointer does: run `git lfs pull`" if magic == b"vers" else ""
        raise ConfigError(f"{header.path.name} is no GGUF file: it begins with {magic!r}{pointer}")
    version = header.number("<I", "the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        what = "is big-endian" if swapped else f"has version {version}"
        raise ConfigError(f"{header.path.name} {what}; served are versions {_VERSIONS[0]} and 3, little-endian")
    num_tensors, num_entries = header.number("<Q", "the tensor count"), header.number("<Q", "the metadata count")
    if num_tensors > _MAX_TENSORS or num_entries > _MAX_ENTRIES:
        raise header.fail(f"{num_tensors} tensors and {num_entries} metadata entries, of 2^20 and 2^16 at most")
    return num_tensors, num_entries


def _descriptions(header: _Header, count: int, alignment: int) -> Iterator[tuple[str, BlockType, tuple[int, ...], int]]:
    """Read name, type, shape and offset (from the end of the header) of each tensor."""
    for number in range(count):
        name = header.string(f"the name of tensor {number}", _MAX_NAME)
        dimensions = header.number("<I", f"the dimensions of {name}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise header.fail(f"{name} has {dimensions} dimensions, of 1 to {_MAX_DIMENSIONS}")
        sizes = [header.number("<Q", f"the sizes of {name}") for _ in range(dimensions)]
        kind, offset = header.number("<I", f"the type of {name}"), header.number("<Q", f"the offset of {name}")
        found = BLOCK_TYPES.get(kind)
        if found is None or not found.served:
            what = f"type {kind}, which is not known" if found is None else f"{found.name}, which {reason(found)}"
            raise ConfigError(f"{header.path.name}: {name} is of {what}; served are {', '.join(SERVED_NAMES)}")
        if not all(0 < size <= header.size * 8 for size in sizes):
            raise header.fail(f"{name} has the sizes {sizes}, more than fit into the file")
        if sizes[0] % found.block:
            raise header.fail(f"{name} is {found.name} with rows of {sizes[0]}, no multiple of {found.block}")
        if offset % alignment:
            raise header.fail(f"{name} is at {offset}, no multiple of the alignment {alignment}")
        yield name, found, tuple(reversed(sizes)), offset


def _placed(
    header: _Header, described: list[tuple[str, BlockType, tuple[int, ...], int]], begin: int
) -> dict[str, GGUFTensor]:
    """Return the tensors by name; none may reach beyond the file or into another."""
    tensors: dict[str, GGUFTensor] = {}
    for name, kind, shape, offset in described:
        if name in tensors:
            raise header.fail(f"the tensor {name} is there twice")
        tensor = tensors[name] = GGUFTensor(header.path, name, kind, shape, begin + offset)
        if tensor.offset + tensor.nbytes > header.size:
            end = tensor.offset + tensor.nbytes
            raise header.fail(f"{name} ends at {end}, beyond the end of the file at {header.size}")
    before: GGUFTensor | None = None
    for tensor in sorted(tensors.values(), key=lambda one: one.offset):
        if before is not None and before.offset + before.nbytes > tensor.offset:
            raise header.fail(f"the tensors {before.name} and {tensor.name} overlap")
        before = tensor
    return tensors
