"""What the tensors of a plain stack are called: a table of names, and the rules that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import PositionKind
from triptych.model.families.table.heads import classifier_rules, masked_head_rules
from triptych.model.families.table.helpers import affine, fused, self_attention
from triptych.model.families.table.rules import Interleaved, LinearRule, Rule, TensorRule


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNames:
    """The names of a network of one stack, whose layers are attention and an MLP.

    Which of them are stored, and with which biases, follows from the configuration. Names of a layer's parts are within
    the layer; `norms` are the mixer's and the MLP's.
    """

    layer: str  # with the layer's number in place of {}
    norms: tuple[str, ...]
    # Empty: rules of their own.
    attention: tuple[str, ...] = ()  # q, k, v and the output; or the three in one, and the output
    mlp: tuple[str, ...] = ()  # up and down; or the gate, up and down
    heads_norm: str = ""  # of queries and keys, with q or k in place of {}
    tokens: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    embed_norm: str = "embeddings.LayerNorm"
    project: str = "embeddings_project"
    output: str = ""
    final_norm: str = ""
    pooler: str = "pooler.dense"
    head: str = "lm_head"
    transpose: bool = False  # of the projections
    interleaved: Callable[[AttentionConfig], Interleaved | None] = lambda attention: None  # q, k and v in one

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        """Yield the rules of a model."""
        yield from self.outside(config)
        ((side, stack),) = config.stacks.items()
        for index, layer in enumerate(stack.layers):
            if layer.shares_weights_with is None:
                yield from self.layer_rules(layer, self.layer.format(index), f"{side}.layers.{index}")

    def outside(self, config: ModelConfig) -> Iterator[Rule]:
        """Yield the rules of what is before and after the layers."""
        ((side, stack),) = config.stacks.items()
        yield TensorRule(f"{self.tokens}.weight", "tokens.weight")
        if stack.position.kind is PositionKind.LEARNED:
            yield TensorRule(f"{self.positions}.weight", f"{side}.positions.weight")
        if stack.token_types:
            yield TensorRule(f"{self.types}.weight", f"{side}.types.weight")
        if stack.projects(config.embedding.embedding_size):
            yield LinearRule(self.project, f"{side}.project", stack.project_bias)
        if stack.output_size is not None:
            yield LinearRule(self.output, f"{side}.output", bias=False)
        yield from _norm(stack.embed_norm, self.embed_norm, f"{side}.embed_norm")
        yield from _norm(stack.final_norm, self.final_norm, f"{side}.final_norm")
        if config.pooler:
            yield LinearRule(self.pooler, "pooler")
        yield from classifier_rules(config)
        yield from masked_head_rules(config)
        if config.head is not None and not config.head.tied:
            yield LinearRule(self.head, "head", config.head.bias)
        elif config.head is not None and config.head.bias:
            yield TensorRule(f"{self.head}.bias", "head.bias")

    def layer_rules(self, layer: LayerConfig, here: str, there: str) -> Iterator[Rule]:
        """Yield the rules of a layer; `here` is its stored name, `there` the parameters'."""
        attention = layer.attention
        names = [f"{here}.{part}" for part in self.attention]
        if len(names) == 4:
            yield from self_attention(attention, f"{there}.attn", *names)
        elif names:
            stored, qkv = self.interleaved(attention), f"{there}.attn.qkv"
            yield LinearRule(names[0], qkv, attention.qkv_bias, transpose=self.transpose, interleaved=stored)
            yield LinearRule(names[1], f"{there}.attn.out", attention.out_bias, transpose=self.transpose)
        for side in "qk":
            yield from _norm(attention.qk_norm, f"{here}.{self.heads_norm.format(side)}", f"{there}.attn.{side}_norm")
        for name, norms, sublayer in zip(self.norms, layer.norms, ("attn", "mlp"), strict=True):
            for slot in ("pre", "output", "post"):
                yield from _norm(getattr(norms, slot), f"{here}.{name}", f"{there}.{sublayer}_norms.{slot}")
        if self.mlp:
            mlp, (*up, down) = layer.mlp, (f"{here}.{part}" for part in self.mlp)
            if mlp.gated and len(up) > 1:
                yield from fused(dict.fromkeys(up, mlp.intermediate_size), f"{there}.mlp.up", bias=mlp.bias)
            else:
                yield LinearRule(up[0], f"{there}.mlp.up", mlp.bias, transpose=self.transpose)
            yield LinearRule(down, f"{there}.mlp.down", mlp.bias, transpose=self.transpose)


def _norm(norm: NormConfig | None, source: str, target: str) -> Iterator[Rule]:
    if norm is not None and norm.gain:
        yield from affine(source, target, bias=norm.kind is NormKind.LAYER and norm.bias)
