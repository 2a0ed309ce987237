"""The feed-forward sublayer and its activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config.layer import Activation, MLPConfig
from model.linear.base import LinearSpec, Part, Split
from model.linear.factory import LinearFactory
from model.network.fused_ops import gated
from model.network.step_context import StepContext

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.RELU: functional.relu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.SILU: functional.silu,
    Activation.TANH: torch.tanh,
}


class MLP(nn.Module):
    """`down(act(up(x)))`; gated: `down(act(gate(x)) * up(x))` with gate and up in one matrix."""

    def __init__(self, config: MLPConfig, hidden_size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.gated = config.gated
        self.activation = ACTIVATIONS[config.activation]
        columns = (Part(config.intermediate_size),) * (2 if config.gated else 1)
        self.up = linear(LinearSpec("up", hidden_size, columns, config.bias, Split.OUTPUTS))
        bias = config.bias if config.down_bias is None else config.down_bias
        self.down = linear(LinearSpec("down", config.intermediate_size, (Part(hidden_size),), bias, Split.INPUTS))

    def forward(self, x: Tensor, step: StepContext) -> Tensor:  # [T, d] -> [T, d]
        hidden = step.project(self.up, x)
        hidden = gated(hidden, self.activation) if self.gated else self.activation(hidden)
        return step.project(self.down, hidden)
