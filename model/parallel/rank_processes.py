"""The processes of ranks 1 and up, from rank 0's side: started, told what to do, watched, ended.

A call that breaks on one rank leaves the others in the middle of a sum, so it breaks the group: every later call, the
engine's probe too, raises `EngineDeadError`.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from model.errors import EngineDeadError
from model.parallel.group import Group
from model.parallel.messages import (
    Answer,
    Load,
    Message,
    Pool,
    dtype_name,
    packed,
    send_tensors,
)
from model.system.child_process import FrameSocket, describe_exit, start_child

logger = logging.getLogger(__name__)

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


class RankProcesses:
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
        logger.info("%s has ranks in processes %s", self._name, ", ".join(map(str, [os.getpid(), *self.pids])))
        self._group.connect(self._rendezvous)
        return [(answer.free, answer.total) for answer in self._answers()]

    def make_pool(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        """Have every rank make the pool of its heads; returns when it is there."""
        self._tell(Pool(num_blocks, block_size, dtype_name(dtype)))
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


def _start(rank: int, size: int, rendezvous: int) -> _Child:
    ours, theirs = socket.socketpair()
    descriptors = (theirs.fileno(), rendezvous)
    process = start_child("model.parallel.rank_main", *descriptors, rank, size, descriptors=descriptors)
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
