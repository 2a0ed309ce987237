"""Which backend a model runs on here, and why; the reason is shown at start-up and in /info."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from model.attention.base import AttentionBackend
from model.attention.native import NativeBackend
from model.attention.sdpa import SdpaBackend
from model.errors import ConfigError
from model.native.library import Library, native
from model.system.fallbacks import summary

_AMPERE = (8, 0)  # the first with bfloat16 and asynchronous copies


@dataclass(frozen=True, slots=True)
class Selection:
    backend: AttentionBackend
    reason: str
    library: Library | None = None  # what runs whole stacks in C


def select_backend(device: torch.device, dtype: torch.dtype = torch.float32, wanted: str = "auto") -> Selection:
    """The fastest backend that this device has; the reference backend is never selected, it is the tests' oracle.

    `wanted` is auto, native, triton or sdpa; raises `ConfigError` where native or triton cannot be had.
    """
    found = _native(device, dtype) if wanted in ("auto", "native") else "asked for"
    if isinstance(found, Library):
        return Selection(NativeBackend(found), found.description, found)
    if wanted == "native":
        raise ConfigError(f"the native backend cannot be had: {found}")
    if wanted == "triton" or (wanted == "auto" and device.type == "cuda"):
        missing = _without_triton(device, dtype)
        if missing is None:
            return _triton()
        if wanted == "triton":
            raise ConfigError(f"the triton backend cannot be had: {missing}")
        found = missing
    return Selection(SdpaBackend(), f"torch scaled_dot_product_attention: {found}")


def _native(device: torch.device, dtype: torch.dtype) -> Library | str:
    if device.type != "cpu":
        return f"there is no native backend for {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the native kernels do not compute in {str(dtype).removeprefix('torch.')}"
    return native()


def _without_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton's kernels cannot run here; None: they can."""
    if find_spec("triton") is None:
        return "triton is not installed (it comes with PyTorch's CUDA build)"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < _AMPERE:
            return "the GPU is older than compute capability 8.0"
        return _tried(device, dtype)
    if device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        return f"there are no Triton kernels for {device.type} (tests run them there with TRITON_INTERPRET=1)"
    return None


def _tried(device: torch.device, dtype: torch.dtype) -> str | None:
    """Triton compiles at first use, which wants a C compiler for its driver's module and a folder for what it made:
    a machine without them shows it here and not in somebody's request."""
    from model.attention.triton import try_out

    try:
        try_out(device, dtype)
    except Exception as error:
        return f"triton does not work here: {summary(error)}"
    return None


def _triton() -> Selection:
    # Imported where it is used: a CPU's installation has no Triton.
    import triton

    from model.attention.triton import TritonBackend

    return Selection(TritonBackend(), f"triton {triton.__version__}: pages read in place")
