"""Which backend a model runs on here, and why; the reason is shown at start-up and in /info."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model.attention.base import AttentionBackend
from model.attention.native import NativeBackend
from model.attention.sdpa import SdpaBackend
from model.config import ConfigError
from model.native.library import Library, native


@dataclass(frozen=True, slots=True)
class Selection:
    backend: AttentionBackend
    reason: str
    library: Library | None = None  # what runs whole stacks in C


def select_backend(device: torch.device, dtype: torch.dtype = torch.float32, wanted: str = "auto") -> Selection:
    """The fastest backend that this device has; the reference backend is never selected, it is the tests' oracle.

    `wanted` is auto, native or sdpa; raises `ConfigError` where native cannot be had.
    """
    found = _native(device, dtype) if wanted != "sdpa" else "asked for"
    if isinstance(found, Library):
        return Selection(NativeBackend(found), found.description, found)
    if wanted == "native":
        raise ConfigError(f"the native backend cannot be had: {found}")
    return Selection(SdpaBackend(), f"torch scaled_dot_product_attention: {found}")


def _native(device: torch.device, dtype: torch.dtype) -> Library | str:
    if device.type != "cpu":
        return f"there is no native backend for {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the native kernels do not compute in {str(dtype).removeprefix('torch.')}"
    return native()
