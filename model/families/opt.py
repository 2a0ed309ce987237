"""OPT: learned positions, LayerNorm before or after the sublayers, ReLU (Zhang et al. 2022).

The 350M has embeddings that are narrower than its layers, which read and write them through projections.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import PositionConfig, PositionKind, StackConfig
from triptych.model.families.table.decoders import decoder_model
from triptych.model.families.table.heads import classifier_rules
from triptych.model.families.table.helpers import activation, affine, refuse_unless, repeat, self_attention, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    size, heads, positions = raw["hidden_size"], raw["num_attention_heads"], raw.get("max_position_embeddings", 2048)
    refuse_unless(raw, layer_norm_elementwise_affine=True)
    width = raw.get("word_embed_proj_dim") or size
    raw.get("output_projection")  # of the 13B's file: that there is a head
    pre_norm, bias = raw.get("do_layer_norm_before", True), bool(raw.get("enable_bias", True))
    dim, norm = split_width(size, heads), NormConfig(NormKind.LAYER, 1e-5)
    layer = LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=bias, out_bias=bias),
        feed_forward=MLPConfig(raw["ffn_dim"], activation(raw, "activation_function", "relu"), bias=bias),
        norms=(Norms(pre=norm) if pre_norm else Norms(post=norm),) * 2,
    )
    decoder = StackConfig(
        layers=repeat(layer, raw["num_hidden_layers"]),
        hidden_size=size,
        causal=True,
        position=PositionConfig(PositionKind.LEARNED, max_positions=positions, offset=2),
        final_norm=norm if pre_norm and not raw.get("_remove_final_layer_norm", False) else None,
        project_bias=False,
        positions_last=width != size,
        output_size=width if width != size else None,
    )
    model = decoder_model(raw, names, decoder, positions)
    return replace(model, embedding=replace(model.embedding, embedding_size=width))


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.decoder is not None
    yield TensorRule("decoder.embed_tokens.weight", "tokens.weight")
    yield TensorRule("decoder.embed_positions.weight", "decoder.positions.weight")
    if config.decoder.output_size is not None:
        yield LinearRule("decoder.project_in", "decoder.project", bias=False)
        yield LinearRule("decoder.project_out", "decoder.output", bias=False)
    for i, layer in enumerate(config.decoder.layers):
        here = there = f"decoder.layers.{i}"
        slot, bias = "pre" if layer.norms[0].pre else "post", layer.mlp.bias
        names = (f"{here}.self_attn.{part}_proj" for part in ("q", "k", "v", "out"))
        yield from self_attention(layer.attention, f"{there}.attn", *names)
        yield from affine(f"{here}.self_attn_layer_norm", f"{there}.attn_norms.{slot}")
        yield LinearRule(f"{here}.fc1", f"{there}.mlp.up", bias)
        yield LinearRule(f"{here}.fc2", f"{there}.mlp.down", bias)
        yield from affine(f"{here}.final_layer_norm", f"{there}.mlp_norms.{slot}")
    if config.decoder.final_norm is not None:
        yield from affine("decoder.final_layer_norm", "decoder.final_norm")
    yield from classifier_rules(config)
    if config.head is not None and not config.head.tied:
        yield LinearRule("lm_head", "head", bias=False)


FAMILIES = {"opt": Family(config, rules, "model.", tables=("decoder.embed_tokens.weight",))}
