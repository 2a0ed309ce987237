"""One layer: attention, cross attention and feed-forward, each with its norms and a residual sum."""

from __future__ import annotations

from torch import Tensor, nn

from model.attention.base import AttentionBackend, ScoreBias
from model.cache.paged import LayerCache
from model.config.layer import PositionKind
from model.config.model import StackConfig
from model.network.attention import CrossAttention, SelfAttention
from model.network.fused_ops import add_norm
from model.network.inputs import CrossInput, StackInput
from model.network.mlp import MLP
from model.network.norms import build_norm
from model.network.score_bias import RelativeBias, bucket_bias


class Block(nn.Module):
    """`x = out(x + sublayer(in(x)))` for attention, cross attention and MLP; an empty norm slot is the identity."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()

        def slot(filled: bool) -> nn.Module:
            return build_norm(config.norm, config.hidden_size) if filled else nn.Identity()

        self.parallel = config.parallel
        self.attn_in, self.attn_out = slot(config.pre_norm), slot(config.post_norm)
        self.attn = SelfAttention(config.attention, config.hidden_size, config.norm)
        per_layer = config.position.kind is PositionKind.T5_BUCKETS and config.position.per_layer
        self.bias = bucket_bias(config) if per_layer else None
        self.relative: RelativeBias | None = None
        if config.position.kind is PositionKind.XLNET_RELATIVE:
            self.relative = RelativeBias(config.attention, config.hidden_size)
        self.cross: CrossAttention | None = None
        if config.cross_attention:
            self.cross_in, self.cross_out = slot(config.pre_norm), slot(config.post_norm)
            self.cross = CrossAttention(config.attention, config.hidden_size)
        self.ffn_in, self.ffn_out = slot(config.pre_norm), slot(config.post_norm)
        self.mlp = MLP(config.mlp, config.hidden_size)

    def forward(
        self,
        x: Tensor,  # [T, d]
        inputs: StackInput,
        backend: AttentionBackend,
        cache: LayerCache | None,
        rotary: tuple[Tensor, Tensor] | None,
        bias: ScoreBias | None,
        cross: CrossInput | None,
    ) -> Tensor:
        mixed = self.attn(self.attn_in(x), backend, inputs.metadata, cache, rotary, self._own_bias(inputs) or bias)
        if self.parallel:
            return x + mixed + self.mlp(self.ffn_in(x))
        following = self.ffn_in if self.cross is None else self.cross_in
        x, read = _join(x, mixed, self.attn_out, following)
        if self.cross is not None:
            assert cross is not None
            mixed = self.cross(read, backend, cross.metadata, cache, cross.encoder_output)
            x, read = _join(x, mixed, self.cross_out, self.ffn_in)
        return self.ffn_out(x + self.mlp(read))

    def _own_bias(self, inputs: StackInput) -> ScoreBias | None:
        """The bias of a layer that does not share its stack's."""
        relative, offset = self.relative, self.attn.offset
        if relative is None or offset is None:
            return self.bias
        return lambda query, group: relative.scores(query, group, offset, inputs.token_types)


def _join(x: Tensor, mixed: Tensor, norm: nn.Module, following: nn.Module) -> tuple[Tensor, Tensor]:
    """`norm(x + mixed)`, and that as the next sublayer reads it; whichever norm is there comes with the sum."""
    if isinstance(norm, nn.Identity):
        return add_norm(x, mixed, following)
    x = add_norm(x, mixed, norm)[1]
    return x, following(x)
