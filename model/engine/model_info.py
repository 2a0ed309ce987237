"""The description of a loaded model: for `/info`, the banner and the memory budget."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from triptych.model.api.engine_config import BatchLimits, EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.stats import ModelInfo
from triptych.model.attention.selection import Selection
from triptych.model.checkpoint.folder import Checkpoint
from triptych.model.config.cache import state_bytes
from triptych.model.config.formats import FORMATS, NumberFormat, NumberKind, Storage, kept_as_stored, nearest_kept
from triptych.model.config.model import ModelConfig
from triptych.model.config.sharding import Shard
from triptych.model.engine.execution.model_runner import ModelRunner
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.engine.planning.cache_budget import Context, kv_bytes_per_token
from triptych.model.engine.planning.kernels import choose_dtype, stacks_of_torch
from triptych.model.linear.base import linears
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.fp8 import keeps
from triptych.model.network.build import plain_parameters
from triptych.model.network.parameter_counts import parameters_by_part
from triptych.model.network.transformer import Transformer


def weight_bytes(model: Transformer) -> int:
    """Return the bytes of the weights; a tied table counts twice if the head has a rounded copy."""
    plain = sum(parameter.nbytes for parameter in plain_parameters(model).values())
    return plain + sum(linear.nbytes for linear in linears(model))


def describe_model(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    model: Transformer,
    selection: Selection,
    limits: BatchLimits,
    context: Context,
    generate: GenerateEngine | None,
) -> ModelInfo:
    """Return the description of a loaded model; the caller fills in `load_seconds`."""
    config = checkpoint.config
    dtype, dtype_reason = _number_format(spec.engine, checkpoint, model, selection)
    why = selection.reason
    if selection.backend.name == "native":
        why += "".join(f"; torch computes the {name}: {told}" for name, told in stacks_of_torch(config).items())
    return ModelInfo(
        name=spec.name,
        form=config.form,
        model_type=config.model_type,
        parameters=sum(parameters_by_part(config).values()),
        weight_bytes=weight_bytes(model),
        dtype=dtype,
        dtype_reason=dtype_reason,
        device=str(model.device),
        attention_backend=selection.backend.name,
        attention_reason=why,
        max_model_len=context.tokens,
        max_model_len_reason=context.reason,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_queued_requests=limits.max_queued_requests,
        max_queued_tokens=limits.max_queued_tokens,
        max_queue_seconds=limits.max_queue_seconds,
        block_size=spec.engine.block_size,
        num_blocks=generate.block_manager.num_blocks if generate else 0,
        state_slots=generate.block_manager.num_states if generate else 0,
        state_slot_bytes=state_bytes(Shard(0, spec.engine.tensor_parallel_size).config(config).decoder),
        kv_bytes_per_token=kv_bytes_per_token(spec.engine, config, model.dtype),
        embedding_size=checkpoint.sentences.output_size(config.vector_size),
        load_seconds=0.0,
        reads_pictures=checkpoint.pictures is not None,
        similarity=model.joint.similarity if model.joint is not None else None,
        tensor_parallel_size=spec.engine.tensor_parallel_size,
        draft_model=_draft_model(spec.engine, generate),
        recorded_sizes=_recorded(generate)[0],
        recorded_prompts=_recorded(generate)[1],
        memory_bytes=_memory_bytes(spec.engine, model, generate),
        threads=torch.get_num_threads(),
        versions={"torch": str(torch.__version__), "python": platform.python_version()},
    )


def _number_format(
    engine: EngineConfig, checkpoint: Checkpoint, model: Transformer, selection: Selection
) -> tuple[str, str]:
    """Return the number format of most projections, and why it is this one."""
    config, stored = checkpoint.config, "the checkpoint stores it so"
    in_integers = selection.library is not None or model.linear.integers is not None
    if engine.quantization != "none":
        return engine.quantization, stored if engine.quantization == checkpoint.quantization else "asked for"
    if model.linear.fp8 is not None and any(map(keeps, stored_formats(config))):
        return "fp8", stored
    if in_integers and (kept := _kept(config, kept_as_stored)):
        return kept, stored
    if in_integers and (kept := _kept(config, nearest_kept)):
        return kept, f"the nearest to {_names(config)}, as the checkpoint stores it"
    reason = choose_dtype(engine.dtype, config, model.device).reason
    return str(model.dtype).removeprefix("torch."), reason + (
        f"; stored as {_names(config)}" if config.stored_as else ""
    )


def _kept(config: ModelConfig, keep: Callable[[Storage], NumberFormat | None]) -> str | None:
    """Return the integer format in which most of the quantised projections are kept; None without any."""
    kept = Counter(one.weight for one in map(keep, config.stored_as.values()) if one is not None)
    return str(kept.most_common(1)[0][0]) if kept else None


def _names(config: ModelConfig) -> str:
    return " and ".join(storage.name for storage in stored_formats(config))


def _memory_bytes(engine: EngineConfig, model: Transformer, generate: GenerateEngine | None) -> int:
    """Return the bytes of the weights and KV caches of all ranks, and of a draft model."""
    runner = generate.runner if generate is not None else None
    if not isinstance(runner, ModelRunner):
        return engine.tensor_parallel_size * weight_bytes(model)
    draft = runner.draft_model
    drafts = weight_bytes(draft.model) + draft.cache.nbytes if draft is not None else 0
    return engine.tensor_parallel_size * (weight_bytes(model) + runner.cache.nbytes) + drafts


def _draft_model(engine: EngineConfig, generate: GenerateEngine | None) -> str:
    """Return the folder's name of a model's draft model; empty without one."""
    runner = generate.runner if generate is not None else None
    drafts = isinstance(runner, ModelRunner) and runner.draft_model is not None
    return Path(engine.draft_model).name if drafts and engine.draft_model is not None else ""


def _recorded(generate: GenerateEngine | None) -> tuple[int, int]:
    """Return the numbers of recorded sizes of decode steps and of steps with prompts."""
    if generate is None or not isinstance(generate.runner, ModelRunner):
        return 0, 0
    decodes, prompts = generate.runner.graphs, generate.runner.mixed_graphs
    return len(decodes.sizes) if decodes is not None else 0, len(prompts.sizes) if prompts is not None else 0


_ROUNDING = {
    torch.float32: "which holds them exactly",
    torch.bfloat16: "each rounded by at most 1/512 of itself",
    torch.float16: "each rounded by at most 1/4096 of itself",
}
_NEAREST = {
    NumberKind.INT8: "each rounded by at most 1/254 of the largest in its group",
    NumberKind.INT4: "each rounded by at most 1/14 of the largest in its group",
}


def stored_formats(config: ModelConfig) -> tuple[Storage, ...]:
    """Return the quantised formats of a checkpoint's projections."""
    return tuple(dict.fromkeys(config.stored_as.values()))


def conversions(config: ModelConfig, linear: LinearFactory) -> list[str]:
    """Return a sentence for each stored format that `linear` converts."""
    found = []
    for storage in stored_formats(config):
        in_integers = bool(linear.native) or linear.integers is not None
        if (in_integers and kept_as_stored(storage) is not None) or (linear.fp8 is not None and keeps(storage)):
            continue
        if (linear.native or linear.integers) and linear.quantization != "none":
            kept = f"{linear.quantization}, {FORMATS[linear.quantization].loss}"
        elif in_integers and (nearest := nearest_kept(storage)) is not None:
            kept = f"{nearest.weight} in groups of {nearest.group}, {_NEAREST[nearest.weight]}"
        else:
            kept = f"{str(linear.dtype).removeprefix('torch.')}, {_ROUNDING[linear.dtype]}"
        count = sum(one == storage for one in config.stored_as.values())
        found.append(f"{count} projections are stored as {storage.name} and served in {kept}")
    return found
