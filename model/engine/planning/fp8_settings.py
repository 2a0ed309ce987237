"""Checks of the fp8 settings, for weights and for the KV cache."""

from __future__ import annotations

import torch

from triptych.model.api.engine_config import EngineConfig
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError
from triptych.model.linear.fp8 import unsupported


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
    return unsupported(device)


def check_kv_dtype(engine: EngineConfig, device: torch.device) -> None:
    """Raise `ConfigError` if the device cannot use the KV cache's dtype."""
    if engine.kv_cache_dtype == "fp8" and (missing := _without_fp8(engine, device)) is not None:
        raise ConfigError(
            f"kv_cache_dtype fp8 needs a GPU of compute capability 8.9 or later and Triton: {missing}; int8 is served"
        )
