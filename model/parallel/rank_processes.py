"""Rank 0's handle of the processes of ranks 1 and up: it starts, commands, watches and ends them.

A call that raises on one rank leaves the others within a collective operation, so it breaks the group: every later
call, the engine's probe too, raises `EngineDeadError`.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from triptych.model.errors import ConfigError, EngineDeadError
from triptych.model.parallel.group import TIMEOUT_SECONDS, Group
from triptych.model.parallel.messages import (
    Answer,
    Load,
    Message,
    Pools,
    Record,
    Step,
    dtype_name,
    pack_call,
    send_tensors,
)
from triptych.model.parallel.step_ring import MOST, Place, StepRing
from triptych.model.system.child_process import FrameSocket, describe_exit, start_child

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0
_TOGETHER_SECONDS = 5.0  # within which all ranks fail to record if all of them fail for the same reason
_DETECTION_SECONDS = 1.0  # for the watcher thread to find the rank that ended, which is the better reason


@dataclass(slots=True)
class _RankProcess:
    rank: int
    process: subprocess.Popen[bytes]
    frames: FrameSocket


class _GroupFailure:
    """The reason why the group no longer works; the first one is kept."""

    def __init__(self) -> None:
        self.reason = ""
        self.happened = threading.Event()

    def record(self, reason: str) -> None:
        if not self.happened.is_set():
            self.reason = reason
            self.happened.set()


class RankProcesses:
    """The other ranks of one model. They end with this object, with `close`, or with the process."""

    def __init__(self, name: str, group: Group, loads: list[Load]) -> None:
        """Start ranks 1 and up, one for each of `loads`; they load their shards while rank 0 loads its own."""
        self.group = group
        self._name = name
        self._failure = _GroupFailure()
        self._rendezvous = os.memfd_create("triptych-ranks")
        self._ring = StepRing(len(loads))
        self._processes: list[_RankProcess] = []
        self._finalize = weakref.finalize(
            self, _end, self._processes, self._failure, group, self._rendezvous, self._ring
        )
        for rank, load in enumerate(loads, start=1):
            self._processes.append(_start(rank, len(loads) + 1, self._rendezvous, self._ring.descriptor))
            self._processes[-1].frames.limit_sends(TIMEOUT_SECONDS)
            with self._detecting_failure():
                self._processes[-1].frames.send(msgspec.msgpack.encode(load))
        arguments = (name, list(self._processes), self._failure, group)
        threading.Thread(target=_watch, args=arguments, name=f"ranks of {name}", daemon=True).start()

    def connect(self) -> list[tuple[int, int]]:
        """Wait until every rank has loaded, then connect the group; return (free, total) bytes of each one's GPU."""
        self._receive_answers()
        logger.info("%s has ranks in processes %s", self._name, ", ".join(map(str, [os.getpid(), *self.pids])))
        self.group.connect(self._rendezvous)
        return [(answer.free, answer.total) for answer in self._receive_answers()]

    def make_pools(self, num_pages: Sequence[int], block_size: int, dtype: torch.dtype, num_states: int = 0) -> None:
        """Have every rank allocate the KV pools, and slots for states, of its heads; return when that is done."""
        if (slots := max(num_pages, default=0) * block_size) > MOST:
            raise ConfigError(
                f"{self._name}: the KV cache of each rank has room for {slots:,} tokens; on several ranks it can have "
                f"at most {MOST:,}: lower kv_cache_memory or gpu_memory_utilization"
            )
        self._send(Pools(list(num_pages), block_size, dtype_name(dtype), num_states))
        self._receive_answers()

    def record(self, max_num_seqs: int, max_model_len: int, record_own: Callable[[], str]) -> str:
        """Have every rank record its decode steps while `record_own` records rank 0's.

        Return why some rank could not, as `record_own` does of its own; empty if all could. Where one could not and
        another waits for its part of a sum, raise `EngineDeadError` with the reason: they are out of step.
        """
        with self.sending(Record(max_num_seqs, max_model_len)):
            own_done = threading.Event()
            found: list[str] = []
            threads = [
                threading.Thread(target=self._await_record, args=(rank, own_done, found), daemon=True)
                for rank in self._processes
            ]
            for thread in threads:
                thread.start()
            own = record_own()
            own_done.set()
            for thread in threads:
                thread.join(_TOGETHER_SECONDS if own else None)
            if any(thread.is_alive() for thread in threads):
                self._give_up(f"rank 0 of {self._name} could not record decode steps: {own}")
            self.check()
        return next(filter(None, [own, *found]), "")

    def _await_record(self, rank: _RankProcess, own_done: threading.Event, found: list[str]) -> None:
        """Note why a rank could not record; give all up if rank 0 does not come to an end either."""
        try:
            failure = msgspec.msgpack.decode(rank.frames.receive(), type=Answer).failure
        except (EOFError, OSError):
            self._failure.happened.wait(_DETECTION_SECONDS)
            self._failure.record(f"rank {rank.rank} of {self._name} ended")
            return
        found.append(failure)
        if failure and not own_done.wait(_TOGETHER_SECONDS):
            self._give_up(f"rank {rank.rank} of {self._name} could not record decode steps: {failure}")

    def _give_up(self, reason: str) -> None:
        """End the ranks, so that a pending collective operation fails."""
        self._failure.record(reason)
        for rank in self._processes:
            with suppress(OSError):  # it has ended by itself
                rank.frames.connection.shutdown(socket.SHUT_RDWR)
        self.group.abort()

    @contextmanager
    def call(self, name: str, *arguments: Any) -> Iterator[None]:
        """Have every rank call `name` while rank 0 makes the call in the block; an exception breaks the group."""
        message, tensors = pack_call(name, arguments)
        with self.sending(message):
            send_tensors(tensors, self.group)
            yield

    @contextmanager
    def sending(self, message: Message) -> Iterator[None]:
        """Send a message whose work rank 0 does too, in the block; an exception breaks the group."""
        self.check()
        try:
            self._send(message)
            yield
        except BaseException as error:
            self._failure.happened.wait(_DETECTION_SECONDS)
            self._failure.record(f"{type(error).__name__} in rank 0 of {self._name}")
            raise

    @contextmanager
    def sending_step(self, message: Callable[[Place | bytes], Step], row: Tensor) -> Iterator[None]:
        """Send a step whose integers are `row`, as `sending` does; `message` makes the message of the row's place."""
        self.check()
        try:
            place = self._ring.write(row, TIMEOUT_SECONDS, self.check)
        except TimeoutError:
            self._failure.record(f"a rank of {self._name} takes no messages")
            raise EngineDeadError(self._failure.reason) from None
        with self.sending(message(place)):
            yield

    def check(self) -> None:
        """Raise `EngineDeadError` if a rank has ended or a call raised."""
        if self._failure.happened.is_set():
            raise EngineDeadError(self._failure.reason)

    def close(self) -> None:
        """End the other ranks and wait for them. Idempotent."""
        self._finalize()

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._processes]

    def _send(self, message: Message) -> None:
        frame = msgspec.msgpack.encode(message)
        with self._detecting_failure():
            for rank in self._processes:
                try:
                    rank.frames.send(frame)
                except TimeoutError:  # long steps do not fit into the socket
                    self._failure.record(f"rank {rank.rank} of {self._name} takes no messages")
                    raise EngineDeadError(self._failure.reason) from None

    def _receive_answers(self) -> list[Answer]:
        with self._detecting_failure():
            return [msgspec.msgpack.decode(rank.frames.receive(), type=Answer) for rank in self._processes]

    @contextmanager
    def _detecting_failure(self) -> Iterator[None]:
        """Turn the `EOFError` of a closed socket, whose rank has ended, into `EngineDeadError`."""
        try:
            yield
        except EOFError:
            self._failure.happened.wait(_DETECTION_SECONDS)
            self._failure.record(f"a rank of {self._name} ended")
            raise EngineDeadError(self._failure.reason) from None


def _start(rank: int, size: int, rendezvous: int, ring: int) -> _RankProcess:
    parent_end, child_end = socket.socketpair()
    descriptors = (child_end.fileno(), rendezvous, ring)
    process = start_child("triptych.model.engine.rank_main", *descriptors, rank, size, descriptors=descriptors)
    child_end.close()
    return _RankProcess(rank, process, FrameSocket(parent_end))


def _watch(name: str, ranks: list[_RankProcess], failure: _GroupFailure, group: Group) -> None:
    """Wait for the first rank to end, record that and abort the group: NCCL itself would wait for the rank."""
    poll = select.poll()
    by_descriptor = {rank.frames.fileno(): rank for rank in ranks}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLRDHUP)
    (descriptor, _), *_ = poll.poll()
    if failure.happened.is_set():
        return
    ended = by_descriptor[descriptor]
    try:
        how = describe_exit(ended.process.wait(_DETECTION_SECONDS))
    except subprocess.TimeoutExpired:
        how = "its connection"
    failure.record(f"rank {ended.rank} of {name} ended {how}")
    group.abort()


def _end(ranks: list[_RankProcess], failure: _GroupFailure, group: Group, rendezvous: int, ring: StepRing) -> None:
    failure.record("the ranks were closed")
    for rank in ranks:
        rank.frames.connection.shutdown(socket.SHUT_RDWR)
    for rank in ranks:
        try:
            rank.process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
        rank.frames.connection.close()
    group.close()
    os.close(rendezvous)
    ring.close()
