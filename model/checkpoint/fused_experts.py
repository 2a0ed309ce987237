"""Tensors that hold the matrices of all experts of a layer, read as one tensor for each expert and part; and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from triptych.model.checkpoint.tensor_files import StoredTensor
from triptych.model.errors import CheckpointError
from triptych.model.families.table.rules import Family, FusedExperts


def parted(family: Family, stored: Mapping[str, StoredTensor], hidden_size: int) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint with those in parts that have several experts' matrices.

    `hidden_size` is the width of what experts read and write. Raises `CheckpointError` where parts cannot have equal
    numbers of outputs.
    """
    if not family.fused:
        return dict(stored)
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        one = family.fused_as(name)
        if one is None or tensor.strides is not None or len(tensor.shape) < 2:
            found[name] = tensor
        else:
            one = replace(one, transposed=_is_transposed(one, tensor.shape, hidden_size))
            found |= {part.name: part for part in _parts(one, tensor)}
    return found


def _is_transposed(fused: FusedExperts, shape: tuple[int, ...], hidden_size: int) -> bool:
    """Whether a tensor has the inputs of its experts first; where both ways fit it has outputs first."""
    if not fused.either_way or len(shape) != 3:
        return fused.transposed
    outputs, inputs = shape[1:]
    if len(fused.parts) > 1:  # gate and up, which read what is `hidden_size` wide
        return inputs != hidden_size == outputs
    return outputs != hidden_size == inputs


def _parts(fused: FusedExperts, tensor: StoredTensor) -> Iterator[StoredTensor]:
    """Yield the views of each expert's matrix or bias."""
    experts, *rest = tensor.shape
    rows, columns = rest[0], math.prod(rest[1:])  # what is packed may have more dimensions
    strides: tuple[int, ...] = (columns, 1)
    if fused.transposed and len(rest) > 1:
        rows, columns, strides = columns, rows, (1, columns)
    count, odd = divmod(rows, len(fused.parts))
    if odd:
        raise CheckpointError(
            f"{tensor.name} has {rows} outputs, which {' and '.join(fused.parts)} do not share evenly"
        )
    begin = count * strides[0]
    if fused.interleaved:
        begin, strides = strides[0], (strides[0] * len(fused.parts), strides[1])
    contiguous = strides == (columns, 1)
    shape = (count, columns) if len(rest) > 1 else (count,)
    for expert, names in enumerate(fused.part_names(tensor.name, experts)):
        for part, name in enumerate(names):
            at = expert * rows * columns + part * begin
            yield replace(
                tensor,
                name=name,
                shape=shape,
                offset=tensor.offset + at * tensor.dtype.itemsize,
                strides=None if contiguous else strides[: len(shape)],
            )


def joined(family: Family, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by their stored names, those of experts as the family's folders have them."""
    written = [one for one in family.fused if one.written]
    if not written:
        yield from tensors
        return
    by_name = dict(tensors)
    for one in written:
        first, tail = one.parts[0].split("{}")
        for name in [name for name in by_name if name.endswith(f".{first}0{tail}")]:
            layer = name.removesuffix(f"{first}0{tail}")
            yield layer + one.source, _stacked(one, layer, by_name)
    yield from by_name.items()


def _stacked(fused: FusedExperts, layer: str, by_name: dict[str, Tensor]) -> Tensor:
    """Take a layer's experts out of the tensors."""
    found, expert = [], 0
    while layer + fused.parts[0].format(expert) in by_name:
        parts = [by_name.pop(layer + name.format(expert)) for name in fused.parts]
        matrix = torch.stack(parts, 1).flatten(0, 1) if fused.interleaved else torch.cat(parts)
        found.append(matrix.t() if fused.transposed and matrix.dim() > 1 else matrix)
        expert += 1
    return torch.stack(found)
