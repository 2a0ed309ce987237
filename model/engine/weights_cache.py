"""The weights cache by the settings of an engine: where it is used, and what became of it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from model.api.engine_config import EngineConfig
from model.api.messages import ModelSpec
from model.attention.base import AttentionBackend
from model.checkpoint.folder import Checkpoint
from model.checkpoint.weights_cache import WeightsCache
from model.linear.factory import LinearFactory
from model.network.packed_weights import PackedWeights
from model.system.background_work import wait_for

logger = logging.getLogger(__name__)


def find_packed(
    spec: ModelSpec, checkpoint: Checkpoint, backend: AttentionBackend, linear: LinearFactory
) -> PackedWeights | None:
    """Look for the model's weights in the cache; None without a cache, or where it is of no use.

    Raises `ConfigError` for a folder that others may write.
    """
    if spec.engine.weights_cache is None:
        return None
    if reason := no_weights_cache(spec.engine, linear.device):
        logger.info("%s: the weights cache is %s", spec.name, reason)
        return None
    cache = WeightsCache(Path(spec.engine.weights_cache), spec.engine.weights_cache_size, wait_for)
    return PackedWeights(cache, checkpoint, backend, linear)


def no_weights_cache(engine: EngineConfig, device: torch.device) -> str:
    """Why a weights cache is not used; empty: it is."""
    if device.type != "cpu":
        return f"not used: weights are on {device}"
    return "not used: the model is split over ranks" if engine.tensor_parallel_size > 1 else ""


def weights_cache_use(engine: EngineConfig, device: torch.device, packed: PackedWeights | None) -> str:
    """What became of the weights cache, for people; empty: there is none."""
    if packed is not None:
        return packed.outcome
    return no_weights_cache(engine, device) if engine.weights_cache is not None else ""
