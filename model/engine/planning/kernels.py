"""Chooses what computes a model: the dtype, the attention kernels of each layer, and the kernels of the projections."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from triptych.model.api.engine_config import EngineConfig
from triptych.model.attention.selection import Selection, select_backend, select_layers
from triptych.model.config.formats import QUANTIZED_LAYERS, NumberFormat
from triptych.model.config.model import ModelConfig
from triptych.model.config.sharding import Shard
from triptych.model.engine.planning.cache_budget import kv_dtype
from triptych.model.errors import ConfigError
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.fp8 import unsupported as fp8_unsupported
from triptych.model.linear.integers import unsupported
from triptych.model.network.native_stack import NativeStack, native_linears
from triptych.model.parallel.group import Group
from triptych.model.system.devices import has_fast_bf16
from triptych.model.system.kernel_faults import NO_FAULTS, Faults

# -- Integer weights on a GPU, multiplied by Triton.


def integer_projections(
    engine: EngineConfig, config: ModelConfig, device: torch.device, backend_reason: str
) -> tuple[tuple[str, NumberFormat], ...] | None:
    """Patterns of the projections that are rounded to integers; None where what is stored so cannot stay so either.

    Raises `ConfigError` where integers were asked for; `backend_reason` says why C does not compute the model.
    """
    missing = unsupported(device)
    if device.type == "cpu" and engine.attention_backend != "triton":
        missing = "on a CPU C multiplies integers"
    if engine.quantization not in QUANTIZED_LAYERS:
        return None if missing is not None else ()
    if missing is not None:
        raise ConfigError(
            f"quantization {engine.quantization} needs the native backend, or a GPU and Triton: {missing}, "
            f"and {backend_reason}"
        )
    refuse_experts(engine, config)
    in_layers, in_head = QUANTIZED_LAYERS[engine.quantization]
    return (*((f"{stack}.layers.*", in_layers) for stack in config.stacks), ("head", in_head))


# -- The kernels of a model: the attention of each layer and the projections. A setting that this machine cannot follow
# is a `ConfigError`, before a weight is read.


def select_kernels(
    engine: EngineConfig, config: ModelConfig, device: torch.device, dtype: torch.dtype, faults: Faults = NO_FAULTS
) -> Selection:
    """Return the attention backend of each layer, without broken kernels; C stacks cannot be split over ranks."""
    if engine.tensor_parallel_size == 1 or device.type != "cpu":
        found = select_backend(device, dtype, engine.attention_backend, faults)
        own = Shard(0, engine.tensor_parallel_size).config(config)
        return select_layers(found, own, dtype, kv_dtype(engine, dtype))
    reason = f"the native stacks run on one rank, tensor_parallel_size is {engine.tensor_parallel_size}"
    if engine.attention_backend == "native":
        raise ConfigError(f"attention_backend native cannot be had: {reason}")
    return replace(select_backend(device, dtype, "sdpa"), reason=f"torch scaled_dot_product_attention: {reason}")


def stacks_of_torch(config: ModelConfig) -> dict[str, str]:
    """Return the names of stacks whose layers C does not compute, each with the reason."""
    reasons = {name: NativeStack.unsupported(stack) for name, stack in config.stacks.items() if stack.layers}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def check_kernels(engine: EngineConfig, config: ModelConfig, selection: Selection) -> None:
    """Raise `ConfigError` for settings that need the C kernels, if those do not compute the model."""
    if engine.quantization == "fp8" and selection.library is not None:
        raise ConfigError(
            "quantization fp8 is for GPUs of compute capability 8.9 and later; a CPU serves int8 and int4"
        )
    if selection.library is not None:
        left = stacks_of_torch(config)
        if left and engine.quantization != "none":
            raise ConfigError(
                f"quantization {engine.quantization}: the native kernels do not compute the {' and the '.join(left)} "
                f"of {config.model_type}, whose matrices would stay as they are ({'; '.join(left.values())}): leave it "
                "at none for this model"
            )
        if left and engine.batch_invariant:
            raise ConfigError(
                f"batch_invariant: the native kernels do not compute {config.model_type}: {'; '.join(left.values())}"
            )
        if config.adapters is not None and engine.batch_invariant:
            raise ConfigError(f"batch_invariant: the native kernels do not compute the adapters of {config.model_type}")
        return
    if engine.batch_invariant:
        raise ConfigError(f"batch_invariant needs the native backend; {selection.reason}")


def linears_of(
    engine: EngineConfig, config: ModelConfig, selection: Selection, dtype: torch.dtype, device: torch.device
) -> LinearFactory:
    """Return the factory of a model's projections, which decides number format, C or torch, and ranks."""
    if selection.library is not None:
        return native_linears(
            config,
            dtype,
            selection.library,
            quantization=engine.quantization,
            batch_invariant=engine.batch_invariant,
        )
    ranks = engine.tensor_parallel_size
    return LinearFactory(
        dtype,
        device,
        quantization=engine.quantization if engine.quantization in QUANTIZED_LAYERS else "none",
        fp8=fp8_projections(engine, config, device),
        integers=integer_projections(engine, config, device, selection.reason),
        collective=Group(Shard(0, ranks), device) if ranks > 1 else None,
    )


# -- Choice of the dtype that a model is computed in on its device; the reason is shown at start and in /info.

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
    it (`ModelConfig.float16_overflows`) is computed in float32. So are vectors of tokens without a network.
    """
    if name != "auto":
        if name not in _DTYPES:
            raise ConfigError(f"dtype {name!r} is not served; served are {', '.join(_DTYPES)}")
        return ComputeDtype(_DTYPES[name], "asked for")
    if not any(stack.layers for stack in config.stacks.values()):
        return ComputeDtype(torch.float32, "nothing is multiplied")
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


def fp8_projections(engine: EngineConfig, config: ModelConfig, device: torch.device) -> tuple[str, ...] | None:
    """Return patterns of the projections to quantise to fp8; None if stored fp8 must be converted too."""
    missing = _without_fp8(engine, device)
    if engine.quantization != "fp8":
        return None if missing is not None else ()
    if missing is not None:
        raise ConfigError(
            f"quantization fp8 needs a GPU of compute capability 8.9 or later and Triton: {missing}; "
            "a CPU serves int8 and int4"
        )
    refuse_experts(engine, config)
    return tuple(f"{stack}.layers.*" for stack in config.stacks)


def refuse_experts(engine: EngineConfig, config: ModelConfig) -> None:
    """Raise `ConfigError` for a model with experts: no GPU kernel here multiplies quantised experts."""
    if config.has_experts:
        raise ConfigError(
            f"quantization {engine.quantization}: a GPU multiplies the experts of {config.model_type} in floats alone; "
            "leave it at none for this model"
        )


def _without_fp8(engine: EngineConfig, device: torch.device) -> str | None:
    """Return why fp8 cannot be computed here, else None; a CPU computes it in Triton's interpreter alone."""
    if device.type == "cpu" and engine.attention_backend != "triton":
        return "a CPU does not multiply fp8"
    return fp8_unsupported(device)


def check_kv_dtype(engine: EngineConfig, device: torch.device) -> None:
    """Raise `ConfigError` if the device cannot use the KV cache's dtype."""
    if engine.kv_cache_dtype == "fp8" and (missing := _without_fp8(engine, device)) is not None:
        raise ConfigError(
            f"kv_cache_dtype fp8 needs a GPU of compute capability 8.9 or later and Triton: {missing}; int8 is served"
        )
