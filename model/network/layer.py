"""One layer: attention or a recurrence, cross attention and feed-forward, each with its norms and a residual sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from triptych.model.attention.base import ScoreBias, SegmentGroup
from triptych.model.cache.kv_cache import LayerCache, StateCache
from triptych.model.config.attention import (
    AlibiConfig,
    AttentionConfig,
    BucketBiasConfig,
    DisentangledConfig,
    XLNetRelativeConfig,
)
from triptych.model.config.layer import LayerConfig
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.attention import CrossAttention, SelfAttention
from triptych.model.network.delta_net import GatedDeltaNet
from triptych.model.network.disentangled import DisentangledBias
from triptych.model.network.embeddings import VectorGate
from triptych.model.network.feed_forward import build_feed_forward
from triptych.model.network.fused_ops import add_norm
from triptych.model.network.inputs import StepContext
from triptych.model.network.norms import SublayerNorms
from triptych.model.network.positions import AlibiBias, BucketBias, RelativeBias


@dataclass(slots=True)
class Update:
    """What a sublayer adds to the residual stream."""

    rows: Tensor  # [T, d]
    norm: nn.Module | None  # applied to the rows first


@dataclass(slots=True)
class Residual:
    """The residual stream; its last sum may not be computed yet."""

    x: Tensor  # [T, d]
    update: Update | None = None

    @property
    def whole(self) -> Tensor:
        """The stream with its update added."""
        return self.normed(nn.Identity())[0]

    def normed(self, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the stream with its update added, and the norm of the sum."""
        if self.update is None:
            return self.x, norm(self.x)
        return add_norm(self.x, self.update.rows, norm, self.update.norm)


class Layer(nn.Module):
    """`x = post(x + output(sublayer(pre(x))))` for attention, cross attention and MLP
    (`triptych.model.config.layer.Norms`).
    """

    attn: SelfAttention  # of a layer with attention
    delta: GatedDeltaNet  # of a recurrent one

    def __init__(
        self, config: LayerConfig, hidden_size: int, linear: LinearFactory, *, causal: bool, source_size: int
    ) -> None:
        """`source_size` is the width of what cross attention reads."""
        super().__init__()
        self.config = config
        self.hidden_size = hidden_size
        norms = iter(config.norms)
        self.attn_norms = SublayerNorms(next(norms), hidden_size)
        self.bias: BucketBias | AlibiBias | None = None  # of this layer alone
        self.shares_bias = False
        self.relative: RelativeBias | DisentangledBias | None = None
        self._set_mixer(linear, causal=causal)
        self.cross: CrossAttention | None = None
        if config.cross is not None:
            self.cross_norms = SublayerNorms(next(norms), hidden_size)
            self.cross = CrossAttention(config.cross, hidden_size, source_size, linear.within("cross"))
        self.mlp_norms = SublayerNorms(next(norms), hidden_size)
        self.mlp = build_feed_forward(config.feed_forward, hidden_size, linear.within("mlp"))
        self.embedding: VectorGate | None = None
        if config.embedding is not None:
            self.embedding = VectorGate(config.embedding, hidden_size, linear.within("embedding"))
        self.scale = nn.Parameter(torch.empty(1)) if config.scaled else None
        scales = (torch.empty(hidden_size) if config.channel_scales else None for _ in range(2))
        self.attn_scale, self.mlp_scale = (None if one is None else nn.Parameter(one) for one in scales)

    def _set_mixer(self, linear: LinearFactory, *, causal: bool) -> None:
        mixer, hidden_size = self.config.mixer, self.hidden_size
        if not isinstance(mixer, AttentionConfig):
            self.delta = GatedDeltaNet(mixer, hidden_size, linear.within("delta"))
            return
        self.attn, position = SelfAttention(mixer, hidden_size, linear.within("attn")), mixer.position
        if isinstance(position, BucketBiasConfig) and not position.shared:
            self.bias = BucketBias(position, mixer.num_heads, bidirectional=not causal)
        if isinstance(position, AlibiConfig):
            self.bias = AlibiBias(position)
        self.shares_bias = isinstance(position, BucketBiasConfig) and position.shared
        if isinstance(position, XLNetRelativeConfig):
            self.relative = RelativeBias(mixer, hidden_size, linear.within("relative"))
        if isinstance(position, DisentangledConfig):
            self.relative = DisentangledBias(mixer, hidden_size, linear.within("relative"))

    def forward(self, x: Tensor, step: StepContext, cache: LayerCache | None) -> Tensor:  # [T, d] -> [T, d]
        return self.advance(Residual(x), step, cache).whole

    def advance(self, residual: Residual, step: StepContext, cache: LayerCache | StateCache | None) -> Residual:
        """Compute the layer, and leave its last sum to the next norm: one kernel computes both."""
        attn, mlp = self.attn_norms, self.mlp_norms
        x, read = residual.normed(attn.pre)
        x = read if self.config.normed_residual else x
        mixed = self._scaled(self._mixed(read, step, cache), self.attn_scale)
        if self.config.parallel:
            mixed = attn.output(mixed) if attn.has_output else mixed
            inner = self._scaled(self.mlp(read if self.config.one_norm else mlp.pre(x), step), self.mlp_scale)
            return Residual(x + mixed, Update(inner, mlp.output if mlp.has_output else None))
        if self.cross is None:
            x, read = _join(x, mixed, attn, mlp.pre)
            x = read if self.config.normed_residual else x
        else:
            x, read = _join(x, mixed, attn, self.cross_norms.pre)
            assert not isinstance(cache, StateCache)
            x, read = _join(x, self._scaled(self.cross(read, step, cache)), self.cross_norms, mlp.pre)
        last = Update(self._scaled(self.mlp(read, step), self.mlp_scale), mlp.output if mlp.has_output else None)
        if not isinstance(mlp.post, nn.Identity):
            return Residual(add_norm(x, last.rows, mlp.post, last.norm)[1])
        if self.embedding is None and self.scale is None:
            return Residual(x, last)
        x = Residual(x, last).whole
        if self.embedding is not None:
            assert step.layer_vectors is not None
            x = x + self.embedding(x, step.layer_vectors[:, step.layer])
        return Residual(x if self.scale is None else x * self.scale)

    def _mixed(self, x: Tensor, step: StepContext, cache: LayerCache | StateCache | None) -> Tensor:
        """Return the output of attention or of the recurrence, `[T, d]`."""
        if isinstance(self.config.mixer, AttentionConfig):
            assert not isinstance(cache, StateCache)
            mixed: Tensor = self.attn(x, step, cache, self._score_bias(step))
        else:
            assert not isinstance(cache, LayerCache)
            mixed = self.delta(x, step, cache)
        return mixed

    def _scaled(self, rows: Tensor, channels: Tensor | None = None) -> Tensor:
        """Return a sublayer's output times the layer's scales."""
        scale = self.config.residual_scale
        rows = rows if channels is None else rows * channels
        return rows if scale == 1.0 else rows * scale

    def _score_bias(self, step: StepContext) -> ScoreBias | None:
        """Return what the layer's positions add to its attention scores, if anything."""
        relative, offset = self.relative, self.attn.offset
        if isinstance(relative, DisentangledBias):
            return relative.vectors(step.relative_table, self.attn.qkv)
        if relative is None or offset is None:
            return step.shared_bias if self.shares_bias else self.bias

        def scores(query: Tensor, key: Tensor, group: SegmentGroup) -> Tensor:
            sinusoids = step.sinusoids(group.kv_len, self.hidden_size, query.dtype)
            return relative.scores(query, group, offset, sinusoids, step.inputs.token_types)

        return scores


def _join(x: Tensor, mixed: Tensor, norms: SublayerNorms, following: nn.Module) -> tuple[Tensor, Tensor]:
    """Return `x = post(x + output(mixed))`, and the next sublayer's input, `following(x)`."""
    output = norms.output if norms.has_output else None
    if isinstance(norms.post, nn.Identity):
        return add_norm(x, mixed, following, output)
    x = add_norm(x, mixed, norms.post, output)[1]
    return x, following(x)
