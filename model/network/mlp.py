"""The feed-forward sublayer and its activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config.layer import Activation, MLPConfig
from model.linear.base import LinearSpec, Part, Split
from model.linear.factory import LinearFactory
from model.network.fused_ops import clamped, gated
from model.network.inputs import StepContext

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.RELU: functional.relu,
    Activation.RELU_SQUARED: lambda x: functional.relu(x).square(),
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.SILU: functional.silu,
    Activation.TANH: torch.tanh,
    Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),  # Hendrycks & Gimpel 2016, section 2
    Activation.CLIPPED_GELU: lambda x: functional.gelu(x).clip(-10.0, 10.0),
    Activation.MISH: functional.mish,
    Activation.RELU6: functional.relu6,
    Activation.LEAKY_RELU: functional.leaky_relu,
    Activation.SIGMOID: torch.sigmoid,
    Activation.HARD_SWISH: functional.hardswish,
    Activation.LAPLACE: lambda x: 0.5 * (1.0 + torch.erf((x - 0.707107) / (0.282095 * 2**0.5))),  # Ma et al. 2022
    Activation.SQRT_SOFTPLUS: lambda x: functional.softplus(x).sqrt(),
    Activation.IDENTITY: lambda x: x,
}


class MLP(nn.Module):
    """`down(act(up(x)))`; gated: `down(act(gate(x)) * up(x))` with gate and up in one matrix."""

    def __init__(self, config: MLPConfig, hidden_size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.config = config
        up, down = projections(config, hidden_size)
        self.up, self.down = linear(up), linear(down)
        self.xielu = nn.Parameter(torch.empty(4)) if config.xielu else None

    def forward(self, x: Tensor, step: StepContext) -> Tensor:  # [T, d] -> [T, d]
        inner = step.project(self.up, x)
        inner = activated(self.config, inner) if self.xielu is None else xielu(inner, self.xielu)
        return step.project(self.down, inner)


def projections(config: MLPConfig, hidden_size: int, experts: int = 1) -> tuple[LinearSpec, LinearSpec]:
    """Return the specs of the up projection (with the gate) and of the down projection, for `experts` MLPs."""
    columns = (Part(config.intermediate_size),) * (2 if config.gated else 1)
    up = LinearSpec("up", hidden_size, columns, config.bias, Split.OUTPUTS, experts=experts)
    bias = config.bias if config.down_bias is None else config.down_bias
    size = (Part(hidden_size),)
    return up, LinearSpec("down", config.intermediate_size, size, bias, Split.INPUTS, experts=experts)


def xielu(x: Tensor, learned: Tensor) -> Tensor:
    """xIELU of `[T, f]`: `a x^2 + b x` above 0, `c (e^min(x, eps) - 1 - x) + b x` below (Huang & Schlag 2024).

    `learned` are the logarithms of e^a - 1 and of e^(c - b) - 1, then b and eps.
    """
    first, second, linear, eps = learned.float().unbind()
    wide, above, below = x.float(), functional.softplus(first), linear + functional.softplus(second)
    bent = torch.where(wide > 0, above * wide * wide, (torch.expm1(torch.minimum(wide, eps)) - wide) * below)
    return (bent + linear * wide).to(x.dtype)


def activated(config: MLPConfig, hidden: Tensor) -> Tensor:
    """What comes down, `[T, f]`, of what went up, `[T, f]` or gated `[T, 2 f]`."""
    if config.clamp is not None:
        return clamped(hidden, config.clamp.limit, config.clamp.gain)
    activation = ACTIVATIONS[config.activation]
    return gated(hidden, activation) if config.gated else activation(hidden)
