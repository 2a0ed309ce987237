"""What rank 0 tells the other ranks: plain data over a socket, and beside it the tensors of a call, over the group.

A call's arguments travel as the fields of their dataclasses with a place holder for each tensor. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from model.attention.base import AttentionMetadata, DeviceLengths
from model.network.inputs import CrossInput, StackInput
from model.parallel.group import Group

_TYPES: dict[str, type[Any]] = {one.__name__: one for one in (StackInput, CrossInput, AttentionMetadata, DeviceLengths)}


class Load(msgspec.Struct, tag=True):
    """First: which share of which model. The rank answers when it has it, and again when the group is connected."""

    path: str
    max_model_len: int
    dtype: str
    device: str
    attention_backend: str


class Pool(msgspec.Struct, tag=True):
    """The KV pool of a model that generates; answered."""

    num_blocks: int
    block_size: int
    dtype: str


class Call(msgspec.Struct, tag=True):
    """Make this call, as rank 0 does now."""

    name: str
    arguments: list[Any]
    tensors: list[tuple[str, list[int]]]  # dtype and shape of each, in order


Message = Load | Pool | Call


class Answer(msgspec.Struct):
    """From a rank: done. `free` and `total` are its GPU's bytes, where it has one."""

    free: int = 0
    total: int = 0


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def packed(name: str, arguments: Sequence[Any]) -> tuple[Call, list[Tensor]]:
    """The call, and the tensors that it speaks of."""
    tensors: list[Tensor] = []
    plain = [_plain(argument, tensors) for argument in arguments]
    return Call(name, plain, [(dtype_name(tensor.dtype), list(tensor.shape)) for tensor in tensors]), tensors


def unpacked(call: Call, tensors: Sequence[Tensor], device: torch.device) -> list[Any]:
    """The arguments of a call, on this rank's device."""
    return [_argument(value, tensors, device) for value in call.arguments]


def send_tensors(tensors: Sequence[Tensor], group: Group) -> None:
    """Rank 0's half of `receive_tensors`: one broadcast for all tensors of a dtype."""
    for dtype in _dtypes([tensor.dtype for tensor in tensors]):
        group.broadcast(torch.cat([tensor.reshape(-1) for tensor in tensors if tensor.dtype is dtype]))


def receive_tensors(call: Call, group: Group) -> list[Tensor]:
    """The tensors of a call, which are views of one for each dtype."""
    shapes = [(dtype_of(name), torch.Size(shape)) for name, shape in call.tensors]
    flat: dict[torch.dtype, Tensor] = {}
    for dtype in _dtypes([dtype for dtype, _ in shapes]):
        elements = sum(shape.numel() for one, shape in shapes if one is dtype)
        flat[dtype] = group.broadcast(torch.empty(elements, dtype=dtype, device=group.device))
    used = dict.fromkeys(flat, 0)
    found = []
    for dtype, shape in shapes:
        begin = used[dtype]
        used[dtype] += shape.numel()
        found.append(flat[dtype][begin : used[dtype]].view(shape))
    return found


def _dtypes(dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
    """Each once, in the order of their first tensors."""
    return list(dict.fromkeys(dtypes))


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, torch.device):
        return {"device": None}  # each rank has its own
    if is_dataclass(value):
        inside = {one.name: _plain(getattr(value, one.name), tensors) for one in fields(value) if one.init}
        return {"type": type(value).__name__, "fields": inside}
    return value


def _argument(value: Any, tensors: Sequence[Tensor], device: torch.device) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "device" in value:
        return device
    inside = {name: _argument(one, tensors, device) for name, one in value["fields"].items()}
    return _TYPES[value["type"]](**inside)
