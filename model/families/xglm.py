"""XGLM: sinusoidal positions from the third on, LayerNorm pre-norm and biases everywhere (Lin et al. 2022)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import PositionConfig, PositionKind, StackConfig
from triptych.model.families.table.decoders import decoder_model
from triptych.model.families.table.helpers import activation, affine, ignore_unless, repeat, self_attention, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    ignore_unless(raw, add_cross_attention=False)
    size, heads = raw["d_model"], raw["attention_heads"]
    dim, norm = split_width(size, heads), NormConfig(NormKind.LAYER, 1e-5)
    layer = LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=True, out_bias=True),
        feed_forward=MLPConfig(raw["ffn_dim"], activation(raw, "activation_function", "gelu")),
        norms=(Norms(pre=norm),) * 2,
    )
    decoder = StackConfig(
        layers=repeat(layer, raw["num_layers"]),
        hidden_size=size,
        causal=True,
        position=PositionConfig(PositionKind.SINUSOIDAL, offset=2, inclusive=True),
        final_norm=norm,
    )
    model = decoder_model(raw, names, decoder, raw.get("max_position_embeddings", 2048))
    scale = size**0.5 if raw.get("scale_embedding", True) else 1.0
    return replace(model, embedding=replace(model.embedding, scale=scale))


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.decoder is not None
    yield TensorRule("embed_tokens.weight", "tokens.weight")
    for i, layer in enumerate(config.decoder.layers):
        here, there = f"layers.{i}", f"decoder.layers.{i}"
        sources = (f"{here}.self_attn.{part}_proj" for part in ("q", "k", "v", "out"))
        yield from self_attention(layer.attention, f"{there}.attn", *sources)
        yield from affine(f"{here}.self_attn_layer_norm", f"{there}.attn_norms.pre")
        yield LinearRule(f"{here}.fc1", f"{there}.mlp.up")
        yield LinearRule(f"{here}.fc2", f"{there}.mlp.down")
        yield from affine(f"{here}.final_layer_norm", f"{there}.mlp_norms.pre")
    yield from affine("layer_norm", "decoder.final_norm")
    if config.head is not None and not config.head.tied:
        yield LinearRule("lm_head", "head", bias=False)


# Old checkpoints have the sinusoids.
FAMILIES = {"xglm": Family(config, rules, "model.", ("embed_positions.weights",))}
