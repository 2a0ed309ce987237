"""The tensors of a GGUF file as a family's table expects them: decoded while they are read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from triptych.model.checkpoint.gguf.blocks import FORMATS
from triptych.model.checkpoint.gguf.layout import Origin, origins
from triptych.model.checkpoint.gguf.settings import network_settings
from triptych.model.checkpoint.gguf.table import Change
from triptych.model.checkpoint.tensor_files import DecodedTensor, StoredTensor, TensorReader, TensorSource
from triptych.model.config.formats import FLOAT, Storage
from triptych.model.config.model import ModelConfig
from triptych.model.errors import CheckpointError
from triptych.model.families import family_for
from triptych.model.families.table.rules import LinearRule
from triptych.model.gguf.container import GGUFTensor, read_gguf
from triptych.model.gguf.types import BlockType

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_GROUP = 32  # numbers that share a scale, of what is kept as it is stored
_NEAR = 512  # rows that are read in vain, at most, so that one read suffices


class _Part(StrEnum):
    """What is wanted of a tensor."""

    VALUES = "values"
    INTEGERS = "integers"
    SCALE = "scale"
    OFFSET = "offset"


@dataclass(frozen=True, slots=True)
class _Decoder:
    """Computes rows of one part of a tensor of the file."""

    type: BlockType
    part: _Part
    change: Change
    name: str
    stored: StoredTensor = field(repr=False)  # its bytes, uint8 [rows, bytes of a row]

    def rows(self, reader: TensorReader, first: int, last: int) -> Tensor:
        """Return rows `[first, last)`: numbers, integers, or factors of their groups."""
        order = self.change.rows
        if order is None:
            return self._in_columns(self._read(reader, first, last))
        places = [order.place(row) for row in range(first, last)]
        begin, end = min(places), max(places) + 1
        if end - begin <= 2 * len(places) + _NEAR:
            found = self._read(reader, begin, end)[torch.tensor(places) - begin]
        else:
            found = torch.cat([self._read(reader, start, stop) for start, stop in _runs(places)])
        return self._in_columns(found)

    def _read(self, reader: TensorReader, begin: int, end: int) -> Tensor:
        """Return rows that are adjacent in the file."""
        parts = [self._decoded(rows) for _, rows in reader.rows(self.stored, self.stored.shape[1], begin, end)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _in_columns(self, rows: Tensor) -> Tensor:
        """Put columns, or the factors of groups of these, in the order that they are wanted in."""
        order = self.change.columns
        if order is None:
            return rows
        if self.part in (_Part.SCALE, _Part.OFFSET):
            order = order.in_groups(_GROUP)
        return rows[:, torch.tensor([order.place(column) for column in range(rows.shape[1])])]

    def _decoded(self, rows: Tensor) -> Tensor:
        """Return the numbers that the bytes of rows stand for; nothing of them is kept."""
        if self.type.name in _FLOATS:
            return self._undone(rows.view(_FLOATS[self.type.name]).clone())
        kind, blocks = FORMATS[self.type.name], rows.view(-1, self.type.bytes)
        if self.part is _Part.VALUES:
            found = self._undone(kind.values(blocks))
        elif self.part is _Part.INTEGERS:
            found = kind.integers(blocks)
            found = found - kind.centre if kind.centre else found
        else:
            found, offset = kind.factors(blocks)
            if self.part is _Part.OFFSET:
                found = torch.zeros_like(found) if offset is None else offset + kind.centre * found
        return found.reshape(len(rows), -1)

    def _undone(self, values: Tensor) -> Tensor:
        if self.change.logarithm:
            return torch.log(-values.float())
        return values.float() - self.change.less if self.change.less else values


@dataclass(frozen=True, slots=True)
class _Joined:
    """Computes rows of tensors whose rows follow each other."""

    parts: tuple[TensorSource, ...]
    as_float: bool  # they have different number formats

    def rows(self, reader: TensorReader, first: int, last: int) -> Tensor:
        found, begin = [], 0
        for part in self.parts:
            end = begin + part.shape[0]
            if begin < last and first < end:
                assert isinstance(part, DecodedTensor)
                found.append(part.decoder.rows(reader, max(first - begin, 0), min(last, end) - begin))
            begin = end
        return torch.cat([one.float() for one in found] if self.as_float else found)


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where runs of adjacent places begin and end."""
    start = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[at - 1] + 1:
            yield places[start], places[at - 1] + 1
            start = at


def gguf_tensors(path: Path, config: ModelConfig) -> dict[str, TensorSource]:
    """Return what is read of a file, by published names; of projections what their storage has."""
    model = read_gguf(path)
    found = origins(model, network_settings(model))
    family = family_for(config)
    storages = {
        rule.source: config.stored_as.get(rule.target, FLOAT)
        for rule in family.rules(config)
        if isinstance(rule, LinearRule)
    }
    sources: dict[str, TensorSource] = {}
    for name, origin in found.items():
        stem, _, kind = family.canonical(name).rpartition(".")
        storage = storages.get(stem, FLOAT) if kind == "weight" else FLOAT
        for source in _sources(name, origin, storage) if not origin.rest else _joined(name, origin, storage):
            sources[source.name] = source
    return sources


def _joined(name: str, origin: Origin, storage: Storage) -> Iterator[TensorSource]:
    """Yield what is read of several tensors as one."""
    each = (replace(origin, tensor=one, rest=()) for one in (origin.tensor, *origin.rest))
    for parts in zip(*(_sources(name, one, storage, decode=True) for one in each), strict=True):
        rows = sum(part.shape[0] for part in parts)
        differ = len({part.kind for part in parts}) > 1
        kind, shape = "F32" if differ else parts[0].kind, (rows, *parts[0].shape[1:])
        yield DecodedTensor(name=parts[0].name, kind=kind, shape=shape, decoder=_Joined(parts, differ))


def _sources(name: str, origin: Origin, storage: Storage, *, decode: bool = False) -> Iterator[TensorSource]:
    """Yield what is read of a tensor; `decode`: by a decoder in any case."""
    tensor, kind, change = origin.tensor, origin.tensor.type.name, origin.change
    shape = origin.shape
    if (
        not decode
        and kind in _FLOATS
        and change == Change(shape=change.shape)
        and math.prod(shape) == math.prod(tensor.shape)
    ):
        yield StoredTensor(name=name, kind=kind, shape=shape, path=tensor.path, offset=tensor.offset)
        return
    count = math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0]
    width = tensor.nbytes // count
    if len(tensor.shape) == 1 and kind not in _FLOATS:
        raise CheckpointError(f"{tensor.name} is one row of {kind}, which is not served")
    _check_order(tensor, change)
    stored = StoredTensor(name=tensor.name, kind="U8", shape=(count, width), path=tensor.path, offset=tensor.offset)

    def decoded(name: str, kind: str, shape: tuple[int, ...], part: _Part) -> DecodedTensor:
        return DecodedTensor(
            name=name, kind=kind, shape=shape, decoder=_Decoder(tensor.type, part, change, tensor.name, stored)
        )

    if storage.numbers is None:
        computed = kind not in _FLOATS or change.less or change.logarithm
        yield decoded(name, "F32" if computed else kind, shape, _Part.VALUES)
        return
    stem, groups = name.removesuffix("weight"), (shape[0], -(-shape[1] // _GROUP))
    yield decoded(name, "I8", shape, _Part.INTEGERS)
    yield decoded(f"{stem}{storage.scale}", "F32", groups, _Part.SCALE)
    if storage.offset is not None:
        yield decoded(f"{stem}{storage.offset}", "F32", groups, _Part.OFFSET)


def _check_order(tensor: GGUFTensor, change: Change) -> None:
    """Raise `CheckpointError` where an order is of more rows or columns than the file has."""
    for order, found in ((change.rows, tensor.shape[0]), (change.columns, tensor.shape[-1])):
        if order is not None and order.last >= found:
            raise CheckpointError(f"{tensor.name} has {found} rows or columns, expected more than {order.last}")
