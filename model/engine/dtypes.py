"""Choice of the dtype that a model is computed in on its device; the reason is shown at start and in /info."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model.config.model import ModelConfig
from model.errors import ConfigError
from model.system.devices import has_fast_bf16

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_AMPERE = (8, 0)  # the first compute capability that multiplies in bfloat16


@dataclass(frozen=True, slots=True)
class ComputeDtype:
    """The dtype of weights, activations and (unless set otherwise) the KV cache, with the reason for it."""

    dtype: torch.dtype
    reason: str


def choose_dtype(name: str, config: ModelConfig, device: torch.device) -> ComputeDtype:
    """Return the dtype of the setting `dtype` for this model and device; raises `ConfigError` for an unknown name.

    `auto` depends on the device, not on the checkpoint's dtype: many BERT, BART, T5 and GPT-2 files are float32, which
    tensor cores do not multiply. On a CPU it is bfloat16 if the CPU multiplies that faster, else float32. On a GPU it
    is bfloat16 from compute capability 8.0 on. Older GPUs have only float16; there a model whose activations overflow
    it (`ModelConfig.float16_overflows`) is computed in float32.
    """
    if name != "auto":
        if name not in _DTYPES:
            raise ConfigError(f"dtype {name!r} is not served; served are {', '.join(_DTYPES)}")
        return ComputeDtype(_DTYPES[name], "asked for")
    if device.type == "cpu":
        if has_fast_bf16():
            return ComputeDtype(torch.bfloat16, "this CPU multiplies in it")
        return ComputeDtype(torch.float32, "this CPU does not multiply in bfloat16")
    major, minor = torch.cuda.get_device_capability(device)
    gpu = f"compute capability {major}.{minor}"
    if (major, minor) >= _AMPERE:
        return ComputeDtype(torch.bfloat16, gpu)
    if config.float16_overflows:
        return ComputeDtype(torch.float32, f"{gpu} has no bfloat16, and {config.model_type} leaves float16's range")
    return ComputeDtype(torch.float16, f"{gpu} has no bfloat16")
