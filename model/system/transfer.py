"""Asynchronous copies between the host and a model's device, through pinned memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def device_tensor(values: Sequence[float] | Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the values as a tensor on `device`; the copy is not awaited."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device` from pinned memory, in the order of the current CUDA stream; does not wait."""
    if device.type != "cuda":
        return host.to(device)
    return (host if host.is_pinned() else host.pin_memory()).to(device, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous copies on the host of tensors of one dtype; from a GPU in one copy, which waits once."""
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.contiguous() for tensor in tensors]
    flat = HostCopy(torch.cat([tensor.reshape(-1) for tensor in tensors])).get()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class HostCopy:
    """An asynchronous copy of a tensor to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensor.device))  # the default is the current device's stream

    def get(self) -> Tensor:
        """Wait for the copy and return the host tensor."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host
