"""A rank's share of a Transformer: the same network, smaller, whose sums go over all ranks.

Two sums a block, behind attention and MLP (three with cross attention), one behind the token table: hidden states are
then whole and equal on every rank (Shoeybi et al. 2019, figure 3). Logits are put together from each rank's part of
the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention.base import AttentionBackend
from model.config.model import ModelConfig
from model.config.sharding import Range, Shard
from model.network.transformer import Block, Transformer
from model.parallel.group import Group


class RowLinear(nn.Linear):
    """`x W^T + b` where a rank has some of the columns of x and of W, and every rank the whole of b."""

    def __init__(self, linear: nn.Linear, group: Group) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, linear.weight.device)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        whole = self.group.sum(functional.linear(x, self.weight))
        return whole if self.bias is None else whole + self.bias


class VocabularyEmbedding(nn.Embedding):
    """A token table of which a rank has the rows `[first, last)`."""

    def __init__(self, table: nn.Embedding, rows: Range, group: Group) -> None:
        # The weight is given because drawing one on the meta device would load torch's compiler.
        super().__init__(table.num_embeddings, table.embedding_dim, _weight=table.weight.detach())
        self.first = rows[0]
        self.group = group

    def forward(self, ids: Tensor) -> Tensor:  # [T] -> [T, E]
        rows = ids - self.first
        elsewhere = (rows < 0) | (rows >= self.num_embeddings)
        vectors = super().forward(rows.masked_fill(elsewhere, 0)).masked_fill(elsewhere[:, None], 0.0)
        return self.group.sum(vectors)


class ShardedTransformer(Transformer):
    """One rank. Every rank must make the same calls in the same order; `config` is the whole model's."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend, group: Group) -> None:
        shard = group.shard
        super().__init__(shard.config(config), backend)
        self.config = config
        self.group = group
        vocabulary = config.embedding.vocab_size
        self.vocabulary = [Shard(rank, shard.size).share(vocabulary) for rank in range(shard.size)]
        if self.tokens is not None:
            self.tokens = VocabularyEmbedding(self.tokens, self.vocabulary[shard.rank], group)
        for module in list(self.modules()):
            if isinstance(module, Block):
                module.attn.out = RowLinear(module.attn.out, group)
                module.mlp.down = RowLinear(module.mlp.down, group)
                if module.cross is not None:
                    module.cross.out = RowLinear(module.cross.out, group)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.group.concatenate(super().logits(hidden), self.vocabulary)


def build_shard(config: ModelConfig, backend: AttentionBackend, group: Group) -> ShardedTransformer:
    """One rank's network without storage, as `model.network.weights.build_model`."""
    with torch.device("meta"):
        return ShardedTransformer(config, backend, group)
