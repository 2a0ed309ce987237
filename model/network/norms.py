"""Layer normalisation (Ba et al. 2016) and RMS normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.model.attention.base import HeadNorm
from triptych.model.config.attention import NormConfig, NormKind, NormSpan
from triptych.model.config.layer import Norms
from triptych.model.errors import ConfigError
from triptych.model.linear.factory import Collective


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


class OffsetLayerNorm(nn.Module):
    """LayerNorm whose gain is 1 + weight, computed in float32 as `OffsetRMSNorm` is (Nemotron)."""

    def __init__(self, size: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return functional.layer_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), bias, self.eps).to(
            x.dtype
        )


class HeadsNorm(nn.Module):
    """Norm of a token's queries or keys with gains `[heads, D]`: of each head, or of all heads together.

    A norm over all heads sums the squares of all ranks.
    """

    def __init__(
        self, config: NormConfig, span: NormSpan, num_heads: int, head_dim: int, collective: Collective | None
    ) -> None:
        super().__init__()
        if config.unit_offset or (span is NormSpan.ALL_HEADS and config.kind is not NormKind.RMS):
            raise ConfigError(f"a norm of {span} is RMS, or a LayerNorm of each head, with gains as they are stored")
        self.kind, self.span, self.eps = config.kind, span, config.eps
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim))
        self.collective = collective if span is NormSpan.ALL_HEADS else None

    def forward(self, x: Tensor) -> Tensor:  # [T, heads, D] -> [T, heads, D]
        wide = x.float()
        if self.kind is NormKind.LAYER:
            wide = wide - wide.mean(dim=-1, keepdim=True)
        squares = wide.pow(2)
        squares = squares.mean(dim=(1, 2), keepdim=True) if self.span is NormSpan.ALL_HEADS else squares.mean(-1, True)
        if self.collective is not None:
            squares = self.collective.sum(squares) / self.collective.shard.size
        return (wide * torch.rsqrt(squares + self.eps) * self.weight.float()).to(x.dtype)


def build_heads_norm(
    config: NormConfig, span: NormSpan, num_heads: int, head_dim: int, collective: Collective | None
) -> nn.Module:
    """Return the norm of queries or keys `[T, heads, D]`."""
    if span is NormSpan.HEAD:
        return build_norm(config, head_dim)
    return HeadsNorm(config, span, num_heads, head_dim, collective)


def build_norm(config: NormConfig | None, size: int) -> nn.Module:
    """Return the norm of rows of `size`; the identity for None."""
    if config is None:
        return nn.Identity()
    if config.kind is NormKind.RMS and config.unit_offset:
        return OffsetRMSNorm(size, config.eps)
    if config.kind is NormKind.RMS:
        return nn.RMSNorm(size, eps=config.eps, elementwise_affine=config.gain)
    if config.unit_offset:
        return OffsetLayerNorm(size, config.eps, bias=config.bias)
    return nn.LayerNorm(size, eps=config.eps, elementwise_affine=config.gain, bias=config.bias)


def head_norm(norm: nn.Module) -> HeadNorm:
    """Return a norm of heads as data, for backends that compute it."""
    if isinstance(norm, OffsetRMSNorm):
        return HeadNorm(norm.gain, None, norm.eps, centred=False)
    if isinstance(norm, nn.LayerNorm):
        return HeadNorm(norm.weight, norm.bias, norm.eps, centred=True)
    assert isinstance(norm, nn.RMSNorm) and norm.eps is not None
    return HeadNorm(norm.weight, None, norm.eps, centred=False)


class SublayerNorms(nn.Module):
    """The norms around one sublayer, as `triptych.model.config.layer.Norms` has them."""

    def __init__(self, config: Norms, size: int) -> None:
        super().__init__()
        self.has_output = config.output is not None
        self.pre = build_norm(config.pre, size)
        self.output = build_norm(config.output, size)
        self.post = build_norm(config.post, size)
