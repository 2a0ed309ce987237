"""The Python time of an engine step, measured with a model that computes nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from triptych.model.api.request import Request
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.cache.kv_cache import KVCache
from triptych.model.config.attention import AttentionConfig
from triptych.model.config.cache import PoolSize
from triptych.model.config.layer import Activation, LayerConfig, MLPConfig, Norms
from triptych.model.config.model import EmbeddingConfig, HeadConfig, ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.engine.execution.model_runner import ModelRunner
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.scheduler import Scheduler

_BLOCK = 16
_VOCAB = 64


class EmptyModel:
    """Returns the same logits without computing: what a decoder's step asks of a `Transformer`."""

    encoder = None
    backend = SimpleNamespace(graph_safe=False)
    linear = SimpleNamespace(collective=None)  # not divided over ranks
    lora: Mapping[str, Any] = MappingProxyType({})  # adapters

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def embed_tokens(self, ids: Tensor) -> Tensor:
        return torch.zeros(len(ids), 1)

    def decoder(self, hidden: Tensor, *_: Any) -> Tensor:
        return hidden

    def partial_logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), _VOCAB)


def step_milliseconds(batch: int, *, temperature: float = 0.0, context: int = 256, steps: int = 100) -> float:
    """Return the median time of a step in which `batch` sequences decode, without the model's arithmetic."""
    layer = LayerConfig(AttentionConfig(1, 1, 1, 1.0), MLPConfig(1, Activation.RELU), (Norms(), Norms()))
    stack = StackConfig((layer,), hidden_size=1, causal=True)
    config = ModelConfig("llama", EmbeddingConfig(_VOCAB, 1), decoder=stack, head=HeadConfig(tied=True))
    blocks = BlockManager([PoolSize(batch * (2 + (context + steps) // _BLOCK))], _BLOCK)
    cache = KVCache(stack, [blocks.num_blocks], _BLOCK, torch.float32, torch.device("cpu"))
    runner = ModelRunner(EmptyModel(config), cache, blocks)  # type: ignore[arg-type]
    scheduler = Scheduler(blocks, batch, batch * context)
    engine = GenerateEngine("hollow", runner, scheduler, max_model_len=context + steps + 2)
    params = SamplingParams(max_tokens=steps, ignore_eos=True, temperature=temperature)
    for number in range(batch):
        ids = tuple((number + at) % _VOCAB for at in range(context))
        engine.add(Request(str(number), "hollow", ids, params))
    engine.step()  # all prompts
    seconds = []
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3
