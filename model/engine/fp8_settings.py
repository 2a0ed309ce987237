"""Where the settings for fp8 can be had: of weights and of the KV cache."""

from __future__ import annotations

import torch

from model.api.engine_config import EngineConfig
from model.config.model import ModelConfig
from model.errors import ConfigError
from model.linear.fp8 import unsupported


def fp8_projections(engine: EngineConfig, config: ModelConfig, device: torch.device) -> tuple[str, ...] | None:
    """Patterns of the projections that are quantised to fp8; None where what is stored so cannot stay so either."""
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
    """Raise `ConfigError` for a model with experts, which no kernel of a GPU multiplies in fewer bits."""
    if config.has_experts:
        raise ConfigError(
            f"quantization {engine.quantization}: a GPU multiplies the experts of {config.model_type} in floats alone; "
            "leave it at none for this model"
        )


def _without_fp8(engine: EngineConfig, device: torch.device) -> str | None:
    """Why fp8 is not computed with here; None: it is, on a CPU in Triton's interpreter where that was asked for."""
    if device.type == "cpu" and engine.attention_backend != "triton":
        return "a CPU does not multiply fp8"
    return unsupported(device)


def check_kv_dtype(engine: EngineConfig, device: torch.device) -> None:
    """Raise `ConfigError` where pages of the KV cache cannot have the dtype that was asked for."""
    if engine.kv_cache_dtype == "fp8" and (missing := _without_fp8(engine, device)) is not None:
        raise ConfigError(
            f"kv_cache_dtype fp8 needs a GPU of compute capability 8.9 or later and Triton: {missing}; int8 is served"
        )
