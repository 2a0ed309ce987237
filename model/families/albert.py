"""ALBERT: all layers share their weights; narrow token embeddings are projected up (Lan et al. 2020)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import EmbeddingConfig, ModelConfig
from triptych.model.config.stack import PositionConfig, PositionKind, StackConfig
from triptych.model.errors import ConfigError
from triptych.model.families.table.heads import (
    classifier,
    classifier_rules,
    has_pooler,
    masked_head,
    masked_head_rules,
    tied_names,
)
from triptych.model.families.table.helpers import activation, affine, refuse_unless, repeat, self_attention, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, position_embedding_type="absolute", inner_group_num=1)
    size, heads = raw["hidden_size"], raw["num_attention_heads"]
    if raw.get("num_hidden_groups", 1) != 1:
        raise ConfigError(f"num_hidden_groups = {raw['num_hidden_groups']} is not served for 'albert', only 1")
    dim = split_width(size, heads)
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", 1e-12))
    layer = LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=True, out_bias=True),
        feed_forward=MLPConfig(raw["intermediate_size"], activation(raw, "hidden_act", "gelu_new")),
        norms=(Norms(post=norm),) * 2,
    )
    encoder = StackConfig(
        layers=(layer, *repeat(replace(layer, shares_weights_with=0), raw["num_hidden_layers"])[1:]),
        hidden_size=size,
        causal=False,
        position=PositionConfig(PositionKind.LEARNED, max_positions=raw["max_position_embeddings"]),
        embed_norm=norm,
        project_equal=True,
        token_types=raw.get("type_vocab_size", 2),
    )
    labels, embedding = classifier(raw, names), EmbeddingConfig(raw["vocab_size"], raw["embedding_size"])
    return ModelConfig(
        model_type="albert",
        embedding=embedding,
        encoder=encoder,
        masked_head=masked_head(raw, names, embedding, layer.mlp.activation, norm),
        classifier=labels,
        pooler=has_pooler(labels, names, "pooler.weight"),
        max_positions=raw["max_position_embeddings"],
        pad_token_id=raw.get("pad_token_id", 0),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.encoder is not None
    yield TensorRule("embeddings.word_embeddings.weight", "tokens.weight")
    yield TensorRule("embeddings.position_embeddings.weight", "encoder.positions.weight")
    yield TensorRule("embeddings.token_type_embeddings.weight", "encoder.types.weight")
    yield from affine("embeddings.LayerNorm", "encoder.embed_norm")
    if config.encoder.projects(config.embedding.embedding_size):
        yield LinearRule("encoder.embedding_hidden_mapping_in", "encoder.project")
    here, there = "encoder.albert_layer_groups.0.albert_layers.0", "encoder.layers.0"
    names = (f"{here}.attention.{part}" for part in ("query", "key", "value", "dense"))
    yield from self_attention(config.encoder.layers[0].attention, f"{there}.attn", *names)
    yield from affine(f"{here}.attention.LayerNorm", f"{there}.attn_norms.post")
    yield LinearRule(f"{here}.ffn", f"{there}.mlp.up")
    yield LinearRule(f"{here}.ffn_output", f"{there}.mlp.down")
    yield from affine(f"{here}.full_layer_layer_norm", f"{there}.mlp_norms.post")
    if config.pooler:
        yield LinearRule("pooler", "pooler")
    yield from classifier_rules(config)
    yield from masked_head_rules(config)


FAMILIES = {
    "albert": Family(
        config,
        rules,
        "albert.",
        ("embeddings.position_ids", "predictions.*", "sop_classifier.*"),
        tables=("embeddings.word_embeddings.weight",),
        **tied_names("albert"),
    )
}
