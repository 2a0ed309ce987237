"""Vectors of tokens for each layer (`LayerEmbeddingConfig`): where they come from, and the sublayer that reads them."""

from __future__ import annotations

from torch import Tensor, nn

from triptych.model.config.layer import LayerEmbeddingConfig
from triptych.model.config.model import EmbeddingConfig
from triptych.model.linear.base import LinearSpec, Part
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.activations import ACTIVATIONS
from triptych.model.network.embeddings import token_table
from triptych.model.network.norms import build_norm


class LayerEmbeddings(nn.Module):
    """`(table(id) sqrt(P) + norm(W x / sqrt(d))) / sqrt(2)` of each token, P numbers for each layer."""

    def __init__(
        self, config: LayerEmbeddingConfig, embedding: EmbeddingConfig, layers: int, linear: LinearFactory
    ) -> None:
        super().__init__()
        self.shape = (layers, config.size)
        width, size = layers * config.size, embedding.embedding_size
        self.tokens = token_table(embedding.vocab_size, width, linear.collective)
        self.project = linear(LinearSpec("project", size, (Part(width),), bias=False))
        self.norm = build_norm(config.norm, config.size)

    def forward(self, ids: Tensor, tokens: Tensor) -> Tensor:  # [T], [T, d] embedded -> [T, layers, P]
        size = tokens.shape[-1]
        projected = self.norm((self.project(tokens) * size**-0.5).unflatten(-1, self.shape))
        vectors = self.tokens(ids).to(projected.dtype).unflatten(-1, self.shape)
        return (projected + vectors * self.shape[1] ** 0.5) * 2**-0.5


class VectorGate(nn.Module):
    """`norm(project(act(gate(x)) * v))` of rows x and their vectors v for the layer."""

    def __init__(self, config: LayerEmbeddingConfig, hidden_size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.gate = linear(LinearSpec("gate", hidden_size, (Part(config.size),), bias=False))
        self.project = linear(LinearSpec("project", config.size, (Part(hidden_size),), bias=False))
        self.norm = build_norm(config.norm, hidden_size)

    def forward(self, x: Tensor, vectors: Tensor) -> Tensor:  # [T, d], [T, P] -> [T, d]
        return self.norm(self.project(self.activation(self.gate(x)) * vectors))
