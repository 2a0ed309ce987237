"""Loads a model: from a checkpoint folder and settings to running engines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from triptych.model.api.engine_config import BatchLimits, EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.stats import CachePool, ModelInfo
from triptych.model.attention.selection import Selection
from triptych.model.cache.kv_cache import promised_memory
from triptych.model.checkpoint.adapter_tensors import read_adapter
from triptych.model.checkpoint.folder import Checkpoint, errors_about
from triptych.model.engine.encode_engine import EncodeEngine
from triptych.model.engine.execution.cuda_graphs import BATCHES, DECODE_STEPS, CudaRecorder, recording
from triptych.model.engine.execution.encoder_graphs import EncoderGraphs, can_record_batches
from triptych.model.engine.execution.model_runner import ModelRunner
from triptych.model.engine.first_token import compute_first_token
from triptych.model.engine.generate_builder import (
    Drafting,
    build_generate_engine,
    measure_pool,
    picture_bytes,
    picture_patches,
    plan_cache,
    unrecordable,
)
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.engine.kernel_checks import checked
from triptych.model.engine.model_info import conversions, describe_model, weight_bytes
from triptych.model.engine.network_plan import NetworkPlan, batch_limits, plan_network
from triptych.model.engine.packing import Part, load_packed, packed_weights, weights_cache_use
from triptych.model.engine.planning.cache_budget import max_context
from triptych.model.engine.planning.memory_plan import plan_memory, plan_share
from triptych.model.engine.speculation.plan import DraftPlan
from triptych.model.engine.warmup import warm_up
from triptych.model.errors import ConfigError, MemoryShortageError
from triptych.model.native.library import native
from triptych.model.network.activation_dump import VARIABLE, dump_folder
from triptych.model.network.adapters import load_adapters
from triptych.model.network.lora import LoraAdapter
from triptych.model.network.lora_weights import loading_adapter
from triptych.model.network.native_scratch import planned_scratch
from triptych.model.network.native_stack import attach_native_stacks
from triptych.model.network.packed_weights import PackedWeights
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import load_model
from triptych.model.parallel.rank0 import load_rank0, rank_processes_of
from triptych.model.system import fallbacks, kernel_faults
from triptych.model.system.background_work import Work, finish, in_thread
from triptych.model.system.fault_limit import FaultLimit
from triptych.model.system.host_memory import available_memory
from triptych.model.vision.processing import ImageProcessing

if TYPE_CHECKING:
    from triptych.model.parallel.rank_processes import RankProcesses

# Messages about parts of a model that torch computes because their kernels are broken.
_REPLACED = {
    kernel_faults.PREPARATION: "queries and keys are prepared in several kernels",
    kernel_faults.RECURRENCE: "recurrent layers are torch's",
    kernel_faults.EXPERTS: "experts are multiplied by torch, one after the other",
    kernel_faults.INTEGERS: "products of integers are torch's, in float32",
    kernel_faults.FP8: "products of fp8 are torch's, in float32",
}
MAX_FAULTS = 3  # of one model within `FAULT_SECONDS`
FAULT_SECONDS = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The engines of a loaded model; `generate` is None if it does not generate."""

    info: ModelInfo
    encode: EncodeEngine
    generate: GenerateEngine | None
    rank_processes: RankProcesses | None = None  # the processes of the model's other ranks
    weight: float = 1.0  # its share of compute time, relative to other models
    faults: FaultLimit = field(default_factory=lambda: FaultLimit(MAX_FAULTS, FAULT_SECONDS))
    adapter: LoraAdapter | None = None  # then the engines are those of the model that it is for

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def engine_name(self) -> str:
        """The name of the model whose engines these are."""
        return self.info.adapter_of or self.info.name

    def check(self) -> None:
        """Raise `EngineDeadError` if another rank has ended: results since then are invalid."""
        if self.rank_processes is not None:
            self.rank_processes.check()

    def close(self) -> None:
        """End the model's processes and break its reference cycles, so the last reference frees its memory.

        The model cannot compute afterwards. The garbage collector would not find the cycles: it skips objects that
        existed when the engine process had started. An adapter has nothing of its own but its matrices.
        """
        if self.adapter is not None:
            return
        _close(self.encode.model)
        runner = self.generate.runner if self.generate is not None else None
        if isinstance(runner, ModelRunner) and runner.draft_model is not None:
            _close(runner.draft_model.model)


def load(spec: ModelSpec) -> LoadedModel:
    """Read the folder and build its engines; raises `ConfigError`, which names the model."""
    return finish(loading(spec))


def loading(spec: ModelSpec, *, idle: bool = False) -> Work[LoadedModel]:
    """Load in parts, between steps of other models; with `idle` packing has the lowest priority."""
    with errors_about(spec.name):
        return (yield from _loading(spec, idle))


def load_lora(spec: ModelSpec, base: LoadedModel | None) -> LoadedModel:
    """Read an adapter for a loaded model at once; raises `ConfigError`, which names the adapter."""
    return finish(loading_lora(spec, base))


def loading_lora(spec: ModelSpec, base: LoadedModel | None) -> Work[LoadedModel]:
    """Load an adapter for a loaded model in parts, between steps."""
    with errors_about(spec.name):
        if base is None or base.adapter is not None:
            raise ConfigError(f"the adapter's base model {spec.adapter_of} is not loaded")
        began, model = time.monotonic(), base.encode.model
        folder = read_adapter(Path(spec.path), pickle=spec.engine.pickle)
        yield None
        adapter = yield from loading_adapter(spec.name, folder, model, lambda needed: _check_room(spec, needed, model))
        seconds = time.monotonic() - began
        info = replace(base.info, name=spec.name, adapter_of=base.name, memory_bytes=adapter.nbytes)
        info.load_seconds = seconds
        return LoadedModel(info, base.encode, base.generate, adapter=adapter)


def _check_room(spec: ModelSpec, needed: int, model: Transformer) -> None:
    """Raise `MemoryShortageError` if an adapter of `needed` bytes does not fit into the memory that is left."""
    if model.device.type == "cpu":
        available = max(0, available_memory() - promised_memory())
    else:
        available = torch.cuda.mem_get_info(model.device)[0]
    if spec.memory is not None:
        available = min(available, spec.memory)
    if needed > available:
        message = f"the adapter takes {needed / 1e6:.1f} MB, of {available / 1e6:.1f} MB that are available"
        raise MemoryShortageError(message, needed, available)


def _loading(asked: ModelSpec, idle: bool) -> Work[LoadedModel]:
    began = time.monotonic()
    plan = yield from checked(plan_network(asked))
    yield None
    spec, checkpoint, device, selection, draft = plan.spec, plan.checkpoint, plan.device, plan.selection, plan.draft
    unrecorded = unrecordable(
        spec.engine, checkpoint.config.decoder, selection.backend, plan.linear.dtype, device, plan.linear.faults
    )
    early = slow_ways(spec.engine, selection, {DECODE_STEPS: unrecorded}, device, draft)
    _check_fallbacks(spec.engine, early)  # before a weight is read
    for warning in (*checkpoint.warnings, *conversions(checkpoint.config, plan.linear)):
        logger.warning("%s: %s", spec.name, warning)
    packed = packed_weights(plan, Part.MODEL)
    yield None
    pool, scratch = None, 0
    if device.type == "cpu":
        pool, scratch = _plan_for_cpu(plan, packed)
    elif spec.memory is not None:
        plan_share(spec, checkpoint, plan.linear, draft.memory if draft is not None else 0)
    yield None
    if packed is not None:
        model = yield from load_packed(packed, asked, Part.MODEL, idle=idle)
    else:
        model = yield from in_thread(lambda: _on_stream(device, lambda: _read_model(plan)))
    try:
        drafting = None
        if draft is not None:
            drafting = Drafting((yield from _load_draft_model(plan, asked, idle)), draft.context)
        loaded = yield from assembling(spec, checkpoint, model, selection, pool, drafting, plan.draft)
    except BaseException:
        _close(model)
        raise
    loaded.info.memory_bytes += scratch
    loaded.info.weights_cache = weights_cache_use(plan, packed)
    loaded.info.load_seconds = time.monotonic() - began
    return loaded


def assembling(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    model: Transformer,
    selection: Selection,
    pool: int | None = None,
    drafting: Drafting | None = None,
    draft: DraftPlan | None = None,
) -> Work[LoadedModel]:
    """Build the engines in parts; `pool` is the KV cache of each rank in bytes, None: by free memory."""
    device = model.device
    limits = batch_limits(spec.engine, device)
    context = max_context(spec.engine, checkpoint.config, limits)
    attach_native_stacks(model)
    # Before the memory of the KV pool is measured, so that it leaves out what these graphs hold.
    batches, why = yield from _recorded_batches(spec.engine, model, limits, device, checkpoint.images)
    unrecorded = {BATCHES: why}
    encode = _encode_engine(spec, checkpoint, model, limits, batches)
    yield None
    generate, cache_pools = None, tuple[CachePool, ...]()
    if checkpoint.config.can_generate:
        if pool is None:
            pool = _pool_bytes(spec, model, limits, context.tokens, drafting)
        token_bytes = draft.token_bytes if draft is not None else 0
        plan = plan_cache(spec, checkpoint.config, model.dtype, limits, pool, token_bytes)
        limits, context, cache_pools = plan.limits, plan.context, plan.described
        generate = yield from build_generate_engine(spec, checkpoint, model, plan, drafting, batches)
    yield None
    if device.type == "cuda":
        yield from warm_up(encode, generate, context.tokens, picture_patches(checkpoint))
    yield from compute_first_token(encode, generate)
    if generate is not None and isinstance(generate.runner, ModelRunner):
        unrecorded |= generate.runner.unrecorded
    slow = slow_ways(spec.engine, selection, unrecorded, device, draft)
    for way in slow:
        logger.warning("%s is slower than it could be: %s", spec.name, way)
    _check_fallbacks(spec.engine, slow)
    if (folder := dump_folder()) is not None:
        model.dump_activations(folder / spec.name)
    info = describe_model(spec, checkpoint, model, selection, limits, context, generate)
    info.fallbacks, info.cache_pools = slow, cache_pools
    info.recorded_batches = len(batches.sizes) if batches is not None else 0
    return LoadedModel(info, encode, generate, rank_processes_of(model), spec.engine.model_weight)


def _encode_engine(
    spec: ModelSpec, checkpoint: Checkpoint, model: Transformer, limits: BatchLimits, graphs: EncoderGraphs | None
) -> EncodeEngine:
    """Return the encode engine of a loaded network."""
    adapters = None
    if checkpoint.config.adapters is not None:
        adapters = load_adapters(checkpoint.config, checkpoint.weight_files, model.device)
    return EncodeEngine(
        spec.name,
        model,
        model.device,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        sentences=checkpoint.sentences,
        images=checkpoint.images,
        adapters=adapters,
        graphs=graphs,
        overlap=model.device.type == "cuda",
    )


def _pool_bytes(
    spec: ModelSpec, model: Transformer, limits: BatchLimits, context: int, drafting: Drafting | None
) -> int:
    """Return the bytes of each rank's KV cache, by free memory and within the spec's."""
    draft = drafting.model if drafting is not None else None
    pool = measure_pool(spec.engine, model, limits, context, model.device, draft)
    if spec.memory is None:
        return pool
    weights = weight_bytes(model) + (weight_bytes(draft) if draft is not None else 0)
    return min(pool, max(0, spec.memory // spec.engine.tensor_parallel_size - weights))


def _recorded_batches(
    engine: EngineConfig,
    model: Transformer,
    limits: BatchLimits,
    device: torch.device,
    images: ImageProcessing | None = None,
) -> Work[tuple[EncoderGraphs | None, str]]:
    """Record batches to encode; return them, or None and why they could not be recorded, if they should be."""
    wanted = device.type == "cuda" and engine.cuda_graphs and rank_processes_of(model) is None
    if not wanted or not can_record_batches(model):
        return None, ""
    if dump_folder() is not None:
        return None, f"{VARIABLE} is set"
    graphs = EncoderGraphs(
        model,
        max_num_seqs=limits.max_num_seqs,
        max_num_tokens=limits.max_num_batched_tokens,
        record=CudaRecorder(device),
        images=images,
    )
    return (yield from recording(graphs, BATCHES))


def slow_ways(
    engine: EngineConfig,
    selection: Selection,
    unrecorded: Mapping[str, str],
    device: torch.device,
    draft: DraftPlan | None = None,
) -> tuple[str, ...]:
    """Return what runs slower here than it could, with the reason; choices of the settings do not count.

    `unrecorded` says of what should be CUDA graphs why it is not; empty: it is, or it need not be.
    """
    cuda = device.type == "cuda"
    slow = [*fallbacks.found()] if cuda else []
    if device.type == "cpu" and engine.attention_backend == "auto" and isinstance(without := native(), str):
        slow.append(f"torch computes in place of the C kernels, several times slower: {without}")
    slow += [f"{told}: {selection.faults[part]}" for part, told in _REPLACED.items() if part in selection.faults]
    broken = any(map(kernel_faults.is_attention, selection.faults))
    selections = {"attention": selection}
    if draft is not None:
        selections["attention of the draft model"] = draft.selection
    for what, found in selections.items():
        if ((cuda and engine.attention_backend == "auto") or broken) and not found.backend.graph_safe:
            slow.append(f"{what} is not Triton's: {found.reason}")
    slow += [f"{what} are launched kernel by kernel: {why}" for what, why in unrecorded.items() if why]
    return tuple(slow)


def _check_fallbacks(engine: EngineConfig, slow: tuple[str, ...]) -> None:
    if slow and engine.slow_fallbacks == "refuse":
        raise ConfigError(f"slow_fallbacks is refuse, and {slow[0]}")


def _plan_for_cpu(plan: NetworkPlan, packed: PackedWeights | None) -> tuple[int, int]:
    """Return the bytes of each rank's KV pool and of scratch; raises `ConfigError` if the model does not fit."""
    scratch, config, linear, limits, draft = 0, plan.checkpoint.config, plan.linear, plan.limits, plan.draft
    if linear.library is not None:
        source = config.source_positions or (
            config.image.num_tokens if config.image is not None else 0
        )  # one step encodes a whole source, whatever its bound of tokens
        rows, dtype = max(limits.max_num_batched_tokens, source), linear.dtype
        patches = picture_patches(plan.checkpoint)
        scratch = planned_scratch(
            *(linear.library, config, dtype, linear.quantization),
            rows=rows,
            context=max(plan.context, source),
            patches=patches,
        )
    scratch += picture_bytes(plan.checkpoint, limits)
    resident, others = (packed.resident, packed.others_in_use) if packed is not None else (0, 0)
    available = max(0, available_memory(mapped=resident + others) - promised_memory()) + resident  # mapped already
    if plan.spec.memory is not None:
        available = min(available, plan.spec.memory)
    drafts = (draft.memory, draft.token_bytes) if draft is not None else (0, 0)
    pool = plan_memory(
        plan.spec.name,
        plan.spec.engine,
        plan.checkpoint,
        linear,
        limits,
        available,
        scratch + drafts[0],
        draft_token_bytes=drafts[1],
    )
    return pool, scratch + (draft.scratch if draft is not None else 0)


def _read_model(plan: NetworkPlan) -> Transformer:
    """Load the network, or rank 0 of it with the processes of the other ranks."""
    spec, backend = plan.spec, plan.selection.backend
    if plan.linear.collective is None:
        return load_model(plan.checkpoint, backend, plan.linear)
    pickle = spec.engine.pickle
    return load_rank0(
        spec.name, plan.checkpoint, plan.selection, plan.linear, max_model_len=plan.context, pickle=pickle
    )


def _load_draft_model(plan: NetworkPlan, asked: ModelSpec, idle: bool) -> Work[Transformer]:
    draft, packed = plan.draft, packed_weights(plan, Part.DRAFT)
    assert draft is not None
    if packed is not None:
        model = yield from load_packed(packed, asked, Part.DRAFT, idle=idle)
    else:

        def read() -> Transformer:
            return load_model(draft.checkpoint, draft.selection.backend, draft.linear)

        model = yield from in_thread(lambda: _on_stream(plan.device, read))
    attach_native_stacks(model)
    return model


def _on_stream(device: torch.device, load: Callable[[], Transformer]) -> Transformer:
    """Load weights in a thread that copies to a GPU by a stream of its own."""
    if device.type != "cuda":
        return load()
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        model = load()
    stream.synchronize()
    return model


def _close(model: Transformer) -> None:
    for stack in model.stacks.values():
        stack.runner = None  # it refers to the stack
    if (rank_processes := rank_processes_of(model)) is not None:
        rank_processes.close()
