"""Layer normalisation (Ba et al. 2016) and RMS normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config.layer import NormConfig, NormKind, Norms


class OffsetRMSNorm(nn.Module):
    """RMS norm whose gain is 1 + weight, computed in float32: in bfloat16 the sum would lose the weight (Gemma)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


def build_norm(config: NormConfig | None, size: int) -> nn.Module:
    """The norm of rows of `size`; None is the identity."""
    if config is None:
        return nn.Identity()
    if config.kind is NormKind.RMS and config.unit_offset:
        return OffsetRMSNorm(size, config.eps)
    if config.kind is NormKind.RMS:
        return nn.RMSNorm(size, eps=config.eps)
    return nn.LayerNorm(size, eps=config.eps, bias=config.bias)


class SublayerNorms(nn.Module):
    """The norms around one sublayer, as `model.config.layer.Norms` has them."""

    def __init__(self, config: Norms, size: int) -> None:
        super().__init__()
        self.has_output = config.output is not None
        self.pre = build_norm(config.pre, size)
        self.output = build_norm(config.output, size)
        self.post = build_norm(config.post, size)
