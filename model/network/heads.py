"""Hidden states to logits over the vocabulary, or to scores over labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.config.model import ClassifierConfig, ModelConfig
from model.linear.native import PackedLinear
from model.native.library import Kind, Library
from model.network.mlp import ACTIVATIONS


class Head(nn.Module):
    """Hidden states to logits; the matrix is the token table's where they are tied."""

    def __init__(self, config: ModelConfig, hidden_size: int) -> None:
        super().__init__()
        assert config.head is not None
        vocab = config.embedding.vocab_size
        self.scale = config.head.scale
        self.weight = None if config.head.tied else nn.Parameter(torch.empty(vocab, hidden_size))
        self.bias = nn.Parameter(torch.zeros(vocab)) if config.head.bias else None
        self.packed: PackedLinear | None = None

    def pack(self, library: Library, table: Tensor, kind: Kind | None) -> None:
        """Compute in C from now on; matrix and bias are given up, a tied table stays for the embeddings.

        On the meta device that is room, as in `PackedLinear`.
        """
        weight = table if self.weight is None else self.weight
        self.packed = PackedLinear(library, weight, self.bias, kind)
        self.weight = self.bias = None

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        if self.scale != 1.0:
            hidden = hidden * self.scale
        if self.packed is not None:
            return self.packed(hidden)
        return nn.functional.linear(hidden, table if self.weight is None else self.weight, self.bias)


class Classifier(nn.Module):
    """Vectors to scores over labels."""

    def __init__(self, config: ClassifierConfig, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size) if config.dense is not None else None
        self.activation = ACTIVATIONS[config.dense] if config.dense is not None else None
        self.out = nn.Linear(hidden_size, len(config.labels), bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:  # [N, d] -> [N, labels]
        if self.dense is not None and self.activation is not None:
            x = self.activation(self.dense(x))
        return self.out(x)
