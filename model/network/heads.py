"""Hidden states to scores over labels, and of masked tokens over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from triptych.model.config.model import ClassifierConfig, ClassifierInput, MaskedHeadConfig
from triptych.model.linear.base import Linear, LinearSpec, Part, Split
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.activations import ACTIVATIONS
from triptych.model.network.norms import build_norm


class Classifier(nn.Module):
    """Vectors to scores over labels."""

    def __init__(self, config: ClassifierConfig, hidden_size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.dense, self.activation = None, None
        if config.dense is not None:
            self.dense = linear(LinearSpec("dense", hidden_size, (Part(hidden_size),), config.dense_bias))
            self.activation = ACTIVATIONS[config.dense]
        self.norm = build_norm(config.norm, hidden_size)
        self.compares = len(config.tokens) == 2
        outputs = (Part(len(config.tokens) or len(config.labels)),)
        width = hidden_size * (2 if config.input is ClassifierInput.FIRST_AND_MEAN else 1)
        self.out = linear(LinearSpec("out", width, outputs, config.bias))
        self.second: Linear | None = None
        if config.input is ClassifierInput.FIRST_TWO:
            self.second = linear(LinearSpec("second", hidden_size, outputs, config.bias))

    def forward(self, x: Tensor) -> Tensor:  # [N, d] -> [N, labels]
        if self.dense is not None and self.activation is not None:
            x = self.norm(self.activation(self.dense(x)))
        if self.second is not None:
            return (self.out(x[:1]) + self.second(x[1:])) / 2
        scores: Tensor = self.out(x)
        return scores[:, :1] - scores[:, 1:] if self.compares else scores


class MaskedHead(nn.Module):
    """Hidden states to logits over the vocabulary, or over a rank's part of it; `table` is the token table."""

    def __init__(
        self,
        config: MaskedHeadConfig,
        hidden_size: int,
        vocab_size: int,
        linear: LinearFactory,
        table: Callable[[], Tensor],
    ) -> None:
        super().__init__()
        self.dense, self.activation = None, None
        if config.activation is not None:
            self.dense = linear(LinearSpec("dense", hidden_size, (Part(config.size),), config.dense_bias))
            self.activation = ACTIVATIONS[config.activation]
        self.norm = build_norm(config.norm, config.size)
        tied_to = "tokens.weight" if config.tied else None
        out = LinearSpec("out", config.size, (Part(vocab_size),), config.bias, Split.OUTPUTS, tied_to=tied_to)
        self.out = linear(out, table)

    def forward(self, x: Tensor) -> Tensor:  # [N, d] -> [N, V]
        if self.dense is not None and self.activation is not None:
            x = self.norm(self.activation(self.dense(x)))
        logits: Tensor = self.out(x)
        return logits
