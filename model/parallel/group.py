"""Collective operations of tensor parallel ranks by torch.distributed: Gloo on CPUs, NCCL on GPUs.

Sums on GPUs that share memory are NCCL's only if they are large (`triptych.model.parallel.symmetric_sums`).

A group is an object, not torch's default group, since a process may hold ranks of several models. The rendezvous is a
file in memory whose descriptor only the ranks' processes have. Gloo and NCCL listen on the loopback interface alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn.functional import pad

from triptych.model.config.sharding import Range, Shard
from triptych.model.parallel.symmetric_sums import SymmetricSums, prepare

_c10d: Any = torch.distributed  # untyped: its annotations lack most of the backends' interface
TIMEOUT_SECONDS = 60.0  # for a rank that hangs; one that ends is detected at once


class Group:
    """One rank's handle of its group. All ranks make each call, with tensors of equal shapes on their own devices.

    A call raises `RuntimeError` if another rank has ended or hangs.
    """

    def __init__(self, shard: Shard, device: torch.device) -> None:
        self.shard = shard
        self.device = device
        self._backend: Any = None
        self._symmetric: SymmetricSums | None = None

    def connect(self, rendezvous: int) -> None:
        """Connect all ranks; each must call this. `rendezvous` is the descriptor of a file that they share."""
        store = _c10d.FileStore(f"/proc/self/fd/{rendezvous}", self.shard.size)
        self._backend = (_nccl if self.device.type == "cuda" else _gloo)(store, self.shard)
        self.sum(torch.zeros(1, device=self.device))  # the first call creates connections and buffers
        if self.device.type == "cuda":
            name = f"triptych-{os.fstat(rendezvous).st_ino}"  # the same on every rank, another for each group
            self._symmetric = prepare(name, store, self._backend, self.shard, self.device, self.agree)

    def abort(self) -> None:
        """Abort operations that wait for a rank that has ended: Gloo's raise by themselves, a GPU's would hang."""
        if self._symmetric is not None:
            self._symmetric.release()
        if self._backend is not None and self.device.type == "cuda":
            self._backend.abort()

    def close(self) -> None:
        """Leave the group; idempotent. Without it the backend may abort the interpreter when that exits."""
        if self._symmetric is not None:
            self._symmetric.close()
        if self._backend is not None and self.device.type == "cuda":
            self._backend.abort()
        self._backend = self._symmetric = None

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks (all-reduce), in the tensor or in a new one; its bits are the same on each."""
        summed = self._symmetric.sum(tensor) if self._symmetric is not None else None
        if summed is not None:
            return summed
        self._connected.allreduce(tensor).wait()
        return tensor

    def agree(self, so: bool) -> bool:
        """Return whether `so` is true on every rank; waits for the device."""
        flags = torch.tensor([1.0 if so else 0.0], device=self.device)
        self._connected.allreduce(flags).wait()
        return int(flags.item()) == self.shard.size

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Copy rank 0's tensor into those of the other ranks."""
        self._connected.broadcast(tensor, 0).wait()
        return tensor

    def concatenate(self, part: Tensor, ranges: Sequence[Range]) -> Tensor:
        """Concatenate each rank's columns `[N, last - first]` to `[N, V]` (all-gather); their numbers may differ."""
        width = max(last - first for first, last in ranges)
        padded = pad(part, (0, width - part.shape[-1]))
        parts = self.stack(padded.flatten()).view(len(ranges), *padded.shape)
        columns = [rank_part[:, : last - first] for rank_part, (first, last) in zip(parts, ranges, strict=True)]
        return torch.cat(columns, dim=-1)

    def stack(self, part: Tensor) -> Tensor:
        """Stack each rank's numbers `[N]` to `[ranks, N]` (all-gather)."""
        stacked = part.new_empty(self.shard.size * len(part))
        self._connected._allgather_base(stacked, part.contiguous()).wait()
        return stacked.view(self.shard.size, len(part))

    @property
    def _connected(self) -> Any:
        if self._backend is None:
            raise RuntimeError("the group of ranks is not connected")
        return self._backend


def _gloo(store: Any, shard: Shard) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=TIMEOUT_SECONDS)
    return _c10d.ProcessGroupGloo(store, shard.rank, shard.size, options)


def _nccl(store: Any, shard: Shard) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks run on this machine
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=TIMEOUT_SECONDS)
    return _c10d.ProcessGroupNCCL(store, shard.rank, shard.size, options)
