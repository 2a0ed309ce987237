"""One layer: attention, cross attention and feed-forward, each with its norms and a residual sum."""

from __future__ import annotations

from torch import Tensor, nn

from model.attention.base import ScoreBias, SegmentGroup
from model.cache.paged import LayerCache
from model.config.layer import BucketBiasConfig, DisentangledConfig, LayerConfig, XLNetRelativeConfig
from model.linear.factory import LinearFactory
from model.network.attention import CrossAttention, SelfAttention
from model.network.disentangled import DisentangledBias
from model.network.fused_ops import add_norm
from model.network.mlp import MLP
from model.network.norms import SublayerNorms
from model.network.score_bias import BucketBias, RelativeBias
from model.network.step_context import StepContext


class Layer(nn.Module):
    """`x = post(x + output(sublayer(pre(x))))` for attention, cross attention and MLP (`model.config.layer.Norms`)."""

    def __init__(self, config: LayerConfig, hidden_size: int, linear: LinearFactory, *, causal: bool) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = hidden_size
        norms = iter(config.norms)
        position = config.mixer.position
        self.attn_norms = SublayerNorms(next(norms), hidden_size)
        self.attn = SelfAttention(config.mixer, hidden_size, linear.within("attn"))
        self.bias: BucketBias | None = None  # of this layer alone
        if isinstance(position, BucketBiasConfig) and not position.shared:
            self.bias = BucketBias(position, config.mixer.num_heads, bidirectional=not causal)
        self.shares_bias = isinstance(position, BucketBiasConfig) and position.shared
        self.relative: RelativeBias | DisentangledBias | None = None
        if isinstance(position, XLNetRelativeConfig):
            self.relative = RelativeBias(config.mixer, hidden_size, linear.within("relative"))
        if isinstance(position, DisentangledConfig):
            self.relative = DisentangledBias(config.mixer, hidden_size, linear.within("relative"))
        self.cross: CrossAttention | None = None
        if config.cross is not None:
            self.cross_norms = SublayerNorms(next(norms), hidden_size)
            self.cross = CrossAttention(config.cross, hidden_size, linear.within("cross"))
        self.mlp_norms = SublayerNorms(next(norms), hidden_size)
        self.mlp = MLP(config.feed_forward, hidden_size, linear.within("mlp"))

    def forward(self, x: Tensor, step: StepContext, cache: LayerCache | None) -> Tensor:  # [T, d] -> [T, d]
        attn, mlp = self.attn_norms, self.mlp_norms
        mixed = _output(attn, self.attn(attn.pre(x), step, cache, self._score_bias(step)))
        if self.config.parallel:
            return x + mixed + _output(mlp, self.mlp(mlp.pre(x)))
        if self.cross is None:
            x, read = _join(x, mixed, attn.post, mlp.pre)
        else:
            x, read = _join(x, mixed, attn.post, self.cross_norms.pre)
            mixed = _output(self.cross_norms, self.cross(read, step, cache))
            x, read = _join(x, mixed, self.cross_norms.post, mlp.pre)
        return mlp.post(x + _output(mlp, self.mlp(read)))

    def _score_bias(self, step: StepContext) -> ScoreBias | None:
        """What the layer's positions add to its scores."""
        relative, offset = self.relative, self.attn.offset
        if isinstance(relative, DisentangledBias):
            return relative.vectors(step.relative_table, self.attn.qkv)
        if relative is None or offset is None:
            return step.shared_bias if self.shares_bias else self.bias

        def scores(query: Tensor, key: Tensor, group: SegmentGroup) -> Tensor:
            sinusoids = step.sinusoids(group.kv_len, self.hidden_size, query.dtype)
            return relative.scores(query, group, offset, sinusoids, step.inputs.token_types)

        return scores


def _output(norms: SublayerNorms, y: Tensor) -> Tensor:
    """A sublayer's output as it is added to the residual stream."""
    return norms.output(y) if norms.has_output else y


def _join(x: Tensor, mixed: Tensor, norm: nn.Module, following: nn.Module) -> tuple[Tensor, Tensor]:
    """`norm(x + mixed)`, and that as the next sublayer reads it; whichever norm is there comes with the sum."""
    if isinstance(norm, nn.Identity):
        return add_norm(x, mixed, following)
    x = add_norm(x, mixed, norm)[1]
    return x, following(x)
