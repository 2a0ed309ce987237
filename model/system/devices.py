"""Selection of the device that a model is computed on, and detection of the CPU's bfloat16 support."""

from __future__ import annotations

from functools import cache

import torch

from model.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """Return the device of the setting `device` (auto, cpu, cuda[:N]); raises `ConfigError` if it is not usable."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be auto, cpu or cuda[:N], found {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but this machine has no usable CUDA device")
    return device


def has_fast_bf16() -> bool:
    """Return whether this CPU has bfloat16 products: AVX-512 BF16 or AMX."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@cache
def processors(device: torch.device) -> int:
    """Return the number of a GPU's streaming multiprocessors; of a CPU, whose interpreter plays an H200, 132."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
