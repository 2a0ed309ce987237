"""Rank 0: starts the other ranks of a model, tells them each call before it makes it, and notices when one is gone.

    engine -- decode, encode, logits, ... --> LeadingTransformer, LeadingCache
                                                  |  the call as data, its tensors by broadcast
                                                  v
                                              followers, which make the same call

Requests, policy and sampling are rank 0's alone. A call that breaks on one rank leaves the others in the middle of a
sum, so it breaks the group: every later call, the engine's probe too, raises `EngineDeadError`.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from model.attention.base import AttentionBackend
from model.checkpoint import Checkpoint
from model.config import ModelConfig, StackConfig
from model.engine.errors import EngineDeadError
from model.engine.sockets import FrameSocket, describe_exit, start_child
from model.kv_cache import KVCache
from model.loader import load_weights
from model.parallel.group import Group
from model.parallel.network import ShardedTransformer
from model.parallel.sharding import Shard
from model.parallel.wire import Answer, Load, Message, Pool, dtype_name, packed, send_tensors
from model.transformer import CrossInput, StackInput

_CLOSE_SECONDS = 5.0
_NOTICE_SECONDS = 1.0  # between a call that breaks and the news of the rank that broke it


@dataclass(slots=True)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    frames: FrameSocket


class _Fate:
    """Why the ranks are no longer one; set once."""

    def __init__(self) -> None:
        self.reason = ""
        self.known = threading.Event()

    def seal(self, reason: str) -> None:
        if not self.known.is_set():
            self.reason = reason
            self.known.set()


class Followers:
    """The other ranks of one model. They end with this object, with `close`, or with the process."""

    def __init__(self, name: str, group: Group, loads: list[Load]) -> None:
        """`loads`: what each rank from 1 on is to hold; they read it while rank 0 reads its own."""
        self._name = name
        self._group = group
        self._fate = _Fate()
        self._rendezvous = os.memfd_create("triptych-ranks")
        self._children: list[_Child] = []
        self._finish = weakref.finalize(self, _end, self._children, self._fate, group, self._rendezvous)
        for rank, load in enumerate(loads, start=1):
            self._children.append(_start(rank, len(loads) + 1, self._rendezvous))
            with self._noticing():
                self._children[-1].frames.send(msgspec.msgpack.encode(load))
        watched = (name, list(self._children), self._fate, group)
        threading.Thread(target=_watch, args=watched, name=f"ranks of {name}", daemon=True).start()

    def connect(self) -> list[tuple[int, int]]:
        """Wait until every rank has its share, then meet; (free, total) bytes of each one's GPU."""
        self._answers()
        self._group.connect(self._rendezvous)
        return [(answer.free, answer.total) for answer in self._answers()]

    def ask(self, message: Message) -> None:
        """Tell all, and wait until it is done."""
        self._tell(message)
        self._answers()

    @contextmanager
    def call(self, name: str, *arguments: Any) -> Iterator[None]:
        """Have every rank call `name` while rank 0 does in the block; what is raised there breaks the group."""
        self.check()
        try:
            message, tensors = packed(name, arguments)
            self._tell(message)
            send_tensors(tensors, self._group)
            yield
        except BaseException as error:
            self._fate.known.wait(_NOTICE_SECONDS)
            self._fate.seal(f"{type(error).__name__} in rank 0 of {self._name}")
            raise

    def check(self) -> None:
        """Raise `EngineDeadError` if a rank is gone or a call broke."""
        if self._fate.known.is_set():
            raise EngineDeadError(self._fate.reason)

    def close(self) -> None:
        """End the other ranks and wait for them. Idempotent."""
        self._finish()

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    def _tell(self, message: Message) -> None:
        frame = msgspec.msgpack.encode(message)
        with self._noticing():
            for child in self._children:
                child.frames.send(frame)

    def _answers(self) -> list[Answer]:
        with self._noticing():
            return [msgspec.msgpack.decode(child.frames.receive(), type=Answer) for child in self._children]

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """A socket that is closed is a rank that is gone."""
        try:
            yield
        except EOFError:
            self._fate.known.wait(_NOTICE_SECONDS)
            self._fate.seal(f"a rank of {self._name} ended")
            raise EngineDeadError(self._fate.reason) from None


class LeadingTransformer(ShardedTransformer):
    """Rank 0 of a model: a Transformer to whom it asks, whole hidden states and logits of the whole vocabulary."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend, group: Group, followers: Followers) -> None:
        super().__init__(config, backend, group)
        self.followers = followers
        self.memory: list[tuple[int, int]] = []  # (free, total) bytes of each other rank's GPU

    def encode(self, inputs: StackInput) -> Tensor:
        self._check_ids(inputs)
        with self.followers.call("encode", inputs):
            return super().encode(inputs)

    def write_memory(self, memory: Tensor, cache: KVCache, slots: Tensor) -> None:
        with self.followers.call("write_memory", memory, slots):
            super().write_memory(memory, cache, slots)

    def decode(self, inputs: StackInput, cache: KVCache | None = None, cross: CrossInput | None = None) -> Tensor:
        self._check_ids(inputs)
        with self.followers.call("decode", inputs, cache is not None, cross):
            return super().decode(inputs, cache, cross)

    def logits(self, hidden: Tensor) -> Tensor:
        with self.followers.call("logits", hidden):
            return super().logits(hidden)

    def _check_ids(self, inputs: StackInput) -> None:
        """What breaks one request must not break the group; on a GPU looking would cost a synchronisation."""
        ids, size = inputs.input_ids, self.config.embedding.vocab_size
        if inputs.pixels is None and ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise IndexError(f"a token id is outside the vocabulary of {size}")


class LeadingCache(KVCache):
    """Rank 0's pool of its own heads; every other rank has one of the same blocks."""

    def __init__(
        self,
        stack: StackConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        followers: Followers,
    ) -> None:
        super().__init__(stack, num_blocks, block_size, dtype, device)
        self._followers = followers
        followers.ask(Pool(num_blocks, block_size, dtype_name(dtype)))

    def copy_blocks(self, copies: Mapping[int, int]) -> None:
        with self._followers.call("copy_blocks", list(copies), list(copies.values())):
            super().copy_blocks(copies)


def load_leader(
    name: str,
    checkpoint: Checkpoint,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
    *,
    size: int,
    max_model_len: int,
) -> LeadingTransformer:
    """Rank 0 of `size` with its share of the weights, all others started and connected.

    Raises `CheckpointError` as `load_model` does, `EngineDeadError` if a rank does not come up.
    """
    shard = Shard(0, size)
    group = Group(shard, device)
    loads = [
        Load(str(checkpoint.path), max_model_len, dtype_name(dtype), str(rank_device(device, rank)), backend.name)
        for rank in range(1, size)
    ]
    followers = Followers(name, group, loads)
    try:
        with torch.device("meta"):
            model = LeadingTransformer(checkpoint.config, backend, group, followers)
        load_weights(model, checkpoint, dtype, device, shard)
        model.memory = followers.connect()
    except BaseException:
        followers.close()
        raise
    return model


def rank_device(first: torch.device, rank: int) -> torch.device:
    """Ranks follow each other on the GPUs from rank 0's on."""
    return first if first.type != "cuda" else torch.device("cuda", (first.index or 0) + rank)


def _start(rank: int, size: int, rendezvous: int) -> _Child:
    ours, theirs = socket.socketpair()
    descriptors = (theirs.fileno(), rendezvous)
    process = start_child("model.parallel.follower", *descriptors, rank, size, descriptors=descriptors)
    theirs.close()
    return _Child(rank, process, FrameSocket(ours))


def _watch(name: str, children: list[_Child], fate: _Fate, group: Group) -> None:
    """Seal the ranks' fate when the first of them goes; NCCL itself would wait for it."""
    watched = select.poll()
    by_descriptor = {child.frames.fileno(): child for child in children}
    for descriptor in by_descriptor:
        watched.register(descriptor, select.POLLRDHUP)
    (descriptor, _), *_ = watched.poll()
    if fate.known.is_set():
        return
    child = by_descriptor[descriptor]
    try:
        how = describe_exit(child.process.wait(_NOTICE_SECONDS))
    except subprocess.TimeoutExpired:
        how = "its connection"
    fate.seal(f"rank {child.rank} of {name} ended {how}")
    group.abort()


def _end(children: list[_Child], fate: _Fate, group: Group, rendezvous: int) -> None:
    fate.seal("the ranks were closed")
    for child in children:
        child.frames.connection.shutdown(socket.SHUT_RDWR)
    for child in children:
        try:
            child.process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        child.frames.connection.close()
    group.close()
    os.close(rendezvous)
