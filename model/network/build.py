"""Builds a network without storage for its weights: a whole one, or one rank's part of it.

A rank's part is the same network, smaller, whose sums go over all ranks: two sums a layer, behind attention and MLP
(three with cross attention), and one behind the token table. Hidden states are then whole and equal on every rank
(Shoeybi et al. 2019, figure 3). Logits are put together from each rank's part of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.attention.base import AttentionBackend
from model.config.model import ModelConfig
from model.config.sharding import Shard
from model.linear.parallel import RowLinear
from model.network.embeddings import VocabularyEmbedding
from model.network.layer import Layer
from model.network.transformer import Transformer
from model.parallel.group import Group


def build_model(config: ModelConfig, backend: AttentionBackend) -> Transformer:
    """The network without storage: every parameter is on torch's meta device."""
    with torch.device("meta"):
        return Transformer(config, backend)


def parameter_shapes(model: Transformer) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


class ShardedTransformer(Transformer):
    """One rank. Every rank must make the same calls in the same order; `config` is the whole model's."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend, group: Group) -> None:
        shard = group.shard
        super().__init__(shard.config(config), backend)
        self.config = config
        self.group = group
        vocabulary = config.embedding.vocab_size
        self.vocabulary = [Shard(rank, shard.size).shard_range(vocabulary) for rank in range(shard.size)]
        if self.tokens is not None:
            self.tokens = VocabularyEmbedding(self.tokens, self.vocabulary[shard.rank], group)
        for module in list(self.modules()):
            if isinstance(module, Layer):
                module.attn.out = RowLinear(module.attn.out, group)
                module.mlp.down = RowLinear(module.mlp.down, group)
                if module.cross is not None:
                    module.cross.out = RowLinear(module.cross.out, group)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.group.concatenate(super().logits(hidden), self.vocabulary)


def build_shard(config: ModelConfig, backend: AttentionBackend, group: Group) -> ShardedTransformer:
    """One rank's network without storage, as `model.network.build.build_model`."""
    with torch.device("meta"):
        return ShardedTransformer(config, backend, group)
