"""A checkpoint folder and settings become running engines: device, dtype and pool size are decided here, once."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model.api.engine_config import BatchLimits, EngineConfig
from model.api.messages import ModelSpec
from model.api.stats import CachePool, ModelInfo
from model.attention.selection import Selection
from model.checkpoint.folder import Checkpoint, errors_about, read_checkpoint
from model.config.model import ModelConfig
from model.config.sharding import Shard
from model.engine.cache_budget import max_context
from model.engine.drafting import DraftPlan, plan_draft
from model.engine.encode_engine import EncodeEngine
from model.engine.execution.model_runner import ModelRunner
from model.engine.first_token import compute_first_token
from model.engine.fp8_settings import check_kv_dtype
from model.engine.generate_builder import (
    Drafting,
    build_generate_engine,
    measure_pool,
    plan_cache,
    unrecordable,
)
from model.engine.generate_engine import GenerateEngine
from model.engine.kernels import check_kernels, choose_dtype, linears_of, select_kernels
from model.engine.memory_plan import plan_memory, plan_share
from model.engine.model_info import describe_model, weight_bytes
from model.engine.stored_weights import conversions
from model.engine.warmup import warm_up
from model.engine.weights_cache import find_packed, weights_cache_use
from model.errors import ConfigError
from model.linear.factory import LinearFactory
from model.network.activation_dump import dump_folder
from model.network.adapters import load_adapters
from model.network.native_scratch import planned_scratch
from model.network.native_stack import attach_native_stacks
from model.network.packed_weights import PackedWeights
from model.network.transformer import Transformer
from model.network.weights import load_model
from model.parallel.rank0 import load_rank0, rank_processes_of
from model.system import fallbacks
from model.system.devices import resolve_device
from model.system.host_memory import available_memory

if TYPE_CHECKING:
    from model.parallel.rank_processes import RankProcesses

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to work; `generate` is None where it cannot."""

    info: ModelInfo
    encode: EncodeEngine
    generate: GenerateEngine | None
    rank_processes: RankProcesses | None = None  # the processes of the model's other ranks
    weight: float = 1.0  # its share of compute time, relative to other models

    def check(self) -> None:
        """Raise `EngineDeadError` if another rank is gone: what was computed since is worth nothing."""
        if self.rank_processes is not None:
            self.rank_processes.check()

    def close(self) -> None:
        """End what was started for it, and break reference cycles, so that its memory is free with the last reference.

        The model computes nothing any more then. The garbage collector need not find its cycles: it looks at nothing
        that is there when the engine process has started.
        """
        _close(self.encode.model)
        runner = self.generate.runner if self.generate is not None else None
        if isinstance(runner, ModelRunner) and runner.draft_model is not None:
            _close(runner.draft_model.model)


def load(spec: ModelSpec) -> LoadedModel:
    """Read the folder and build its engines; raises `ConfigError`, which names the model, if it cannot."""
    with errors_about(spec.name):
        return _load(spec)


def _load(spec: ModelSpec) -> LoadedModel:
    began = time.monotonic()
    checkpoint = read_checkpoint(Path(spec.path), pickle=spec.engine.pickle)
    device = resolve_device(spec.engine.device)
    dtype = choose_dtype(spec.engine.dtype, checkpoint.config, device).dtype
    _check_ranks(spec.engine, checkpoint.config, device)
    check_kv_dtype(spec.engine, device)
    limits = batch_limits(spec.engine, device)
    most = max_context(spec.engine, checkpoint.config, limits).tokens
    checkpoint = replace(checkpoint, config=checkpoint.config.stretched(most))
    selection = select_kernels(spec.engine, checkpoint.config, device, dtype)
    asked = spec.engine
    if selection.library is not None and spec.engine.quantization == "none":
        spec = replace(spec, engine=replace(spec.engine, quantization=checkpoint.quantization))
    check_kernels(spec.engine, checkpoint.config, selection)
    draft = plan_draft(spec.name, asked, checkpoint, device, limits, most)
    unrecorded = unrecordable(spec.engine, checkpoint.config.decoder, selection.backend, dtype, device)
    _check_fallbacks(spec.engine, slow_ways(spec.engine, selection, unrecorded, device))  # before a weight is read
    for warning in checkpoint.warnings:
        logger.warning("%s: %s", spec.name, warning)
    linear = linears_of(spec.engine, checkpoint.config, selection, dtype, device)
    for converted in conversions(checkpoint.config, linear):
        logger.warning("%s: %s", spec.name, converted)
    packed = find_packed(spec, checkpoint, selection.backend, linear)
    pool, scratch = None, 0
    if device.type == "cpu":
        pool, scratch = _plan_for_cpu(spec, checkpoint, linear, limits, most, packed, draft)
    elif spec.memory is not None:
        plan_share(spec, checkpoint, linear, draft.memory if draft is not None else 0)
    model = _load_model(spec, checkpoint, selection, linear, most) if packed is None else packed.load()
    try:
        loaded = assemble(spec, checkpoint, model, selection, pool, draft)
    except BaseException:
        _close(model)
        raise
    loaded.info.memory_bytes += scratch
    loaded.info.weights_cache = weights_cache_use(spec.engine, device, packed)
    loaded.info.load_seconds = time.monotonic() - began
    return loaded


def assemble(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    model: Transformer,
    selection: Selection,
    pool: int | None = None,
    draft: DraftPlan | None = None,
) -> LoadedModel:
    """The engines of a network that has its weights; `pool` bytes of each rank are KV, None: by what is free.

    A draft model is loaded here.
    """
    device = next(model.parameters()).device
    limits = batch_limits(spec.engine, device)
    context = max_context(spec.engine, checkpoint.config, limits)
    attach_native_stacks(model)
    encode = EncodeEngine(
        spec.name,
        model,
        device,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        sentences=checkpoint.sentences,
        images=checkpoint.images,
        adapters=load_adapters(checkpoint.config, checkpoint.weight_files, device)
        if checkpoint.config.adapters
        else None,
    )
    drafting = Drafting(_load_draft_model(draft), draft.context) if draft is not None else None
    generate, cache_pools = None, tuple[CachePool, ...]()
    if checkpoint.config.can_generate:
        if pool is None:
            pool = measure_pool(spec.engine, model, limits, context.tokens, device)
            if spec.memory is not None:
                weights = weight_bytes(model) + (weight_bytes(drafting.model) if drafting is not None else 0)
                pool = min(pool, max(0, spec.memory // spec.engine.tensor_parallel_size - weights))
        token_bytes = draft.token_bytes if draft is not None else 0
        plan = plan_cache(spec, checkpoint.config, model.dtype, limits, pool, token_bytes)
        limits, context, cache_pools = plan.limits, plan.context, plan.described
        generate = build_generate_engine(spec, checkpoint, model, plan, drafting)
    if device.type == "cuda":
        warm_up(encode, generate, context.tokens)
    compute_first_token(encode, generate)
    unrecorded = generate.runner.unrecorded if generate is not None and isinstance(generate.runner, ModelRunner) else ""
    slow = slow_ways(spec.engine, selection, unrecorded, device)
    for way in slow:
        logger.warning("%s is slower than it could be: %s", spec.name, way)
    _check_fallbacks(spec.engine, slow)
    if (folder := dump_folder()) is not None:
        model.dump_activations(folder / spec.name)
    info = describe_model(spec, checkpoint, model, selection, limits, context, generate)
    info.fallbacks, info.cache_pools = slow, cache_pools
    return LoadedModel(info, encode, generate, rank_processes_of(model), spec.engine.model_weight)


def slow_ways(engine: EngineConfig, selection: Selection, unrecorded: str, device: torch.device) -> tuple[str, ...]:
    """What was to run faster on this GPU than it does, and why; what was asked for is no such thing. `unrecorded`: why
    decode steps are no CUDA graphs, if they should be."""
    if device.type != "cuda":
        return ()
    slow = list(fallbacks.found())
    if engine.attention_backend == "auto" and not selection.backend.graph_safe:
        slow.append(f"attention is not Triton's: {selection.reason}")
    if unrecorded:
        slow.append(f"decode steps are launched kernel by kernel: {unrecorded}")
    return tuple(slow)


def _check_fallbacks(engine: EngineConfig, slow: tuple[str, ...]) -> None:
    if slow and engine.slow_fallbacks == "refuse":
        raise ConfigError(f"slow_fallbacks is refuse, and {slow[0]}")


def batch_limits(engine: EngineConfig, device: torch.device) -> BatchLimits:
    """Of an engine on this device: what is not set follows from a GPU's memory."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return engine.limits(memory)


def _check_ranks(engine: EngineConfig, config: ModelConfig, device: torch.device) -> None:
    """Refuse what cannot be split, before anything is read or started."""
    size = engine.tensor_parallel_size
    Shard(0, size).check(config)
    if size > 1 and config.adapters is not None:
        raise ConfigError(f"a model with adapters runs on one rank, tensor_parallel_size is {size}")
    first, visible = device.index or 0, torch.cuda.device_count()
    if size > 1 and device.type == "cuda" and first + size > visible:
        raise ConfigError(f"tensor_parallel_size {size} from {device} on needs more than the {visible} visible GPUs")


def _plan_for_cpu(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    linear: LinearFactory,
    limits: BatchLimits,
    context: int,
    packed: PackedWeights | None,
    draft: DraftPlan | None,
) -> tuple[int, int]:
    """Bytes of each rank's KV pool, and of scratch; raises `ConfigError` where the model does not fit."""
    scratch = 0
    if linear.library is not None:
        source = checkpoint.config.source_positions or 0  # which one step encodes, however many tokens a step takes
        rows, dtype = max(limits.max_num_batched_tokens, source), linear.dtype
        scratch = planned_scratch(
            linear.library, checkpoint.config, dtype, linear.quantization, rows=rows, context=max(context, source)
        )
    resident, others = (packed.resident, packed.others_in_use) if packed is not None else (0, 0)
    available = available_memory(mapped=resident + others) + resident  # what is there need not be found room for
    if spec.memory is not None:
        available = min(available, spec.memory)
    drafts = (draft.memory, draft.token_bytes) if draft is not None else (0, 0)
    pool = plan_memory(
        spec.name, spec.engine, checkpoint, linear, limits, available, scratch + drafts[0], draft_token_bytes=drafts[1]
    )
    return pool, scratch + (draft.scratch if draft is not None else 0)


def _load_model(
    spec: ModelSpec, checkpoint: Checkpoint, selection: Selection, linear: LinearFactory, max_model_len: int
) -> Transformer:
    """The network, or rank 0 of it with the others beside it."""
    if linear.collective is None:
        return load_model(checkpoint, selection.backend, linear)
    return load_rank0(spec.name, checkpoint, selection, linear, max_model_len=max_model_len, pickle=spec.engine.pickle)


def _load_draft_model(draft: DraftPlan) -> Transformer:
    model = load_model(draft.checkpoint, draft.selection.backend, draft.linear)
    attach_native_stacks(model)
    return model


def _close(model: Transformer) -> None:
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            stack.runner = None  # which refers to the stack
    if (rank_processes := rank_processes_of(model)) is not None:
        rank_processes.close()
