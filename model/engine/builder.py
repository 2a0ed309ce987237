"""A checkpoint folder and settings become running engines: device, dtype and pool size are decided here, once."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model.api.engine_config import BatchLimits, EngineConfig
from model.api.messages import ModelSpec
from model.api.stats import CachePool, ModelInfo
from model.attention.base import AttentionBackend
from model.attention.recurrence import recurrent_backend
from model.attention.selection import Selection, select_backend, select_layers
from model.cache.paged import KVCache
from model.checkpoint.folder import Checkpoint, read_checkpoint
from model.config.cache import PoolSize, StateSize, paged_specs, pools_of
from model.config.formats import QUANTIZED_LAYERS
from model.config.model import GenerationRules, ModelConfig, StackConfig
from model.config.sharding import Shard
from model.engine.cache_budget import KVLayout, fit_context, kv_dtype, max_context
from model.engine.drafting import DraftPlan, draft_checkpoint
from model.engine.dtypes import choose_dtype
from model.engine.encode_engine import EncodeEngine
from model.engine.execution.cuda_graphs import CudaRecorder, DecodeGraphs, num_recorded, recorded
from model.engine.execution.draft_model import DraftModel
from model.engine.execution.model_runner import ModelRunner
from model.engine.fp8_settings import check_kv_dtype, fp8_projections
from model.engine.generate_engine import GenerateEngine
from model.engine.gpu_memory import CudaMemory, GpuMemory, pool_memory
from model.engine.integer_settings import integer_projections
from model.engine.memory_plan import plan_memory, plan_pool, plan_share
from model.engine.model_info import describe_model, weight_bytes
from model.engine.scheduling.block_manager import BlockManager
from model.engine.scheduling.model_drafts import COMPUTED_AT_ONCE
from model.engine.scheduling.scheduler import Scheduler
from model.engine.stored_weights import conversions
from model.engine.warmup import warm_up
from model.engine.weights_cache import find_packed, weights_cache_use
from model.errors import ConfigError
from model.linear.factory import LinearFactory
from model.network.adapter_weights import load_adapters
from model.network.native_scratch import planned_scratch
from model.network.native_stack import NativeStack, attach_native_stacks, native_linears
from model.network.packed_weights import PackedWeights
from model.network.transformer import Transformer
from model.network.weights import load_model
from model.parallel.group import Group
from model.parallel.rank0 import Rank0Transformer, load_rank0
from model.system import fallbacks
from model.system.devices import resolve_device
from model.system.host_memory import available_memory
from model.text.grammar_matcher import Grammars
from model.text.token_bytes import TokenBytes, token_bytes
from model.text.tokenizer import Tokenizer

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
    """Read the folder and build its engines; raises `ConfigError` if it cannot be served as asked."""
    began = time.monotonic()
    checkpoint = read_checkpoint(Path(spec.path), pickle=spec.engine.pickle)
    device = resolve_device(spec.engine.device)
    dtype = choose_dtype(spec.engine.dtype, checkpoint.config, device).dtype
    _check_ranks(spec.engine, checkpoint.config, device)
    check_kv_dtype(spec.engine, device)
    limits = batch_limits(spec.engine, device)
    most = max_context(spec.engine, checkpoint.config, limits).tokens
    checkpoint = replace(checkpoint, config=checkpoint.config.stretched(most))
    selection = _select(spec.engine, checkpoint.config, device, dtype)
    asked = spec.engine
    if selection.library is not None and spec.engine.quantization == "none":
        spec = replace(spec, engine=replace(spec.engine, quantization=checkpoint.quantization))
    _check_native(spec.engine, checkpoint.config, selection)
    draft = _plan_draft(spec.name, asked, checkpoint, device, limits, most)
    unrecorded = _unrecordable(spec.engine, checkpoint.config.decoder, selection.backend, dtype, device)
    _check_fallbacks(spec.engine, slow_ways(spec.engine, selection, unrecorded, device))  # before a weight is read
    if checkpoint.not_served:
        logger.warning(
            "%s: its settings of generation ask for what is not served: %s", spec.name, ", ".join(checkpoint.not_served)
        )
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
    dtype, device = model.dtype, next(model.parameters()).device
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
    drafting = load_model(draft.checkpoint, draft.selection.backend, draft.linear) if draft is not None else None
    if drafting is not None:
        attach_native_stacks(drafting)
    generate, cache_pools = None, tuple[CachePool, ...]()
    if checkpoint.config.can_generate:
        if pool is None:
            pool = _pool_memory(spec.engine, model, context.tokens, device)
            if spec.memory is not None:
                weights = weight_bytes(model) + (weight_bytes(drafting) if drafting is not None else 0)
                pool = min(pool, max(0, spec.memory // spec.engine.tensor_parallel_size - weights))
        kv = KVLayout.of(spec.engine, checkpoint.config, dtype, limits, draft.token_bytes if draft is not None else 0)
        context = fit_context(spec.engine, context, kv, pool)
        fitting = kv.sequences_in(pool, context.tokens, limits.max_num_seqs)
        if fitting < limits.max_num_seqs:
            logger.warning(
                "%s: max_num_seqs is %d, not %d: the KV cache has no room for the states of more sequences; "
                "raise kv_cache_memory or lower max_model_len",
                *(spec.name, fitting, limits.max_num_seqs),
            )
        limits = replace(limits, max_num_seqs=fitting)
        pools = kv.divide(pool, context.tokens, limits.max_num_seqs)
        states = kv.states_for(limits.max_num_seqs) if kv.state_bytes else None
        cache_pools = kv.describe(pools)
        generate = _generate_engine(spec, checkpoint, model, limits, context.tokens, pools, states)
        if draft is not None and drafting is not None:
            _attach_draft_model(generate, spec.engine, draft, drafting)
    if device.type == "cuda":
        warm_up(encode, generate, context.tokens)
    unrecorded = generate.runner.unrecorded if generate is not None and isinstance(generate.runner, ModelRunner) else ""
    slow = slow_ways(spec.engine, selection, unrecorded, device)
    for way in slow:
        logger.warning("%s is slower than it could be: %s", spec.name, way)
    _check_fallbacks(spec.engine, slow)
    info = describe_model(spec, checkpoint, model, selection, limits, context, generate)
    info.fallbacks, info.cache_pools = slow, cache_pools
    return LoadedModel(info, encode, generate, _rank_processes(model), spec.engine.model_weight)


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


def _select(engine: EngineConfig, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Selection:
    """The backend of each layer; stacks in C have no sums over ranks in them."""
    if engine.tensor_parallel_size == 1 or device.type != "cpu":
        found = select_backend(device, dtype, engine.attention_backend)
        own = Shard(0, engine.tensor_parallel_size).config(config)
        return select_layers(found, own, dtype, kv_dtype(engine, dtype))
    reason = f"the native stacks run on one rank, tensor_parallel_size is {engine.tensor_parallel_size}"
    if engine.attention_backend == "native":
        raise ConfigError(f"attention_backend native cannot be had: {reason}")
    return replace(select_backend(device, dtype, "sdpa"), reason=f"torch scaled_dot_product_attention: {reason}")


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


def _plan_draft(
    name: str, engine: EngineConfig, served: Checkpoint, device: torch.device, limits: BatchLimits, context: int
) -> DraftPlan | None:
    """The draft model that is asked for, in the number format that is asked for."""
    found = draft_checkpoint(name, engine, served, context)
    if found is None:
        return None
    checkpoint, context = found
    dtype = choose_dtype(engine.dtype, checkpoint.config, device).dtype
    selection = _select(engine, checkpoint.config, device, dtype)
    if selection.library is not None and engine.quantization == "none":
        engine = replace(engine, quantization=checkpoint.quantization)
    _check_native(engine, checkpoint.config, selection)
    linear = linears_of(engine, checkpoint.config, selection, dtype, device)
    plan = DraftPlan.of(engine, checkpoint, selection, linear, context)
    if linear.library is None:
        return plan
    rows = COMPUTED_AT_ONCE + 2 * limits.max_num_seqs  # of a pass at most
    scratch = planned_scratch(
        linear.library, checkpoint.config, linear.dtype, linear.quantization, rows=rows, context=context
    )
    return replace(plan, scratch=scratch)


def _attach_draft_model(generate: GenerateEngine, engine: EngineConfig, plan: DraftPlan, model: Transformer) -> None:
    """Give a served model its draft model, with pages for each block of the first pool."""
    runner = generate.runner
    assert isinstance(runner, ModelRunner) and model.decoder is not None
    pages = [runner.cache.num_pages[0]] * len(pools_of(paged_specs(model.decoder.config, "float32")))
    cache = KVCache(model.decoder.config, pages, engine.block_size, kv_dtype(engine, model.dtype), runner.device)
    config = runner.model.config
    has_rules = config.generation != GenerationRules()
    runner.draft_model = DraftModel(model, cache, config.embedding.vocab_size, has_rules=has_rules)
    generate.speculation.draft_context = plan.context


def _load_model(
    spec: ModelSpec, checkpoint: Checkpoint, selection: Selection, linear: LinearFactory, max_model_len: int
) -> Transformer:
    """The network, or rank 0 of it with the others beside it."""
    if linear.collective is None:
        return load_model(checkpoint, selection.backend, linear)
    return load_rank0(spec.name, checkpoint, selection, linear, max_model_len=max_model_len, pickle=spec.engine.pickle)


def _close(model: Transformer) -> None:
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            stack.runner = None  # which refers to the stack
    if (rank_processes := _rank_processes(model)) is not None:
        rank_processes.close()


def _rank_processes(model: Transformer) -> RankProcesses | None:
    return model.rank_processes if isinstance(model, Rank0Transformer) else None


def _check_native(engine: EngineConfig, config: ModelConfig, selection: Selection) -> None:
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


def _generate_engine(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    model: Transformer,
    limits: BatchLimits,
    max_model_len: int,
    pools: tuple[PoolSize, ...],
    states: StateSize | None,
) -> GenerateEngine:
    config, device = checkpoint.config, next(model.parameters()).device
    block_manager = BlockManager(
        pools,
        spec.engine.block_size,
        prefix_caching=spec.engine.prefix_caching,
        short_context=model.config.short_context,
        states=states,
    )
    num_states = states.num_slots if states is not None else 0
    cache = _cache(model, spec.engine, [pool.num_pages for pool in pools], num_states, device)
    overlap, encoder = _overlaps(config, device), config.encoder
    # Where steps are launched ahead, on a GPU, a source takes about as long as a step.
    parts = encoder.num_layers if encoder is not None and model.can_pause and not overlap else 1
    scheduler = Scheduler(block_manager, limits.max_num_seqs, limits.max_num_batched_tokens, parts)
    graphs, stack = None, model.decoder.config if model.decoder is not None else None
    unrecorded = _unrecordable(spec.engine, stack, model.backend, model.dtype, device)
    if can_record(spec.engine, model, device):
        graphs, unrecorded = _recorded(model, cache, limits.max_num_seqs, max_model_len)
    runner = ModelRunner(model, cache, block_manager, graphs)
    runner.unrecorded = unrecorded
    return GenerateEngine(
        spec.name,
        runner,
        scheduler,
        max_model_len=max_model_len,
        eos_token_ids=config.eos_token_ids,
        grammars=_grammars(checkpoint),
        overlap=overlap,
        num_speculative_tokens=spec.engine.num_speculative_tokens,
    )


def _recorded(
    model: Transformer, cache: KVCache, max_num_seqs: int, max_model_len: int
) -> tuple[DecodeGraphs | None, str]:
    """The recorded decode steps, on all ranks at the same time; None and the reason where one of them cannot."""
    ranks = _rank_processes(model)
    record = CudaRecorder(cache.device, collective=ranks is not None)
    graphs = DecodeGraphs(model, cache, max_num_seqs=max_num_seqs, max_model_len=max_model_len, record=record)
    if ranks is None:
        return recorded(graphs)
    reason = ranks.record(max_num_seqs, max_model_len, lambda: recorded(graphs)[1])
    return (None if reason else graphs), reason


def _cache(
    model: Transformer, engine: EngineConfig, num_pages: Sequence[int], num_states: int, device: torch.device
) -> KVCache:
    """The caches of all layers, of the heads that this rank has."""
    assert model.decoder is not None
    rank_processes, dtype = _rank_processes(model), kv_dtype(engine, model.dtype)
    cache = KVCache(model.decoder.config, num_pages, engine.block_size, dtype, device, num_states)
    if rank_processes is not None:
        rank_processes.make_pools(num_pages, engine.block_size, dtype, num_states)
    return cache


def _overlaps(config: ModelConfig, device: torch.device) -> bool:
    """Whether a step is launched before the last one's tokens are known; a CPU computes where it would be prepared."""
    return device.type == "cuda" and not config.generation.banned_sequences


def can_record(engine: EngineConfig, model: Transformer, device: torch.device) -> bool:
    """Whether decode steps run from graphs, for which the attention and recurrence of every layer must be fit."""
    decoder = model.decoder.config if model.decoder is not None else None
    fit = model.backend.graph_safe and not _unrecordable(engine, decoder, model.backend, model.dtype, device)
    return device.type == "cuda" and engine.cuda_graphs and fit


def _unrecordable(
    engine: EngineConfig,
    decoder: StackConfig | None,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    """Why decode steps that should be CUDA graphs cannot be, which is known before weights are read; empty: they can,
    or attention is the reason already."""
    if device.type != "cuda" or not engine.cuda_graphs or not backend.graph_safe or decoder is None:
        return ""
    torchs = any(recurrent_backend(backend, one, dtype) is None for one in decoder.recurrences.values())
    return "recurrent layers are torch's" if torchs else ""  # which launches what a step's spans are


def _grammars(checkpoint: Checkpoint) -> Grammars | None:
    """None for a model without a tokenizer; the tokenizer is read when a grammar is first asked for."""
    if not (checkpoint.path / "tokenizer.json").is_file():
        return None

    def tokens() -> TokenBytes:
        tokenizer = Tokenizer.from_folder(checkpoint.path)
        assert tokenizer is not None
        return token_bytes(tokenizer, checkpoint.config.embedding.vocab_size)

    return Grammars(tokens)


def _pool_memory(engine: EngineConfig, model: Transformer, max_model_len: int, device: torch.device) -> int:
    """Of each rank: what was asked for, what the fullest GPU has left, or its part of what all ranks share."""
    if engine.kv_cache_memory is not None:
        return engine.kv_cache_memory
    if device.type == "cuda":
        limits = batch_limits(engine, device)
        return pool_memory(
            model,
            limits,
            max_model_len,
            engine.gpu_memory_utilization,
            CudaMemory(device),
            [GpuMemory(*one) for one in model.gpu_memory] if isinstance(model, Rank0Transformer) else (),
            recorded_sizes=num_recorded(limits.max_num_seqs, max_model_len) if can_record(engine, model, device) else 0,
        )
    return plan_pool(engine, available_memory())
