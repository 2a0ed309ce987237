"""Where weights in integers can be had without C: on a GPU, by Triton."""

from __future__ import annotations

import torch

from model.api.engine_config import EngineConfig
from model.config.formats import QUANTIZED_LAYERS, NumberFormat
from model.config.model import ModelConfig
from model.engine.fp8_settings import refuse_experts
from model.errors import ConfigError
from model.linear.integers import unsupported


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
