"""From the host to where a model lives, without waiting for what runs there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def device_tensor(values: Sequence[float] | Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The values as a tensor on `device`."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`: the copy, from pinned memory, is in order with what follows but not awaited."""
    if device.type != "cuda":
        return host.to(device)
    return (host if host.is_pinned() else host.pin_memory()).to(device, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, of one dtype, dense on the host: from a device all in one copy, which waits once."""
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.contiguous() for tensor in tensors]
    flat = HostCopy(torch.cat([tensor.reshape(-1) for tensor in tensors])).get()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class HostCopy:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))  # else of the current device

    def get(self) -> Tensor:
        """It, once it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
