"""Layer normalisation (Ba et al. 2016) and RMS normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention.preparation import HeadNorm
from model.config.layer import NormConfig, NormKind, Norms


class OffsetRMSNorm(nn.Module):
    """RMS norm whose gain is 1 + weight, computed in float32: in bfloat16 the sum would lose the weight (Gemma)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self._gain: tuple[tuple[int, torch.dtype], Tensor] | None = None  # and the weight that it was made of

    @property
    def gain(self) -> Tensor:
        """1 + weight `[d]` in float32; computed once for a weight that takes no gradients."""
        if self.weight.requires_grad:
            return 1.0 + self.weight.float()
        made_of = (self.weight.data_ptr(), self.weight.dtype)
        if self._gain is None or self._gain[0] != made_of:
            self._gain = (made_of, 1.0 + self.weight.float())
        return self._gain[1]

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.gain, self.eps).to(x.dtype)


def build_norm(config: NormConfig | None, size: int) -> nn.Module:
    """The norm of rows of `size`; None is the identity."""
    if config is None:
        return nn.Identity()
    if config.kind is NormKind.RMS and config.unit_offset:
        return OffsetRMSNorm(size, config.eps)
    if config.kind is NormKind.RMS:
        return nn.RMSNorm(size, eps=config.eps)
    return nn.LayerNorm(size, eps=config.eps, bias=config.bias)


def head_norm(norm: nn.Module) -> HeadNorm:
    """A norm of heads as data."""
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm | OffsetRMSNorm) and norm.eps is not None
    if isinstance(norm, nn.LayerNorm):
        return HeadNorm(norm.weight, norm.bias, norm.eps, centred=True)
    return HeadNorm(norm.gain if isinstance(norm, OffsetRMSNorm) else norm.weight, None, norm.eps, centred=False)


class SublayerNorms(nn.Module):
    """The norms around one sublayer, as `model.config.layer.Norms` has them."""

    def __init__(self, config: Norms, size: int) -> None:
        super().__init__()
        self.has_output = config.output is not None
        self.pre = build_norm(config.pre, size)
        self.output = build_norm(config.output, size)
        self.post = build_norm(config.post, size)
