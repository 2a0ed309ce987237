"""DistilBERT: half of BERT's layers, without segments and pooler (Sanh et al. 2019)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from model.config.layer import (
    AttentionConfig,
    MLPConfig,
    NormConfig,
    NormKind,
    PositionConfig,
    PositionKind,
)
from model.config.model import (
    EmbeddingConfig,
    ModelConfig,
    StackConfig,
)
from model.families.table.classifiers import classifier, classifier_rules
from model.families.table.helpers import activation, affine, self_attention, split_width
from model.families.table.raw_config import Settings
from model.families.table.rules import Family, WeightRule


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    size, heads = raw["dim"], raw["n_heads"]
    dim = split_width(size, heads)
    longest = raw.get("max_position_embeddings", 512)
    raw.get("sinusoidal_pos_embds")  # says how the table began; it is stored either way
    encoder = StackConfig(
        num_layers=raw["n_layers"],
        hidden_size=size,
        attention=AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=True, out_bias=True),
        mlp=MLPConfig(raw["hidden_dim"], activation(raw, "activation", "gelu")),
        norm=NormConfig(NormKind.LAYER, 1e-12),
        position=PositionConfig(PositionKind.LEARNED, max_positions=longest),
        causal=False,
        pre_norm=False,
        post_norm=True,
        final_norm=False,
        embed_norm=True,
    )
    return ModelConfig(
        model_type="distilbert",
        embedding=EmbeddingConfig(raw["vocab_size"], size),
        encoder=encoder,
        classifier=classifier(raw, names),
        max_positions=longest,
        pad_token_id=raw.get("pad_token_id", 0),
    )


def rules(config: ModelConfig) -> Iterator[WeightRule]:
    assert config.encoder is not None
    yield WeightRule("embeddings.word_embeddings.weight", "tokens.weight")
    yield WeightRule("embeddings.position_embeddings.weight", "encoder.positions.weight")
    yield from affine("embeddings.LayerNorm", "encoder.embed_norm")
    for i in range(config.encoder.num_layers):
        here, there = f"transformer.layer.{i}", f"encoder.layers.{i}"
        names = (f"{here}.attention.{part}_lin" for part in ("q", "k", "v", "out"))
        yield from self_attention(config.encoder.attention, f"{there}.attn", *names)
        yield from affine(f"{here}.sa_layer_norm", f"{there}.attn_out")
        yield from affine(f"{here}.ffn.lin1", f"{there}.mlp.up")
        yield from affine(f"{here}.ffn.lin2", f"{there}.mlp.down")
        yield from affine(f"{here}.output_layer_norm", f"{there}.ffn_out")
    yield from classifier_rules(config)


# The pre-training head is not served by /encode.
_DROPPED = ("embeddings.position_ids", "vocab_*")
FAMILIES = {"distilbert": Family(config, rules, "distilbert.", _DROPPED)}
