"""Which kernels compute a model: the attention of each layer and the projections.

What is asked for and cannot be had here is refused with a `ConfigError`, before a weight is read.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from model.api.engine_config import EngineConfig
from model.attention.selection import Selection, select_backend, select_layers
from model.config.formats import QUANTIZED_LAYERS
from model.config.model import ModelConfig
from model.config.sharding import Shard
from model.engine.cache_budget import kv_dtype
from model.engine.fp8_settings import fp8_projections
from model.engine.integer_settings import integer_projections
from model.errors import ConfigError
from model.linear.factory import LinearFactory
from model.network.native_stack import NativeStack, native_linears
from model.parallel.group import Group


def select_kernels(engine: EngineConfig, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Selection:
    """The backend of each layer; stacks in C have no sums over ranks in them."""
    if engine.tensor_parallel_size == 1 or device.type != "cpu":
        found = select_backend(device, dtype, engine.attention_backend)
        own = Shard(0, engine.tensor_parallel_size).config(config)
        return select_layers(found, own, dtype, kv_dtype(engine, dtype))
    reason = f"the native stacks run on one rank, tensor_parallel_size is {engine.tensor_parallel_size}"
    if engine.attention_backend == "native":
        raise ConfigError(f"attention_backend native cannot be had: {reason}")
    return replace(select_backend(device, dtype, "sdpa"), reason=f"torch scaled_dot_product_attention: {reason}")


def check_kernels(engine: EngineConfig, config: ModelConfig, selection: Selection) -> None:
    """Refuse what only the native kernels can do where they are not, or do not compute the model."""
    if engine.quantization == "fp8" and selection.library is not None:
        raise ConfigError(
            "quantization fp8 is for GPUs of compute capability 8.9 and later; a CPU serves int8 and int4"
        )
    if selection.library is not None:
        reasons = {name: NativeStack.unsupported(stack) for name, stack in config.stacks.items()}
        left = {name: reason for name, reason in reasons.items() if reason is not None}
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
    """What makes the projections of a model here: in which number format, in C or by torch, over how many ranks."""
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
