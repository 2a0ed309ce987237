"""Chooses the backend that computes each layer's attention; the reason is shown at start-up and in /info."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import torch

from triptych.model.attention.base import AttentionBackend
from triptych.model.attention.layer_backends import PerLayerBackend
from triptych.model.attention.native import NativeBackend
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.config.attention import AttentionConfig
from triptych.model.config.cache import PagedSpec
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError
from triptych.model.native.library import Library, native
from triptych.model.system import kernel_faults
from triptych.model.system.fallbacks import summary
from triptych.model.system.kernel_faults import NO_FAULTS, Faults

_AMPERE = (8, 0)  # the first with bfloat16 and asynchronous copies


@dataclass(frozen=True, slots=True)
class Selection:
    """A chosen backend, and why it was chosen."""

    backend: AttentionBackend
    reason: str
    library: Library | None = None  # runs whole stacks in C, if the backend is native
    preferred: str = ""  # the first choice, by the name that `select_backend` takes; some layers may have another
    faults: Faults = field(default_factory=dict)  # broken kernels, which torch replaces


def select_layers(found: Selection, config: ModelConfig, dtype: torch.dtype, cache_dtype: torch.dtype) -> Selection:
    """Choose a backend for each layer of a model: the found one, or torch's if that cannot compute the layer.

    `config` is that of this rank's network, `dtype` the network's, `cache_dtype` that of the decoder's pages.
    """
    preferred, chosen = found.backend, dict[AttentionConfig, AttentionBackend]()
    others: dict[str, list[str]] = {}  # layers by the reason
    for stack, index, layer in _attentions(config):
        reason = _unsupported(preferred, layer, dtype, cache_dtype if stack == "decoder" else None)
        broken = found.faults.get(kernel_faults.attention_part(layer))
        if reason is None and broken is not None:
            reason = f"the kernels of {preferred.name} failed their check here: {broken}"
        chosen[layer] = preferred if reason is None else SdpaBackend()
        if reason is not None:
            others.setdefault(reason, []).append(f"{stack} {index}")
    if not others:
        return replace(found, preferred=preferred.name)
    told = "; ".join(f"sdpa in {_layers(places)}, as {reason}" for reason, places in others.items())
    if all(backend is not preferred for backend in chosen.values()):
        only = f"torch scaled_dot_product_attention: {next(iter(others))}" if len(others) == 1 else told
        return replace(found, backend=SdpaBackend(), reason=only, preferred=preferred.name)
    return replace(found, backend=PerLayerBackend(chosen), reason=f"{found.reason}; {told}", preferred=preferred.name)


def _attentions(config: ModelConfig) -> Iterator[tuple[str, int, AttentionConfig]]:
    """Yield every attention of a model with its stack and layer."""
    for name, stack in config.stacks.items():
        for index, layer in enumerate(stack.layers):
            for attention in (layer.mixer, layer.cross):
                if isinstance(attention, AttentionConfig):
                    yield name, index, attention


def _unsupported(
    backend: AttentionBackend, layer: AttentionConfig, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> str | None:
    """Return why a layer cannot be computed over packed rows or, with a cache, over pages; None if it can."""
    reason = backend.unsupported(layer, dtype, None)
    if reason is not None or cache_dtype is None:
        return reason
    heads, dim, kind = layer.num_kv_heads, layer.head_dim, str(cache_dtype).removeprefix("torch.")
    return backend.unsupported(layer, dtype, PagedSpec(heads, dim, dim, kind, layer.window))


def _layers(places: Sequence[str]) -> str:
    """Return the layers as a text such as `decoder layers 1, 3`."""
    stacks: dict[str, list[str]] = {}
    for place in dict.fromkeys(places):
        stack, index = place.split()
        stacks.setdefault(stack, []).append(index)
    return " and ".join(f"{stack} layer{'s' * (len(found) > 1)} {', '.join(found)}" for stack, found in stacks.items())


def select_backend(
    device: torch.device, dtype: torch.dtype = torch.float32, wanted: str = "auto", faults: Faults | None = None
) -> Selection:
    """Return the fastest backend of this device, but never the reference backend, with which tests compare.

    `wanted` is auto, native, triton or sdpa; raises `ConfigError` if native or triton is not available. `faults` are
    the kernels known to be broken; None: nothing is known, and the smallest kernel is tried here.
    """
    found = _native(device, dtype) if wanted in ("auto", "native") else "asked for"
    if isinstance(found, Library):
        return Selection(NativeBackend(found), found.description, found)
    if wanted == "native":
        raise ConfigError(f"the native backend cannot be had: {found}")
    if wanted == "triton" or (wanted == "auto" and device.type == "cuda"):
        missing = _without_triton(device, dtype, faults)
        if missing is None:
            return _triton(faults or NO_FAULTS)
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


def _without_triton(device: torch.device, dtype: torch.dtype, faults: Faults | None) -> str | None:
    """Return why Triton's kernels cannot run here; None if they can."""
    if find_spec("triton") is None:
        return "triton is not installed (it comes with PyTorch's CUDA build)"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < _AMPERE:
            return "the GPU is older than compute capability 8.0"
    elif device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        return f"there are no Triton kernels for {device.type} (tests run them there with TRITON_INTERPRET=1)"
    if faults is None:
        return _tried(device, dtype) if device.type == "cuda" else None
    broken = faults.get(kernel_faults.TRITON)
    return None if broken is None else f"triton does not work here: {broken}"


def _tried(device: torch.device, dtype: torch.dtype) -> str | None:
    """Run the smallest kernel; return why that failed. Triton needs a C compiler and a folder for its cache:
    a machine without them fails here, not in a request."""
    from triptych.model.attention.triton import try_out

    try:
        try_out(device, dtype)
    except Exception as error:
        return f"triton does not work here: {summary(error)}"
    return None


def _triton(faults: Faults) -> Selection:
    # Imported where it is used: a CPU's installation has no Triton.
    import triton

    from triptych.model.attention.triton import TritonBackend

    return Selection(TritonBackend(faults), f"triton {triton.__version__}: pages read in place", faults=faults)
