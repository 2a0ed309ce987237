"""ViT: an image is a sequence of patches; LayerNorm pre-norm, learned positions (Dosovitskiy et al. 2021)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from model.config.layer import AttentionConfig, LayerConfig, MLPConfig, NormConfig, NormKind, Norms
from model.config.model import EmbeddingConfig, ImageConfig, ModelConfig, PositionConfig, PositionKind, StackConfig
from model.errors import ConfigError
from model.families.table.classifiers import classifier, classifier_rules, has_pooler
from model.families.table.helpers import activation, affine, refuse_unless, repeat, self_attention, split_width
from model.families.table.raw_config import Settings
from model.families.table.rules import Family, LinearRule, Rule, TensorRule


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, pooler_act="tanh")
    size, heads = raw["hidden_size"], raw["num_attention_heads"]
    if raw.get("pooler_output_size", size) != size:
        raise ConfigError(f"pooler_output_size = {raw['pooler_output_size']} is not served for 'vit', only {size}")
    dim = split_width(size, heads)
    image = ImageConfig(raw.get("image_size", 224), raw.get("patch_size", 16), raw.get("num_channels", 3))
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", 1e-12))
    layer = LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=bool(raw.get("qkv_bias", True)), out_bias=True),
        feed_forward=MLPConfig(raw["intermediate_size"], activation(raw, "hidden_act", "gelu")),
        norms=(Norms(pre=norm),) * 2,
    )
    encoder = StackConfig(
        layers=repeat(layer, raw["num_hidden_layers"]),
        hidden_size=size,
        causal=False,
        position=PositionConfig(PositionKind.LEARNED, max_positions=image.num_tokens),
        final_norm=norm,
    )
    labels = classifier(raw, names)
    return ModelConfig(
        model_type="vit",
        embedding=EmbeddingConfig(0, size),
        encoder=encoder,
        image=image,
        classifier=labels,
        pooler=has_pooler(labels, names, "pooler.dense.weight"),
        max_positions=image.num_tokens,
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.encoder is not None
    assert config.image is not None
    size, image = config.encoder.hidden_size, config.image
    patch = (size, image.channels, image.patch, image.patch)
    yield TensorRule("embeddings.cls_token", "patches.first", shape=(1, 1, size))
    yield TensorRule("embeddings.patch_embeddings.projection.weight", "patches.project.weight", shape=patch)
    yield TensorRule("embeddings.patch_embeddings.projection.bias", "patches.project.bias")
    positions = (1, image.num_tokens, size)
    yield TensorRule("embeddings.position_embeddings", "encoder.positions.weight", shape=positions)
    for i, layer in enumerate(config.encoder.layers):
        here, there = f"encoder.layer.{i}", f"encoder.layers.{i}"
        parts = ("attention.query", "attention.key", "attention.value", "output.dense")
        names = (f"{here}.attention.{part}" for part in parts)
        yield from self_attention(layer.attention, f"{there}.attn", *names)
        yield from affine(f"{here}.layernorm_before", f"{there}.attn_norms.pre")
        yield from affine(f"{here}.layernorm_after", f"{there}.mlp_norms.pre")
        yield LinearRule(f"{here}.intermediate.dense", f"{there}.mlp.up")
        yield LinearRule(f"{here}.output.dense", f"{there}.mlp.down")
    yield from affine("layernorm", "encoder.final_norm")
    if config.pooler:
        yield LinearRule("pooler.dense", "pooler")
    yield from classifier_rules(config)


_PATCHES = ("embeddings.patch_embeddings.projection.weight",)  # in the place of a token table
FAMILIES = {"vit": Family(config, rules, "vit.", tables=_PATCHES)}
