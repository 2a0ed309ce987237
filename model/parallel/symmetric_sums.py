"""Sums over ranks in memory that every GPU of the group maps: torch's symmetric memory.

NCCL takes 10 to 20 us for a small sum. Here a small sum is one kernel that reads the numbers of all ranks (one shot),
and a larger one is computed by the NVLink switch, if there is one (multimem). NCCL keeps the largest, and what these
kernels do not compute. A sum has the same bits on every rank. Both kinds can be recorded in CUDA graphs.

A kernel waits on its device for those of the other ranks, so every rank chooses by shape and dtype alone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from triptych.model.config.sharding import Shard
from triptych.model.system import fallbacks

VARIABLE = "TRIPTYCH_SYMMETRIC_SUMS"  # 1: sums are computed here; otherwise NCCL computes all
FALLBACK = "sums over ranks are NCCL's alone"
BUFFER_BYTES = 8 << 20  # of the largest sum
ONE_SHOT_BYTES = {2: 512 << 10, 4: 512 << 10, 8: 256 << 10}  # by ranks; for other numbers ranks would round differently
_DTYPES = (torch.bfloat16, torch.float32)  # that torch's kernels add
_ALIGNMENT = 16  # bytes that a thread adds at once
_SECONDS = 20.0  # for all ranks to set the memory up, and for the first sums
_RELEASE_SECONDS = 3.0

_c10d: Any = torch.distributed
logger = logging.getLogger(__name__)

Agree = Callable[[bool], bool]  # whether it is so on every rank


class SymmetricSums:
    """One rank's end of the memory. All ranks make each call, with tensors of equal shapes and dtypes."""

    def __init__(self, name: str, store: Any, backend: Any, shard: Shard, device: torch.device) -> None:
        """Map the memory of all ranks; each must call this. `backend` connects them already, `name` is the group's."""
        self._name, self._shard, self._device = name, shard, device
        self._native: Any = torch._C._distributed_c10d
        self._group = _registered(self._native, name, store, backend, shard, device)  # torch does not hold it
        memory: Any = self._native._SymmetricMemory
        self._buffer: Tensor = memory.empty_strided_p2p((BUFFER_BYTES,), (1,), torch.uint8, device)
        self._handle: Any = memory.rendezvous(self._buffer, name)
        self.has_multimem = bool(self._handle.multicast_ptr)
        self._ops: Any = torch.ops.symm_mem

    def sum(self, tensor: Tensor) -> Tensor | None:
        """Return the sum over all ranks, which may be a new tensor; None if it is to be NCCL's."""
        num_bytes = tensor.nbytes
        if tensor.dtype not in _DTYPES or num_bytes % _ALIGNMENT or not 0 < num_bytes <= self._most:
            return None
        shared = self._buffer[:num_bytes].view(tensor.dtype).view(tensor.shape)
        with _current(self._device):
            if num_bytes > ONE_SHOT_BYTES[self._shard.size]:
                shared.copy_(tensor)
                return tensor.copy_(self._ops.multimem_all_reduce_(shared, "sum", self._name))
            tensor = tensor.contiguous()
            if tensor.storage_offset() * tensor.itemsize % _ALIGNMENT:
                tensor = tensor.clone()
            summed: Tensor = self._ops.one_shot_all_reduce_copy(shared, tensor, "sum", self._name)
            return summed

    @property
    def _most(self) -> int:
        """The bytes of the largest sum."""
        return BUFFER_BYTES if self.has_multimem else ONE_SHOT_BYTES[self._shard.size]

    def check(self) -> None:
        """Compute sums of every kind, launched and recorded, then raise `RuntimeError` if one was wrong."""
        wrong = ""  # the other ranks wait for every sum
        sizes = [_ALIGNMENT, ONE_SHOT_BYTES[self._shard.size]] + [BUFFER_BYTES] * self.has_multimem
        for dtype in _DTYPES:
            for size in sizes:
                count = size // dtype.itemsize
                numbers = (torch.arange(count, device=self._device) % 13).to(dtype)  # small: every sum of them is exact
                expected = numbers * self._shard.size + sum(range(self._shard.size))
                for run in (self.sum, self._recorded_sum):
                    found = run(numbers + self._shard.rank)
                    self._wait()
                    if found is None or not torch.equal(found, expected):
                        wrong = wrong or f"a sum of {size} bytes of {dtype} in symmetric memory is wrong"
        if wrong:
            raise RuntimeError(wrong)

    def _recorded_sum(self, tensor: Tensor) -> Tensor | None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            summed = self.sum(tensor)
        graph.replay()
        self._wait()  # before the graph is freed
        return summed

    def _wait(self) -> None:
        """Wait for the device, but not for ever: its kernels wait for those of other ranks."""
        done, deadline = torch.cuda.Event(), time.monotonic() + _SECONDS
        done.record()
        while not done.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"sums in symmetric memory do not end: start without {VARIABLE}")
            time.sleep(1e-3)

    def release(self) -> None:
        """Let this rank's kernels end that wait for a rank that has ended; what they sum is not used any more.

        A kernel waits until its signals to the others are taken, and for theirs. Both is pretended for some seconds,
        on a stream and in a thread of their own.
        """
        threading.Thread(target=self._pretend, name=f"release {self._name}", daemon=True).start()

    def _pretend(self) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
            pads = [self._handle.get_signal_pad(rank, dtype=torch.int32) for rank in range(self._shard.size)]
            deadline = time.monotonic() + _RELEASE_SECONDS
            while time.monotonic() < deadline:
                pretend_signals(pads, self._shard.rank)
                torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Forget the group's name; the memory is freed with this object."""
        self._native._unregister_process_group(self._name)


def pretend_signals(pads: Sequence[Tensor], own: int) -> None:
    """Write on the ranks' signal pads that all took the signals of rank `own`, and that all have sent theirs to it.

    A pad has a number for each block of a kernel and each rank that signals: 1 while a signal is not taken.
    """
    size = len(pads)
    by_sender = [pad[: len(pad) // size * size].view(-1, size) for pad in pads]
    for rank in range(size):
        if rank != own:
            by_sender[own][:, rank].fill_(1)
            by_sender[rank][:, own].zero_()


def prepare(
    name: str, store: Any, backend: Any, shard: Shard, device: torch.device, agree: Agree
) -> SymmetricSums | None:
    """Set symmetric memory up on all ranks, check it, and return it; None if NCCL computes all sums.

    Each rank calls this. Either all of them get it or none does. GPUs that cannot do it are no fallback; one is noted
    if they can and it fails.
    """
    with _current(device):
        return _prepared(name, store, backend, shard, device, agree)


def _prepared(
    name: str, store: Any, backend: Any, shard: Shard, device: torch.device, agree: Agree
) -> SymmetricSums | None:
    reason = _unavailable(shard, device)
    if not agree(not reason):
        logger.info("NCCL computes all sums over ranks: %s", reason or "another rank cannot do otherwise")
        return None
    sums, error = None, None
    try:
        sums = SymmetricSums(name, store, backend, shard, device)
    except Exception as failed:
        error = failed
    if agree(sums is not None):
        assert sums is not None
        sums.has_multimem = agree(sums.has_multimem)
        try:
            sums.check()
        except TimeoutError:
            raise  # no later kernel of this device would end either
        except Exception as failed:
            error = failed
        if agree(error is None):
            kinds = "one shot and multimem" if sums.has_multimem else "one shot"
            logger.info("sums of up to %d KiB over ranks are computed in symmetric memory: %s", sums._most >> 10, kinds)
            return sums
    if sums is not None:
        sums.close()
    fallbacks.note(FALLBACK, error or RuntimeError("another rank could not set symmetric memory up"))
    return None


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one: torch's kernels of symmetric memory are launched on that, whatever holds tensors."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def _unavailable(shard: Shard, device: torch.device) -> str:
    """Return why the group's GPUs cannot sum so; empty: they can."""
    if os.environ.get(VARIABLE) != "1":
        return f"{VARIABLE} is not 1"
    if shard.size not in ONE_SHOT_BYTES:
        return f"symmetric memory is used by 2, 4 or 8 ranks, not by {shard.size}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU does not add bfloat16"
    own = device.index or 0
    peers = [own + rank - shard.rank for rank in range(shard.size)]  # ranks use consecutive GPUs
    if not all(peer == own or torch.cuda.can_device_access_peer(own, peer) for peer in peers):
        return "the GPUs cannot read each other's memory"
    return ""


def _registered(native: Any, name: str, store: Any, backend: Any, shard: Shard, device: torch.device) -> Any:
    """Make the group known by its name, by which torch's kernels look it up, and return it.

    They use its store and its ranks alone.
    """
    own_store = _c10d.PrefixStore("symmetric", store)
    own_store.set_timeout(timedelta(seconds=_SECONDS))
    group = _c10d.ProcessGroup(own_store, shard.rank, shard.size)
    group._register_backend(device, _c10d.ProcessGroup.BackendType.NCCL, backend)
    group._set_group_name(name)
    native._register_process_group(name, group)
    return group
