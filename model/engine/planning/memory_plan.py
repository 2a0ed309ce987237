"""The CPU memory that a model needs, planned from config.json and the headers of its files before a weight is read.

    while it loads:   weights in their final form + one buffer          (`WeightPlan`)
    while it serves:  weights + scratch of the C stacks + KV pool       (`plan_memory`)

The KV pool has `kv_cache_memory` bytes, else a quarter of what the weights leave, at most 1 GiB. The context is that of
the settings, else the longest that the pool holds. A model that does not fit is a `ConfigError` that says what would.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch

from triptych.model.api.engine_config import BatchLimits, EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.attention.reference import ReferenceBackend
from triptych.model.checkpoint.folder import Checkpoint
from triptych.model.checkpoint.tensor_sources import tensor_sources
from triptych.model.config.formats import FORMATS
from triptych.model.config.model import ModelConfig
from triptych.model.engine.planning.cache_budget import KVLayout, fit_context, least_context, max_context
from triptych.model.engine.planning.kernels import choose_dtype
from triptych.model.errors import ConfigError, MemoryShortageError
from triptych.model.linear.base import linears
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.build import build_model, plain_parameters, tensor_shapes
from triptych.model.network.native_stack import NativeStack, native_linears
from triptych.model.network.parameter_counts import part_of
from triptych.model.network.weights import TOKEN_TABLES, kept_table_dtype, largest_in_flight, plan_tensors
from triptych.model.system.devices import has_fast_bf16

DEFAULT_POOL = 1 << 30  # bytes
_POOL_SHARE = 4  # the pool takes this fraction of what the weights leave, so models loaded later find memory too
_PLANNED = tuple(name for name, one in FORMATS.items() if one.is_planned)
_NATIVE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The weights of one rank, in bytes."""

    parts: dict[str, int]  # in their final form
    buffer: int  # tensors that are read before they are converted

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def plan_weights(checkpoint: Checkpoint, linear: LinearFactory) -> WeightPlan:
    """Plan the weights of a network, or of one rank, with the projections that `linear` makes.

    Raises `CheckpointError` if the tensors of the files do not match the network.
    """
    config, backend = checkpoint.config, ReferenceBackend()
    model = whole = build_model(config, backend, replace(linear, collective=None))
    if linear.collective is not None:
        model = build_model(config, backend, linear)
    stored = tensor_sources(checkpoint)
    plan = plan_tensors(config, stored, tensor_shapes(whole), checkpoint.described_by)
    table = kept_table_dtype(stored, plan, linear)
    parts: Counter[str] = Counter()
    for name, parameter in plain_parameters(model).items():
        dtype = table if name in TOKEN_TABLES else linear.dtype
        parts[part_of(name)] += parameter.numel() * dtype.itemsize
    for projection in linears(model):  # a tied head that is rounded is a copy of the table
        parts[part_of(projection.spec.name)] += projection.nbytes
    return WeightPlan({part: size for part, size in parts.items() if size}, largest_in_flight(stored, plan))


def plan_pool(engine: EngineConfig, left: int) -> int:
    """Return the bytes of each rank's KV pool if the weights of all ranks leave `left` of a CPU's memory."""
    if engine.kv_cache_memory is not None:
        return engine.kv_cache_memory
    return max(0, min(DEFAULT_POOL, left // _POOL_SHARE)) // engine.tensor_parallel_size


def plan_memory(
    name: str,
    engine: EngineConfig,
    checkpoint: Checkpoint,
    linear: LinearFactory,
    limits: BatchLimits,
    available: int,
    scratch: int = 0,
    draft_token_bytes: int = 0,
) -> int:
    """Return the bytes of each rank's KV pool on a CPU with `available` bytes.

    `scratch`: the other memory of the largest step (`triptych.model.network.native_scratch`), with a draft model's
    weights. `draft_token_bytes`: a token in the draft model's KV cache.
    Raises `ConfigError` if the model does not fit: a `MemoryShortageError` if more memory would help.
    """
    config, ranks = checkpoint.config, engine.tensor_parallel_size
    weights = plan_weights(checkpoint, linear)
    loading, serving = ranks * (weights.total + weights.buffer), ranks * weights.total + scratch
    if loading > available:
        raise MemoryShortageError(
            f"{name}: its weights take {gib(ranks * weights.total)} as {linear}, "
            f"of {gib(available)} that are available; " + _formats_that_fit(checkpoint, linear, available // ranks),
            loading,
            available,
        )
    left = max(0, available - serving)
    pool = plan_pool(engine, left)
    if not config.can_generate:
        return 0
    kv = KVLayout.of(engine, config, linear.dtype, limits, draft_token_bytes)
    most = max_context(engine, config, limits)
    try:
        context = fit_context(engine, most, kv, pool)
    except ConfigError as error:
        if engine.kv_cache_memory is not None:
            raise ConfigError(f"{name}: {error}") from None
        needed = serving + _POOL_SHARE * ranks * kv.bytes_for(least_context(engine, most))
        raise MemoryShortageError(f"{name}: {error}", max(loading, needed), available) from None
    used = ranks * min(pool, kv.bytes_for(context.tokens, limits.max_num_seqs))
    if used > left:
        raise MemoryShortageError(
            f"{name}: a KV pool of {gib(used)} does not fit with weights of {gib(ranks * weights.total)}: "
            f"{gib(left)} are left, for a context of {kv.context_in(left // ranks)} at most; lower kv_cache_memory",
            max(loading, serving + used),
            available,
        )
    return pool


def plan_share(spec: ModelSpec, checkpoint: Checkpoint, linear: LinearFactory, draft_weights: int = 0) -> None:
    """Raise `MemoryShortageError` if the weights, with a draft model's, exceed `spec.memory` of the GPUs."""
    needed = spec.engine.tensor_parallel_size * plan_weights(checkpoint, linear).total + draft_weights
    if spec.memory is not None and needed > spec.memory:
        raise MemoryShortageError(
            f"{spec.name}: its weights take {gib(needed)} as {linear}, of {gib(spec.memory)} that it may take",
            needed,
            spec.memory,
        )


def _formats_that_fit(checkpoint: Checkpoint, linear: LinearFactory, available: int) -> str:
    """Return the number formats that would fit, for the end of an error; only those that this machine computes."""
    others = [replace(linear, dtype=torch.bfloat16)]
    if linear.native:
        others = [native_linears(checkpoint.config, torch.bfloat16, linear.library)]
        if can_quantise(checkpoint.config):
            dtype = torch.bfloat16 if has_fast_bf16() else torch.float32
            others += [native_linears(checkpoint.config, dtype, linear.library, quantization=name) for name in _PLANNED]
    sizes = {str(other): plan_weights(checkpoint, other).total for other in others if str(other) != str(linear)}
    fitting = [f"{other} ({gib(size)})" for other, size in sizes.items() if size < available]
    if fitting:
        return f"what would fit: {', '.join(fitting)}"
    least = min(sizes, key=lambda other: sizes[other], default=None)
    return "no number format fits" + (f", {least} takes {gib(sizes[least])}" if least is not None else "")


def cpu_formats(config: ModelConfig) -> dict[str, LinearFactory]:
    """Return the number formats in which the C stacks compute a model, by name."""
    formats = {name: native_linears(config, dtype, None) for name, dtype in _NATIVE_DTYPES.items()}
    if can_quantise(config):
        own = choose_dtype("auto", config, torch.device("cpu")).dtype
        for name in _PLANNED:
            formats[name] = native_linears(config, own, None, quantization=name)
    return formats


def can_quantise(config: ModelConfig) -> bool:
    """Whether the C stacks compute the whole model; other matrices cannot be quantised."""
    return all(NativeStack.unsupported(stack) is None for stack in config.stacks.values())


def gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
