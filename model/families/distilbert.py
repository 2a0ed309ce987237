"""DistilBERT: half of BERT's layers, without segments and pooler (Sanh et al. 2019)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import EmbeddingConfig, ModelConfig
from triptych.model.config.stack import PositionConfig, PositionKind, StackConfig
from triptych.model.families.table.heads import classifier, classifier_rules, masked_head, masked_head_rules, tied_names
from triptych.model.families.table.helpers import activation, affine, repeat, self_attention, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    size, heads = raw["dim"], raw["n_heads"]
    dim = split_width(size, heads)
    longest = raw.get("max_position_embeddings", 512)
    raw.get("sinusoidal_pos_embds")  # only the table's initial values; it is stored in either case
    norm = NormConfig(NormKind.LAYER, 1e-12)
    layer = LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=True, out_bias=True),
        feed_forward=MLPConfig(raw["hidden_dim"], activation(raw, "activation", "gelu")),
        norms=(Norms(post=norm),) * 2,
    )
    encoder = StackConfig(
        layers=repeat(layer, raw["n_layers"]),
        hidden_size=size,
        causal=False,
        position=PositionConfig(PositionKind.LEARNED, max_positions=longest),
        embed_norm=norm,
    )
    embedding = EmbeddingConfig(raw["vocab_size"], size)
    return ModelConfig(
        model_type="distilbert",
        embedding=embedding,
        encoder=encoder,
        masked_head=masked_head(raw, names, embedding, layer.mlp.activation, norm),
        classifier=classifier(raw, names),
        max_positions=longest,
        pad_token_id=raw.get("pad_token_id", 0),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.encoder is not None
    yield TensorRule("embeddings.word_embeddings.weight", "tokens.weight")
    yield TensorRule("embeddings.position_embeddings.weight", "encoder.positions.weight")
    yield from affine("embeddings.LayerNorm", "encoder.embed_norm")
    for i, layer in enumerate(config.encoder.layers):
        here, there = f"transformer.layer.{i}", f"encoder.layers.{i}"
        names = (f"{here}.attention.{part}_lin" for part in ("q", "k", "v", "out"))
        yield from self_attention(layer.attention, f"{there}.attn", *names)
        yield from affine(f"{here}.sa_layer_norm", f"{there}.attn_norms.post")
        yield LinearRule(f"{here}.ffn.lin1", f"{there}.mlp.up")
        yield LinearRule(f"{here}.ffn.lin2", f"{there}.mlp.down")
        yield from affine(f"{here}.output_layer_norm", f"{there}.mlp_norms.post")
    yield from classifier_rules(config)
    yield from masked_head_rules(config)


_DROPPED = ("embeddings.position_ids", "vocab_*")
_TABLES = ("embeddings.word_embeddings.weight",)
FAMILIES = {
    "distilbert": Family(config, rules, "distilbert.", _DROPPED, tables=_TABLES, **tied_names("distilbert")),
}
