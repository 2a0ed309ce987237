"""Chooses the device that computes a model, and copies between it and the host through pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from triptych.model.errors import ConfigError

# -- Selection of the device that a model is computed on, and detection of the CPU's bfloat16 support.


def resolve_device(name: str) -> torch.device:
    """Return the device of the setting `device` (auto, cpu, cuda[:N]); raises `ConfigError` if it is not usable."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but this machine has no usable CUDA device")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"device {name!r} was asked for, but this process sees {count} GPUs, counted from 0 (CUDA_VISIBLE_DEVICES)"
        )
    return device


def has_fast_bf16() -> bool:
    """Return whether this CPU has bfloat16 products: AVX-512 BF16 or AMX."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def add_in_float32() -> None:
    """Let a GPU's products of 16 bits add up in float32 everywhere in this process.

    By default cuBLAS may divide the inputs of a product over several programs and add their sums in 16 bits. It does so
    for some numbers of rows, so a token's numbers would depend on the other rows of a step.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


@cache
def has_triton(device: torch.device) -> bool:
    """Return whether Triton is installed and compiles for a GPU of this generation."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def processors(device: torch.device) -> int:
    """Return the number of a GPU's streaming multiprocessors; 132 for a CPU, which plays an H200 in tests."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


# -- Asynchronous copies between the host and a model's device, through pinned memory.


def device_tensor(values: Sequence[float] | Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the values as a tensor on `device`; the copy is not awaited."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device` from pinned memory, in the order of the current CUDA stream; does not wait."""
    if device.type != "cuda":
        return host.to(device)
    return (host if host.is_pinned() else host.pin_memory()).to(device, non_blocking=True)


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


class HostCopies:
    """Asynchronous copies of tensors of one dtype to the host; from a GPU they are one copy. A CPU's are not copied."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._here: list[Tensor] = []
        self._flat: HostCopy | None = None
        if tensors and tensors[0].device.type != "cpu":
            self._flat = HostCopy(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        else:
            self._here = [tensor.contiguous() for tensor in tensors]

    def get(self) -> list[Tensor]:
        """Wait for the copies and return contiguous host tensors."""
        if self._flat is None:
            return self._here
        parts = self._flat.get().split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
