"""The parts of a block: norms, MLP, multi-head attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention.base import AttentionBackend, AttentionMetadata, ScoreBias
from model.cache.paged import LayerCache
from model.config.model import Activation, AttentionConfig, MLPConfig, NormConfig, NormKind
from model.network.fused_ops import gated, rotate_both

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.RELU: functional.relu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.SILU: functional.silu,
    Activation.TANH: torch.tanh,
}


class OffsetRMSNorm(nn.Module):
    """RMS norm whose gain is 1 + weight, computed in float32: in bfloat16 the sum would lose the weight (Gemma)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


def build_norm(config: NormConfig, size: int) -> nn.Module:
    if config.kind is NormKind.RMS and config.unit_offset:
        return OffsetRMSNorm(size, config.eps)
    if config.kind is NormKind.RMS:
        return nn.RMSNorm(size, eps=config.eps)
    return nn.LayerNorm(size, eps=config.eps)


class MLP(nn.Module):
    """`down(act(up(x)))`; gated: `down(act(gate(x)) * up(x))` with gate and up in one matrix."""

    def __init__(self, config: MLPConfig, hidden_size: int) -> None:
        super().__init__()
        self.gated = config.gated
        self.activation = ACTIVATIONS[config.activation]
        self.up = nn.Linear(hidden_size, config.intermediate_size * (2 if config.gated else 1), bias=config.bias)
        self.down = nn.Linear(config.intermediate_size, hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:  # [T, d] -> [T, d]
        hidden = self.up(x)
        return self.down(gated(hidden, self.activation) if self.gated else self.activation(hidden))


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself; q, k and v come from one matrix `[q; k; v]`."""

    def __init__(self, config: AttentionConfig, hidden_size: int, norm: NormConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(hidden_size, config.query_size + 2 * config.kv_size, bias=config.qkv_bias)
        self.out = nn.Linear(config.query_size, hidden_size, bias=config.out_bias)
        self.offset = nn.Parameter(torch.empty(config.num_heads, config.head_dim)) if config.query_offset else None
        if config.qk_norm:
            self.q_norm, self.k_norm = build_norm(norm, config.head_dim), build_norm(norm, config.head_dim)

    def forward(
        self,
        x: Tensor,  # [T, d]
        backend: AttentionBackend,
        metadata: AttentionMetadata,
        cache: LayerCache | None,
        rotary: tuple[Tensor, Tensor] | None,
        bias: ScoreBias | None,
    ) -> Tensor:
        config = self.config
        q, k, v = self.qkv(x).split((config.query_size, config.kv_size, config.kv_size), dim=-1)
        q = q.unflatten(-1, (config.num_heads, config.head_dim))
        k = k.unflatten(-1, (config.num_kv_heads, config.head_dim))
        v = v.unflatten(-1, (config.num_kv_heads, config.head_dim))
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.offset is not None:
            q = q + self.offset
        if rotary is not None:
            q, k = rotate_both(q, k, *rotary)
        return self.out(backend.forward(q, k, v, cache, metadata, config, bias).flatten(1))


class CrossAttention(nn.Module):
    """Multi-head attention of the decoder to the encoder's memory, whose keys and values are computed once."""

    def __init__(self, config: AttentionConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.q = nn.Linear(hidden_size, config.query_size, bias=config.qkv_bias)
        self.kv = nn.Linear(hidden_size, 2 * config.kv_size, bias=config.qkv_bias)
        self.out = nn.Linear(config.query_size, hidden_size, bias=config.out_bias)

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[S, K, D]` of the memory `[S, d]`."""
        k, v = self.kv(memory).unflatten(-1, (2, self.config.num_kv_heads, self.config.head_dim)).unbind(-3)
        return k, v

    def forward(
        self,
        x: Tensor,  # [T, d]
        backend: AttentionBackend,
        metadata: AttentionMetadata,
        cache: LayerCache | None,
        memory: Tensor | None,  # [S, d]; None: keys and values are in the cache
    ) -> Tensor:
        q = self.q(x).unflatten(-1, (self.config.num_heads, self.config.head_dim))
        k, v = self.project(memory) if memory is not None else (None, None)
        return self.out(backend.forward(q, k, v, cache, metadata, self.config).flatten(1))
