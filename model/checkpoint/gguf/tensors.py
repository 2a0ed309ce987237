"""The tensors of a GGUF file as a family's table expects them: decoded while they are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint.gguf.blocks import FORMATS
from model.checkpoint.gguf.layout import Origin, origins
from model.checkpoint.gguf.settings import network_settings
from model.checkpoint.tensor_files import DecodedTensor, StoredTensor, TensorReader, TensorSource
from model.config.formats import FLOAT, Storage
from model.config.model import ModelConfig
from model.errors import CheckpointError
from model.families import FAMILIES
from model.families.table.rules import LinearRule
from model.gguf.container import read_gguf
from model.gguf.types import BlockType

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_GROUP = 32  # numbers that share a scale, of what is kept as it is stored


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
    paired: int  # rows of a head whose two halves are in turns; 0: rows are in their order
    less: float
    name: str
    stored: StoredTensor = field(repr=False)  # its bytes, uint8 [rows, bytes of a row]

    def rows(self, reader: TensorReader, first: int, last: int) -> Tensor:
        """Return rows `[first, last)`: numbers, integers, or factors of their groups."""
        unit, width = self.paired or 1, self.stored.shape[1]
        begin, end = first // unit, -(-last // unit)
        parts = [
            self._decoded(self._in_order(stored.view(-1, width)))
            for _, stored in reader.rows(self.stored, unit * width, begin, end)
        ]
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        return found[first - begin * unit : last - begin * unit]

    def _in_order(self, rows: Tensor) -> Tensor:
        """Put the bytes of the rows of whole heads in the order that they are wanted in."""
        if not self.paired:
            return rows
        return rows.view(-1, self.paired // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)

    def _decoded(self, rows: Tensor) -> Tensor:
        """What the bytes of rows stand for; nothing of them is kept."""
        if self.type.name in _FLOATS:
            values = rows.view(_FLOATS[self.type.name])
            return values.float() - self.less if self.less else values.clone()
        kind, blocks = FORMATS[self.type.name], rows.view(-1, self.type.bytes)
        if self.part is _Part.VALUES:
            found = kind.values(blocks)
            found = found - self.less if self.less else found
        elif self.part is _Part.INTEGERS:
            found = kind.integers(blocks)
            found = found - kind.centre if kind.centre else found
        else:
            found, offset = kind.factors(blocks)
            if self.part is _Part.OFFSET:
                found = torch.zeros_like(found) if offset is None else offset + kind.centre * found
        return found.reshape(len(rows), -1)


def gguf_tensors(path: Path, config: ModelConfig) -> dict[str, TensorSource]:
    """Return what is read of a file, by published names; of projections what their storage has."""
    model = read_gguf(path)
    found = origins(model, network_settings(model))
    family = FAMILIES[config.model_type]
    storages = {
        rule.source: config.stored_as.get(rule.target, FLOAT)
        for rule in family.rules(config)
        if isinstance(rule, LinearRule)
    }
    sources: dict[str, TensorSource] = {}
    for name, origin in found.items():
        stem, _, kind = family.canonical(name).rpartition(".")
        storage = storages.get(stem, FLOAT) if kind == "weight" else FLOAT
        for source in _sources(name, origin, storage):
            sources[source.name] = source
    return sources


def _sources(name: str, origin: Origin, storage: Storage) -> Iterator[TensorSource]:
    tensor, kind = origin.tensor, origin.tensor.type.name
    shape = tensor.shape
    if kind in _FLOATS and not origin.paired and not origin.less:
        yield StoredTensor(name=name, kind=kind, shape=shape, path=tensor.path, offset=tensor.offset)
        return
    count = math.prod(shape[:-1]) if len(shape) > 1 else shape[0]
    width = tensor.nbytes // count
    if len(shape) == 1 and kind not in _FLOATS:
        raise CheckpointError(f"{tensor.name} is one row of {kind}, which is not served")
    stored = StoredTensor(name=tensor.name, kind="U8", shape=(count, width), path=tensor.path, offset=tensor.offset)

    def decoded(name: str, kind: str, shape: tuple[int, ...], part: _Part) -> DecodedTensor:
        decoder = _Decoder(tensor.type, part, origin.paired, origin.less, tensor.name, stored)
        return DecodedTensor(name=name, kind=kind, shape=shape, decoder=decoder)

    if storage.numbers is None:
        yield decoded(name, kind if kind in _FLOATS and not origin.less else "F32", shape, _Part.VALUES)
        return
    stem, groups = name.removesuffix("weight"), (shape[0], -(-shape[1] // _GROUP))
    yield decoded(name, "I8", shape, _Part.INTEGERS)
    yield decoded(f"{stem}{storage.scale}", "F32", groups, _Part.SCALE)
    if storage.offset is not None:
        yield decoded(f"{stem}{storage.offset}", "F32", groups, _Part.OFFSET)
