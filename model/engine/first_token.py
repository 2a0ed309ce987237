"""Computes one token of a model before it is announced: what only computing finds out is found at load.

A config.json can be well formed and still make every forward pass raise, or yield no numbers: a rope base of 1, or a
table of distances that is too short. Such a model is refused here, so no client's request is the first to find it.
"""

from __future__ import annotations

import logging
import math

import numpy as np
import torch

from triptych.model.api.request import (
    EncodeOutput,
    EncodeRequest,
    EncodeTask,
    FinishReason,
    Request,
    Source,
    TokenOutput,
)
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.config.model import ModelConfig
from triptych.model.engine.encode_engine import EncodeEngine
from triptych.model.engine.execution.sources import blank_source
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.engine.scheduling.scheduled_step import StepBudget
from triptych.model.errors import ConfigError, EngineDeadError
from triptych.model.system.background_work import Work

_PROMPT_TOKENS = 5  # so that tokens have neighbours at several distances
_ID = "first token"
_MESSAGE_CHARACTERS = 200
_MAX_STEPS = 10_000  # a source takes one for each layer of its encoder, a token one
# A step computes one layer of a source, so that a load holds up the steps of other models for a short time only.
_ONE_LAYER = StepBudget(whole_tokens=1)


def compute_first_token(encode: EncodeEngine, generate: GenerateEngine | None) -> Work[None]:
    """Encode a short input and generate one token; nothing of it is kept.

    Raises `ConfigError` if the model raises or computes no numbers.
    """
    config = encode.model.config
    try:
        if generate is None or config.audio is None:  # windows of sound are long: one pass over the encoder is enough
            yield from _encode(encode, config)
        if generate is not None:
            yield from _generate(generate, config, encode.max_num_batched_tokens)
    except (ConfigError, EngineDeadError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        logging.getLogger(__name__).info("the first token of %s", encode.name, exc_info=error)
        reason = " ".join(str(error).split())[:_MESSAGE_CHARACTERS]
        raise ConfigError(
            f"{encode.name}: its first token cannot be computed ({type(error).__name__}: {reason}); "
            "check the numbers in config.json"
        ) from None


def _encode(encode: EncodeEngine, config: ModelConfig) -> Work[None]:
    encode.probe()
    yield None
    task = EncodeTask.LOGITS if config.classifier is not None else EncodeTask.EMBEDDING
    encode.add(EncodeRequest(_ID, encode.name, _source(config, encode.max_num_batched_tokens), task))
    found: list[EncodeOutput] = []
    while encode.has_work:
        found += encode.step(_ONE_LAYER)[0]
        yield None
    for output in found:
        if output.finish_reason is FinishReason.ERROR:
            raise RuntimeError("the log says why")
        if not np.isfinite(np.frombuffer(output.data, np.float32)).all():
            raise ArithmeticError(f"its {task} is not finite")


def _generate(generate: GenerateEngine, config: ModelConfig, max_tokens: int) -> Work[None]:
    prompt, source = _source(config, min(max_tokens, generate.max_model_len - 1)).token_ids, None
    if config.encoder is not None:
        assert config.decoder_start_token_id is not None
        prompt, source = (config.decoder_start_token_id,), _source(config, max_tokens)
    params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=1)
    generate.add(Request(_ID, generate.name, tuple(prompt), params, source, cache_salt=_ID))
    for output in (yield from _outputs(generate)):
        if output.finish_reason is FinishReason.ERROR:
            raise RuntimeError(output.error or "the log says why")
        if any(math.isnan(one.logprob) for one in output.logprobs or ()):
            raise ArithmeticError("its logits are not finite")
    generate.block_manager.clear_cache()


def _outputs(generate: GenerateEngine) -> Work[list[TokenOutput]]:
    found: list[TokenOutput] = []
    for _ in range(_MAX_STEPS):
        found += generate.step(_ONE_LAYER)[0]
        if not generate.has_work:
            return found
        yield None
    raise RuntimeError("it does not end")


def _source(config: ModelConfig, max_tokens: int) -> Source:
    return blank_source(config, max(1, min(_PROMPT_TOKENS, max_tokens, config.max_positions or _PROMPT_TOKENS)))
