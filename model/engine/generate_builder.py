"""Builds the generate engine of a loaded network: the plan of its cache, then cache, CUDA graphs and scheduler."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from triptych.model.api.engine_config import BatchLimits, EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.stats import CachePool
from triptych.model.attention.base import AttentionBackend
from triptych.model.attention.layer_backends import recurrent_backend
from triptych.model.cache.kv_cache import KVCache, promised_memory
from triptych.model.checkpoint.folder import Checkpoint
from triptych.model.config.cache import PoolSize, StateSize, paged_specs, pools_of
from triptych.model.config.layer import ExpertsConfig
from triptych.model.config.model import GenerationRules, ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.engine.execution.cuda_graphs import (
    DECODE_STEPS,
    PROMPT_STEPS,
    CudaRecorder,
    DecodeGraphs,
    num_recorded,
    recorded,
    recording,
)
from triptych.model.engine.execution.encoder_graphs import EncoderGraphs
from triptych.model.engine.execution.mixed_graphs import MixedGraphs, can_record_prompts, num_mixed
from triptych.model.engine.execution.model_runner import ModelRunner
from triptych.model.engine.execution.pictures import PictureStore
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.engine.gpu_memory import CudaMemory, GpuMemory, pool_memory
from triptych.model.engine.planning.cache_budget import Context, KVLayout, fit_context, kv_dtype, max_context
from triptych.model.engine.planning.memory_plan import plan_pool
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.scheduler import Scheduler
from triptych.model.engine.speculation.draft_model import DraftModel
from triptych.model.engine.speculation.propose import MAX_VERIFIED_ROWS
from triptych.model.errors import ConfigError
from triptych.model.network.activation_dump import VARIABLE, dump_folder
from triptych.model.network.transformer import Transformer
from triptych.model.parallel.rank0 import Rank0Transformer, rank_processes_of
from triptych.model.system.background_work import Work, in_thread
from triptych.model.system.host_memory import available_memory
from triptych.model.system.kernel_faults import EXPERTS, NO_FAULTS, Faults
from triptych.model.text.grammar_matcher import Grammars
from triptych.model.text.token_bytes import TokenBytes, token_bytes
from triptych.model.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The division of a rank's KV cache, and the sequences that it holds."""

    limits: BatchLimits
    context: Context
    pools: tuple[PoolSize, ...]
    states: StateSize | None  # of recurrent layers, if there are any
    described: tuple[CachePool, ...]  # for `/info`


def plan_cache(
    spec: ModelSpec,
    config: ModelConfig,
    dtype: torch.dtype,
    limits: BatchLimits,
    memory: int,
    draft_token_bytes: int = 0,
) -> CachePlan:
    """Divide `memory` bytes of each rank; `dtype` is the network's.

    Raises `ConfigError` if there is no room for the context of the settings.
    """
    kv = KVLayout.of(spec.engine, config, dtype, limits, draft_token_bytes)
    context = fit_context(spec.engine, max_context(spec.engine, config, limits), kv, memory)
    fitting = kv.sequences_in(memory, context.tokens, limits.max_num_seqs)
    if fitting < limits.max_num_seqs:
        logger.warning(
            "%s: max_num_seqs is %d, not %d: the KV cache has no room for the states of more sequences; "
            "raise kv_cache_memory or lower max_model_len",
            *(spec.name, fitting, limits.max_num_seqs),
        )
    limits = replace(limits, max_num_seqs=fitting)
    pools = kv.divide(memory, context.tokens, limits.max_num_seqs)
    states = kv.states_for(limits.max_num_seqs) if kv.state_bytes else None
    return CachePlan(limits, context, pools, states, kv.describe(pools))


def measure_pool(
    engine: EngineConfig,
    model: Transformer,
    limits: BatchLimits,
    max_model_len: int,
    device: torch.device,
    draft_model: Transformer | None = None,
) -> int:
    """Return the bytes of each rank's KV pool.

    They come from the settings, else from the GPU with the least free memory, else from the CPU's memory.
    """
    if engine.kv_cache_memory is not None:
        return engine.kv_cache_memory
    if device.type == "cuda":
        return pool_memory(
            model,
            limits,
            max_model_len,
            engine.gpu_memory_utilization,
            CudaMemory(device),
            [GpuMemory(*one) for one in model.gpu_memory] if isinstance(model, Rank0Transformer) else (),
            gpu_share=engine.gpu_share,
            recorded_sizes=_num_recorded(engine, model, limits.max_num_seqs, max_model_len, device)
            + (_num_recorded(engine, draft_model, MAX_VERIFIED_ROWS, max_model_len, device) if draft_model else 0),
        )
    return plan_pool(engine, max(0, available_memory() - promised_memory()))


@dataclass(frozen=True, slots=True)
class Drafting:
    """A draft model whose weights are loaded."""

    model: Transformer
    context: int  # the length of a sequence up to which it proposes tokens


def build_generate_engine(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    model: Transformer,
    plan: CachePlan,
    drafting: Drafting | None = None,
    encoder_graphs: EncoderGraphs | None = None,
) -> Work[GenerateEngine]:
    """Build the generate engine with its caches and, on a GPU, its recorded decode steps.

    `encoder_graphs`: recorded batches of the encoder, if there are any.
    """
    config, device = checkpoint.config, model.device
    block_manager = BlockManager(
        plan.pools,
        spec.engine.block_size,
        prefix_caching=spec.engine.prefix_caching,
        short_context=model.config.short_context,
        states=plan.states,
    )
    num_states = plan.states.num_slots if plan.states is not None else 0
    cache = _cache(model, spec.engine, [pool.num_pages for pool in plan.pools], num_states, device)
    overlap, pictures = _overlaps(config, device), None
    if config.pictures is not None:
        assert checkpoint.pictures is not None
        pictures = PictureStore(model, checkpoint.pictures, picture_rows(checkpoint, plan.limits))
    scheduler = _scheduler(checkpoint, model, block_manager, plan.limits, whole_sources=overlap)
    graphs, mixed, stack = None, None, model.decoder.config if model.decoder is not None else None
    why = unrecordable(spec.engine, stack, model.backend, model.dtype, device, model.linear.faults)
    unrecorded = {DECODE_STEPS: why}
    if can_record(spec.engine, model, device):
        graphs, mixed, unrecorded = yield from _recorded(model, cache, plan.limits.max_num_seqs, plan.context.tokens)
    draft_model = None
    if drafting is not None:
        draft_model, why_not = yield from _draft_model(spec.engine, drafting.model, model, cache, plan.context.tokens)
        unrecorded |= {f"{what} of the draft model": why for what, why in why_not.items()}
    # A size that was asked for is taken now, so that a lack of memory shows; else it grows with use.
    wanted = (cache, *([draft_model.cache] if draft_model is not None else []))
    for empty in wanted if spec.engine.kv_cache_memory is not None else ():
        yield from in_thread(empty.commit, idle=True)
    runner = ModelRunner(model, cache, block_manager, graphs, draft_model, unrecorded, encoder_graphs, mixed, pictures)
    return GenerateEngine(
        spec.name,
        runner,
        scheduler,
        max_model_len=plan.context.tokens,
        eos_token_ids=config.eos_token_ids,
        grammars=_grammars(checkpoint),
        overlap=overlap,
        num_speculative_tokens=spec.engine.num_speculative_tokens,
        draft_context=drafting.context if drafting is not None else None,
        adapters=model.lora,
    )


def _scheduler(
    checkpoint: Checkpoint, model: Transformer, block_manager: BlockManager, limits: BatchLimits, *, whole_sources: bool
) -> Scheduler:
    """`whole_sources`: each source is encoded in one step, which on a GPU takes about as long as another step."""
    pictures = checkpoint.config.pictures
    reads = pictures.tower if pictures is not None else checkpoint.config.encoder
    return Scheduler(
        block_manager,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        encoder_layers=reads.num_layers if reads is not None and model.can_pause and not whole_sources else 1,
        picture_rows=picture_rows(checkpoint, limits),
        both_ways=pictures is not None and pictures.both_ways,
    )


def picture_rows(checkpoint: Checkpoint, limits: BatchLimits) -> int:
    """Return the rows of pictures that are kept encoded: those of the largest, or of a step; 0: it reads none."""
    return 0 if checkpoint.pictures is None else max(limits.max_num_batched_tokens, checkpoint.pictures.most_rows)


def picture_patches(checkpoint: Checkpoint) -> int:
    """Return how many patches the largest picture has; 0: it reads none."""
    config = checkpoint.config.pictures
    return (
        0 if config is None or checkpoint.pictures is None else checkpoint.pictures.most_rows * config.patches.merge**2
    )


def picture_bytes(checkpoint: Checkpoint, limits: BatchLimits) -> int:
    """Return the bytes of pictures that are kept encoded, and of one that is being encoded, in float32."""
    config, decoder = checkpoint.config.pictures, checkpoint.config.decoder
    if config is None or decoder is None:
        return 0
    width = config.patches.elements + 2 * config.tower.hidden_size + config.merger.inner // config.patches.merge**2
    kept = picture_rows(checkpoint, limits) * decoder.hidden_size * (1 + len(config.deep))
    return 4 * (kept + picture_patches(checkpoint) * width)


def _draft_model(
    engine: EngineConfig, model: Transformer, served: Transformer, cache: KVCache, max_model_len: int
) -> Work[tuple[DraftModel, dict[str, str]]]:
    """Return a draft model with its own cache, which has a page for each block of the served model's first pool.

    Its passes are recorded like steps; the second result says of them why they could not be.
    """
    assert model.decoder is not None
    pages = [cache.num_pages[0]] * len(pools_of(paged_specs(model.decoder.config, "float32")))
    own = KVCache(model.decoder.config, pages, engine.block_size, kv_dtype(engine, model.dtype), cache.device)
    has_rules = served.config.generation != GenerationRules()
    graphs, mixed, unrecorded = None, None, dict[str, str]()
    if can_record(engine, model, cache.device):
        collective = rank_processes_of(served) is not None
        graphs, mixed, unrecorded = yield from _recorded(
            model, own, MAX_VERIFIED_ROWS, max_model_len, collective=collective
        )
    vocabulary = served.config.embedding.vocab_size
    draft_model = DraftModel(model, own, vocabulary, has_rules=has_rules, graphs=graphs, mixed_graphs=mixed)
    return draft_model, unrecorded


def _recorded(
    model: Transformer, cache: KVCache, max_num_seqs: int, max_model_len: int, *, collective: bool = False
) -> Work[tuple[DecodeGraphs | None, MixedGraphs | None, dict[str, str]]]:
    """Record decode steps, on all ranks at once, and steps with prompts; return them, or why a rank could not.

    `collective`: this process has a group of ranks, whose threads query the device.
    """
    ranks = rank_processes_of(model)
    record = CudaRecorder(cache.device, collective=collective or ranks is not None)
    decodes = DecodeGraphs(model, cache, max_num_seqs=max_num_seqs, max_model_len=max_model_len, record=record)
    if ranks is not None:
        reason = ranks.record(max_num_seqs, max_model_len, lambda: recorded(decodes)[1])
        return (None if reason else decodes), None, {DECODE_STEPS: reason}
    mixed, unrecorded = None, dict[str, str]()
    if can_record_prompts(model):  # first, because they need the most memory, which the others share
        prompts = MixedGraphs(model, cache, max_num_seqs=max_num_seqs, max_model_len=max_model_len, record=record)
        mixed, unrecorded[PROMPT_STEPS] = yield from recording(prompts, PROMPT_STEPS)
    graphs, unrecorded[DECODE_STEPS] = yield from recording(decodes)
    return graphs, mixed if graphs is not None else None, unrecorded


def _num_recorded(
    engine: EngineConfig, model: Transformer, max_num_seqs: int, max_model_len: int, device: torch.device
) -> int:
    """Return how many steps of a model are recorded over its KV cache."""
    if not can_record(engine, model, device):
        return 0
    mixed = num_mixed(model.config, max_num_seqs) if can_record_prompts(model) else 0
    return num_recorded(max_num_seqs, max_model_len) + mixed


def _cache(
    model: Transformer, engine: EngineConfig, num_pages: Sequence[int], num_states: int, device: torch.device
) -> KVCache:
    """Return the caches of all layers, for the heads of this rank."""
    assert model.decoder is not None
    rank_processes, dtype = rank_processes_of(model), kv_dtype(engine, model.dtype)
    cache = KVCache(model.decoder.config, num_pages, engine.block_size, dtype, device, num_states)
    if rank_processes is not None:
        rank_processes.make_pools(num_pages, engine.block_size, dtype, num_states)
    return cache


def _overlaps(config: ModelConfig, device: torch.device) -> bool:
    """Whether a step is launched before the last one's tokens are known; on a CPU that gains nothing."""
    return device.type == "cuda" and not config.generation.reads_output


def can_record(engine: EngineConfig, model: Transformer, device: torch.device) -> bool:
    """Whether decode steps run from CUDA graphs; every layer's attention and recurrence must allow it."""
    decoder = model.decoder.config if model.decoder is not None else None
    reason = unrecordable(engine, decoder, model.backend, model.dtype, device, model.linear.faults)
    fit = model.backend.graph_safe and not reason
    return device.type == "cuda" and engine.cuda_graphs and fit


def unrecordable(
    engine: EngineConfig,
    decoder: StackConfig | None,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
    faults: Faults = NO_FAULTS,
) -> str:
    """Return why decode steps cannot be CUDA graphs, if that is known before weights are read.

    Empty: they can be, they need not be, or attention is the reason, which is reported elsewhere.
    """
    if device.type != "cuda" or not engine.cuda_graphs or not backend.graph_safe or decoder is None:
        return ""
    if dump_folder() is not None:
        return f"{VARIABLE} is set"
    if EXPERTS in faults and any(isinstance(layer.feed_forward, ExpertsConfig) for layer in decoder.layers):
        return "experts are torch's"  # which waits for their numbers of rows
    torchs = any(recurrent_backend(backend, one, dtype) is None for one in decoder.recurrences.values())
    return "recurrent layers are torch's" if torchs else ""  # its launches depend on the step's lengths


def _grammars(checkpoint: Checkpoint) -> Grammars:
    """Return the grammars of a model; its tokenizer is read for the first one."""

    def tokens() -> TokenBytes:
        tokenizer = Tokenizer.from_folder(checkpoint.network_path)
        if tokenizer is None:
            raise ConfigError(f"{checkpoint.path.name} has no tokenizer: no grammar can be followed")
        return token_bytes(tokenizer, checkpoint.config.embedding.vocab_size)

    return Grammars(tokens)
