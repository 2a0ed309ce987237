"""Checks and plans the draft model of a served model, before a weight is read.

A draft model proposes tokens of the same vocabulary. It uses the block numbers of the served model's first pool
(`triptych.model.engine.speculation.draft_model`), so that pool must keep all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from triptych.model.api.engine_config import BatchLimits, EngineConfig
from triptych.model.attention.selection import Selection
from triptych.model.checkpoint.folder import Checkpoint, read_checkpoint
from triptych.model.config.cache import paged_specs, pools_of
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.engine.planning.cache_budget import kv_bytes_per_token
from triptych.model.engine.planning.kernels import check_kernels, choose_dtype, linears_of, select_kernels
from triptych.model.engine.planning.memory_plan import plan_weights
from triptych.model.engine.speculation.model_drafts import COMPUTED_AT_ONCE
from triptych.model.errors import ConfigError
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.native_scratch import planned_scratch
from triptych.model.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft model that fits its served model, and what computes it."""

    checkpoint: Checkpoint
    selection: Selection
    linear: LinearFactory
    context: int  # tokens
    token_bytes: int  # keys and values of a token
    scratch: int  # bytes of the C stacks

    @property
    def memory(self) -> int:
        """The bytes of weights, load buffer and scratch."""
        weights = plan_weights(self.checkpoint, self.linear)
        return weights.total + weights.buffer + self.scratch


def plan_draft(
    name: str, engine: EngineConfig, served: Checkpoint, device: torch.device, limits: BatchLimits, context: int
) -> DraftPlan | None:
    """Plan the draft model of the served model `name`; None without one."""
    found = draft_checkpoint(name, engine, served, context)
    if found is None:
        return None
    checkpoint, context = found
    dtype = choose_dtype(engine.dtype, checkpoint.config, device).dtype
    selection = select_kernels(engine, checkpoint.config, device, dtype)
    if selection.library is not None and engine.quantization == "none":
        engine = replace(engine, quantization=checkpoint.quantization)
    check_kernels(engine, checkpoint.config, selection)
    linear = linears_of(engine, checkpoint.config, selection, dtype, device)
    scratch = 0
    if linear.library is not None:
        rows = COMPUTED_AT_ONCE + 2 * limits.max_num_seqs  # of a pass at most
        scratch = planned_scratch(
            linear.library, checkpoint.config, linear.dtype, linear.quantization, rows=rows, context=context
        )
    token_bytes = kv_bytes_per_token(engine, checkpoint.config, linear.dtype)
    return DraftPlan(checkpoint, selection, linear, context, token_bytes, scratch)


def draft_checkpoint(
    name: str, engine: EngineConfig, served: Checkpoint, context: int
) -> tuple[Checkpoint, int] | None:
    """Return the draft model of the settings and the sequence length up to which it proposes; None without one.

    A draft model for all models is left out for a model that does not use speculation or is not decoder-only. Raises
    `ConfigError` if it does not fit the served model `name`.
    """
    if engine.draft_model is None:
        return None
    if engine.draft_model_shared and not (engine.num_speculative_tokens and _drafts_for(served.config)):
        return None
    try:
        return _draft_checkpoint(engine, engine.draft_model, served, context)
    except ConfigError as error:
        others = "; num_speculative_tokens 0 serves this model without it" if engine.draft_model_shared else ""
        raise ConfigError(f"{name}: {error}{others}") from None


def _draft_checkpoint(
    engine: EngineConfig, draft_model: str, served: Checkpoint, context: int
) -> tuple[Checkpoint, int]:
    path = Path(draft_model)
    if engine.tensor_parallel_size > 1:
        raise ConfigError(f"draft_model: it runs on one rank, tensor_parallel_size is {engine.tensor_parallel_size}")
    target = _decoder(served.config, "the served model")
    found = read_checkpoint(path, pickle=engine.pickle, pictures=False)
    if _decoder(found.config, path.name).recurrences:
        raise ConfigError(
            f"draft_model: {path.name} ({found.config.model_type}) has recurrent layers; their states cannot follow "
            "the pages of the served model"
        )
    if (window := pools_of(paged_specs(target, "float32"))[0].window) is not None:
        raise ConfigError(f"draft_model: no layer of the served model keeps more than {window} tokens to draft from")
    _check_vocabulary(served, found)
    longest = found.config.longest_context
    context = context if longest is None else min(context, longest)
    return replace(found, config=found.config.stretched(context)), context


def _drafts_for(config: ModelConfig) -> bool:
    """Whether a model can be a draft model or have one: it is decoder-only and generates."""
    return config.can_generate and config.encoder is None


def _decoder(config: ModelConfig, name: str) -> StackConfig:
    """Return the decoder of a decoder-only model; raises `ConfigError` for others."""
    if config.decoder is None or not _drafts_for(config):
        raise ConfigError(f"draft_model: {name} is {config.form}; served and draft model must be decoder-only")
    return config.decoder


def _check_vocabulary(served: Checkpoint, found: Checkpoint) -> None:
    """Raise `ConfigError` for another vocabulary. Tables of the same one may be padded to different sizes."""
    ours, theirs = served.config.embedding.vocab_size, found.config.embedding.vocab_size
    known = [path / "tokenizer.json" for path in (served.path, found.path)]
    if all(path.is_file() for path in known) and known[0].read_bytes() == known[1].read_bytes():
        return
    tokenizers = [Tokenizer.from_folder(path) for path in (served.path, found.path)]
    names = [one.token_names(min(ours, theirs)) for one in tokenizers if one is not None]
    if len(names) == 1 or (len(names) == 2 and names[0] != names[1]) or (not names and ours != theirs):
        raise ConfigError(
            f"draft_model: {found.path.name} has another vocabulary ({theirs} tokens) than the served model ({ours})"
        )
