"""The activations of a network, as torch computes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from triptych.model.config.layer import Activation

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
