"""Messages from rank 0 to the other ranks: plain data over a socket; the tensors of a call by broadcast.

A step of the generate engine is one message; its integers are in shared memory (`triptych.model.parallel.step_ring`).
Everything else is calls (of the encode engine, and what is measured at start), whose arguments are sent as the fields
of their dataclasses, with a placeholder for each tensor.
Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from triptych.model.api.request import Source
from triptych.model.attention.base import AttentionMetadata, DeviceLengths
from triptych.model.cache.kv_cache import StateSpan
from triptych.model.config.formats import NumberFormat
from triptych.model.network.inputs import CrossInput, StackInput
from triptych.model.parallel.group import Group
from triptych.model.parallel.step_ring import Place

_TYPES: dict[str, type[Any]] = {
    type_.__name__: type_ for type_ in (StackInput, CrossInput, AttentionMetadata, DeviceLengths, StateSpan)
}


class Load(msgspec.Struct, tag=True):
    """The first message: load this model. The rank answers after loading, and again when the group is connected."""

    path: str
    pickle: bool  # whether weights may be read from pytorch_model.bin
    max_model_len: int
    dtype: str
    device: str
    attention_backend: str
    fp8: tuple[str, ...] | None  # as `LinearFactory` has it
    integers: tuple[tuple[str, NumberFormat], ...] | None  # likewise
    quantization: str
    faults: dict[str, str] = {}  # kernels that are broken on these GPUs


class Pools(msgspec.Struct, tag=True):
    """Allocate the rank's KV pools; the rank answers when that is done."""

    num_pages: list[int]  # of each pool
    block_size: int
    dtype: str
    num_states: int = 0  # slots, of recurrent layers


class Record(msgspec.Struct, tag=True):
    """Record decode steps as CUDA graphs, as rank 0 does at the same time; the rank answers when that is done."""

    max_num_seqs: int
    max_model_len: int


class Step(msgspec.Struct, tag=True):
    """Run a step of the generate engine, as `StepPlan` describes it: all that a rank is told of it."""

    layout: tuple[int, ...]  # the fields of `BatchLayout`
    row: Place | bytes  # the place of the integers in the ring, or their bytes if they do not fit into it
    num_segments: int
    replayed: bool
    num_known: int  # the number of tokens that are broadcast before the step
    uneven: bool
    logit_rows: tuple[int, ...] | None
    copies: tuple[tuple[int, int, int], ...] = ()
    sources: tuple[Source, ...] = ()
    source_slots: tuple[int, ...] = ()
    scored: tuple[tuple[int, int], ...] = ()
    states: tuple[tuple[int, int, int, int], ...] = ()
    needed: bytes = b""


class Call(msgspec.Struct, tag=True):
    """Make this call, which rank 0 makes at the same time."""

    name: str
    arguments: list[Any]
    tensors: list[tuple[str, list[int]]]  # dtype and shape of each, in order


Message = Load | Pools | Record | Step | Call


class Answer(msgspec.Struct):
    """A rank's reply that it is done. `free` and `total`: bytes of its GPU, if it has one."""

    free: int = 0
    total: int = 0
    failure: str = ""  # why it could not be done, where ranks go on without


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def pack_call(name: str, arguments: Sequence[Any]) -> tuple[Call, list[Tensor]]:
    """Return the message of a call, and its tensors, which `send_tensors` sends."""
    tensors: list[Tensor] = []
    plain = [_to_plain(argument, tensors) for argument in arguments]
    return Call(name, plain, [(dtype_name(tensor.dtype), list(tensor.shape)) for tensor in tensors]), tensors


def unpack_arguments(call: Call, tensors: Sequence[Tensor], device: torch.device) -> list[Any]:
    """Return the arguments of a call, on this rank's device."""
    return [_from_plain(value, tensors, device) for value in call.arguments]


def send_tensors(tensors: Sequence[Tensor], group: Group) -> None:
    """Send a call's tensors from rank 0 to `receive_tensors` of the others, in one broadcast for each dtype."""
    for dtype in _distinct([tensor.dtype for tensor in tensors]):
        group.broadcast(torch.cat([tensor.reshape(-1) for tensor in tensors if tensor.dtype is dtype]))


def receive_tensors(call: Call, group: Group) -> list[Tensor]:
    """Receive the tensors of a call; those of one dtype are views of one buffer."""
    shapes = [(dtype_of(name), torch.Size(shape)) for name, shape in call.tensors]
    buffers: dict[torch.dtype, Tensor] = {}
    for dtype in _distinct([dtype for dtype, _ in shapes]):
        elements = sum(shape.numel() for shape_dtype, shape in shapes if shape_dtype is dtype)
        buffers[dtype] = group.broadcast(torch.empty(elements, dtype=dtype, device=group.device))
    used = dict.fromkeys(buffers, 0)
    tensors = []
    for dtype, shape in shapes:
        begin = used[dtype]
        used[dtype] += shape.numel()
        tensors.append(buffers[dtype][begin : used[dtype]].view(shape))
    return tensors


def _distinct(dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
    """Return the distinct dtypes in the order of their first tensors, the same on every rank."""
    return list(dict.fromkeys(dtypes))


def _to_plain(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, torch.device):
        return {"device": None}  # each rank has its own
    if isinstance(value, StateSpan):
        return {"type": "StateSpan", "fields": value._asdict()}
    if is_dataclass(value):
        plain = {field.name: _to_plain(getattr(value, field.name), tensors) for field in fields(value) if field.init}
        return {"type": type(value).__name__, "fields": plain}
    if isinstance(value, tuple) and value and (is_dataclass(value[0]) or isinstance(value[0], StateSpan)):
        return [_to_plain(one, tensors) for one in value]
    return value


def _from_plain(value: Any, tensors: Sequence[Tensor], device: torch.device) -> Any:
    if isinstance(value, list):
        return tuple(_from_plain(one, tensors, device) for one in value) if _has_objects(value) else tuple(value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "device" in value:
        return device
    arguments = {name: _from_plain(plain, tensors, device) for name, plain in value["fields"].items()}
    return _TYPES[value["type"]](**arguments)


def _has_objects(values: list[Any]) -> bool:
    return bool(values) and isinstance(values[0], dict)
