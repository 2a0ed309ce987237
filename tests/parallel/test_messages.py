"""Messages from rank 0 arrive unchanged at the other ranks."""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.model.checkpoints import CPU
from tests.parallel.ranks import on_ranks
from triptych.model.attention.base import AttentionMetadata
from triptych.model.cache.kv_cache import whole_segments
from triptych.model.network.inputs import CrossInput, StackInput
from triptych.model.parallel.group import Group
from triptych.model.parallel.messages import (
    Call,
    Message,
    pack_call,
    receive_tensors,
    send_tensors,
    unpack_arguments,
)


def arguments() -> list[Any]:
    own = AttentionMetadata((2, 1), (2, 5), True, CPU, torch.tensor([[3, 0], [1, 2]]), torch.tensor([6, 7, 9]))
    rows, states = (torch.tensor([4, 5, 6]), torch.tensor([0, 1, 4])), whole_segments((2, 1))
    inputs = StackInput(*rows, own, pixels=torch.rand(1, 3, 2, 2), states=states)
    memory = torch.linspace(0, 1, 12).view(3, 4).to(torch.bfloat16)
    cross = CrossInput(AttentionMetadata((2, 1), (3, 3), causal=False), memory[:, ::2])  # not contiguous
    return [inputs, True, cross, None, [3, 4]]


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return ours.dtype is theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, (StackInput, CrossInput, AttentionMetadata)):
        return type(ours) is type(theirs) and all(
            same(getattr(ours, one.name), getattr(theirs, one.name)) for one in fields(ours)
        )
    return bool(ours == theirs)


def test_call_arrives_unchanged() -> None:
    said, frames = arguments(), [b""]
    sent = threading.Event()

    def work(group: Group) -> list[Any]:
        if group.shard.rank == 0:
            call, tensors = pack_call("decode", said)
            frames[0] = msgspec.msgpack.encode(call)
            sent.set()
            send_tensors(tensors, group)
            return said
        assert sent.wait(60)
        heard = msgspec.msgpack.decode(frames[0], type=Message)
        assert isinstance(heard, Call) and heard.name == "decode"
        return unpack_arguments(heard, receive_tensors(heard, group), group.device)

    _, heard = on_ranks(2, work)
    heard[4] = list(heard[4])
    assert all(same(ours, theirs) for ours, theirs in zip(said, heard, strict=True))
    assert heard[0].metadata.groups[0].q_len == 2  # what is derived is derived anew


def test_unsupported_arguments_are_refused() -> None:
    call, _ = pack_call("decode", [object()])
    with pytest.raises(TypeError):
        msgspec.msgpack.encode(call)
