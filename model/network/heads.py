"""Hidden states to scores over labels."""

from __future__ import annotations

from torch import Tensor, nn

from model.config.model import ClassifierConfig
from model.linear.base import LinearSpec, Part
from model.linear.factory import LinearFactory
from model.network.mlp import ACTIVATIONS
from model.network.norms import build_norm


class Classifier(nn.Module):
    """Vectors to scores over labels."""

    def __init__(self, config: ClassifierConfig, hidden_size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.dense, self.activation = None, None
        if config.dense is not None:
            self.dense = linear(LinearSpec("dense", hidden_size, (Part(hidden_size),), config.dense_bias))
            self.activation = ACTIVATIONS[config.dense]
        self.norm = build_norm(config.norm, hidden_size)
        self.out = linear(LinearSpec("out", hidden_size, (Part(len(config.labels)),), config.bias))

    def forward(self, x: Tensor) -> Tensor:  # [N, d] -> [N, labels]
        if self.dense is not None and self.activation is not None:
            x = self.norm(self.activation(self.dense(x)))
        return self.out(x)
