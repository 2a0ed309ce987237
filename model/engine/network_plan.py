"""Plans how a model is computed on this machine, before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from triptych.model.api.engine_config import BatchLimits, EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.attention.selection import Selection
from triptych.model.checkpoint.folder import Checkpoint, read_checkpoint
from triptych.model.config.model import ModelConfig
from triptych.model.config.sharding import Shard
from triptych.model.engine.planning.cache_budget import max_context
from triptych.model.engine.planning.kernels import (
    check_kernels,
    check_kv_dtype,
    choose_dtype,
    linears_of,
    select_kernels,
)
from triptych.model.engine.speculation.plan import DraftPlan, plan_draft
from triptych.model.errors import ConfigError
from triptych.model.linear.factory import LinearFactory
from triptych.model.system.devices import add_in_float32, resolve_device
from triptych.model.system.kernel_cache import use_kernel_cache


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """A checkpoint, and what computes it. All processes of a machine make the same plan of a spec."""

    spec: ModelSpec  # with the checkpoint's number format, if the settings name none
    checkpoint: Checkpoint
    device: torch.device
    limits: BatchLimits
    context: int  # the most tokens of a sequence, if memory allows
    selection: Selection
    linear: LinearFactory
    draft: DraftPlan | None


def plan_network(spec: ModelSpec) -> NetworkPlan:
    """Read a folder's settings and choose what computes it; raises `ConfigError`."""
    asked = spec.engine
    checkpoint = read_checkpoint(Path(spec.path), pickle=asked.pickle, pictures=asked.pictures)
    device = resolve_device(asked.device)
    if device.type == "cuda":
        use_kernel_cache()
        add_in_float32()
    checkpoint = _with_pictures_that_fit(checkpoint, asked, device)
    dtype = choose_dtype(asked.dtype, checkpoint.config, device).dtype
    _check_ranks(asked, checkpoint.config, device)
    check_kv_dtype(asked, device)
    limits = batch_limits(asked, device)
    context = max_context(asked, checkpoint.config, limits).tokens
    checkpoint = replace(checkpoint, config=checkpoint.config.stretched(context))
    selection = select_kernels(asked, checkpoint.config, device, dtype)
    if selection.library is not None and asked.quantization == "none":
        spec = replace(spec, engine=replace(asked, quantization=checkpoint.quantization))
    check_kernels(spec.engine, checkpoint.config, selection)
    draft = plan_draft(spec.name, asked, checkpoint, device, limits, context)
    linear = linears_of(spec.engine, checkpoint.config, selection, dtype, device)
    return NetworkPlan(spec, checkpoint, device, limits, context, selection, linear, draft)


def _with_pictures_that_fit(checkpoint: Checkpoint, engine: EngineConfig, device: torch.device) -> Checkpoint:
    """Return a checkpoint that reads pictures only if their tokens can be computed together where they must be."""
    pictures, config = checkpoint.pictures, checkpoint.config.pictures
    if pictures is not None and engine.tensor_parallel_size > 1:
        return checkpoint.without_pictures(f"tensor_parallel_size is {engine.tensor_parallel_size}")
    if pictures is None or config is None or not config.both_ways:
        return checkpoint
    if device.type == "cuda":
        return checkpoint.without_pictures("their tokens see each other both ways, which is computed on a CPU alone")
    rows, most = pictures.most_rows, batch_limits(engine, device).max_num_batched_tokens
    if rows > most:
        return checkpoint.without_pictures(f"max_num_batched_tokens is {most}, and one takes {rows} tokens of a step")
    return checkpoint


def batch_limits(engine: EngineConfig, device: torch.device) -> BatchLimits:
    """Return the limits on this device; unset ones follow from a GPU's memory."""
    if device.type != "cuda":
        return engine.limits()
    return engine.limits(int(torch.cuda.get_device_properties(device).total_memory * engine.gpu_share))


def _check_ranks(engine: EngineConfig, config: ModelConfig, device: torch.device) -> None:
    """Raise `ConfigError` for a model that cannot be split over the ranks."""
    size = engine.tensor_parallel_size
    Shard(0, size).check(config)
    if size > 1 and config.adapters is not None:
        raise ConfigError(f"a model with adapters runs on one rank, tensor_parallel_size is {size}")
    first, visible = device.index or 0, torch.cuda.device_count()
    if size > 1 and device.type == "cuda" and first + size > visible:
        raise ConfigError(f"tensor_parallel_size {size} from {device} on needs more than the {visible} visible GPUs")
