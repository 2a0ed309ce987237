"""What ranks compute together: sums, concatenations and broadcasts by torch.distributed, Gloo on CPUs and NCCL on GPUs.

A group is an object, not torch's default group: a process may hold ranks of several models. Ranks find each other
through a file in memory that only their processes have, and Gloo and NCCL listen on the loopback interface alone.
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

from model.config.sharding import Range, Shard

_c10d: Any = torch.distributed  # its annotations know little of what its backends can do
TIMEOUT_SECONDS = 60.0  # a rank that hangs (one that dies is noticed at once) is waited for so long


class Group:
    """One rank's end. Every call is made by all ranks, with tensors of the same shapes on their own devices.

    Raises `RuntimeError` where another rank is gone or hangs.
    """

    def __init__(self, shard: Shard, device: torch.device) -> None:
        self.shard = shard
        self.device = device
        self._backend: Any = None

    def connect(self, rendezvous: int) -> None:
        """Meet the other ranks, which do the same; `rendezvous` is the descriptor of a file that they share."""
        store = _c10d.FileStore(f"/proc/self/fd/{rendezvous}", self.shard.size)
        self._backend = (_nccl if self.device.type == "cuda" else _gloo)(store, self.shard)
        self.sum(torch.zeros(1, device=self.device))  # connections and buffers are made by the first call

    def abort(self) -> None:
        """End what waits for a rank that is gone: sums of Gloo raise by themselves, those of NCCL wait."""
        if self._backend is not None and self.device.type == "cuda":
            self._backend.abort()

    def close(self) -> None:
        """Leave the group; idempotent. A backend that outlives the interpreter's last statement aborts it."""
        self.abort()
        self._backend = None

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all ranks, in place; the same bits on each."""
        self._open.allreduce(tensor).wait()
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor into everyone's."""
        self._open.broadcast(tensor, 0).wait()
        return tensor

    def concatenate(self, part: Tensor, ranges: Sequence[Range]) -> Tensor:
        """`[N, V]` of each rank's columns `[N, last - first]`, which may differ by a few."""
        width = max(last - first for first, last in ranges)
        padded = pad(part, (0, width - part.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in ranges]
        self._open.allgather([parts], [padded]).wait()
        return torch.cat([found[:, : last - first] for found, (first, last) in zip(parts, ranges, strict=True)], dim=-1)

    @property
    def _open(self) -> Any:
        if self._backend is None:
            raise RuntimeError("the group of ranks is not connected")
        return self._backend


def _gloo(store: Any, shard: Shard) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=TIMEOUT_SECONDS)
    return _c10d.ProcessGroupGloo(store, shard.rank, shard.size, options)


def _nccl(store: Any, shard: Shard) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are of this machine
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=TIMEOUT_SECONDS)
    return _c10d.ProcessGroupNCCL(store, shard.rank, shard.size, options)
