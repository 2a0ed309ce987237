"""Phi 1 and 2: attention and MLP in parallel after one LayerNorm, rotary positions on a part of each head, biases
everywhere, the head's too (Li et al. 2023)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.families.table.decoders import decoder_model
from triptych.model.families.table.heads import classifier_rules
from triptych.model.families.table.helpers import activation, affine, repeat, self_attention, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rope import rotary
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    size, heads = raw["hidden_size"], raw["num_attention_heads"]
    dim = split_width(size, heads)
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", 1e-5))
    layer = LayerConfig(
        mixer=AttentionConfig(
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=dim,
            scale=dim**-0.5,
            qkv_bias=True,
            out_bias=True,
            position=rotary(raw, dim, share=0.5, partial=True),
            qk_norm=norm if raw.get("qk_layernorm", False) else None,
        ),
        feed_forward=MLPConfig(raw["intermediate_size"], activation(raw, "hidden_act", "gelu_new")),
        norms=(Norms(pre=norm), Norms()),
        parallel=True,
        one_norm=True,
    )
    decoder = StackConfig(repeat(layer, raw["num_hidden_layers"]), size, causal=True, final_norm=norm)
    raw = raw.otherwise(tie_word_embeddings=False)
    return decoder_model(raw, names, decoder, raw.get("max_position_embeddings", 2048), head_bias=True)


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.decoder is not None
    yield TensorRule("embed_tokens.weight", "tokens.weight")
    for i, layer in enumerate(config.decoder.layers):
        here, there = f"layers.{i}", f"decoder.layers.{i}"
        names = (f"{here}.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "dense"))
        yield from self_attention(layer.attention, f"{there}.attn", *names)
        for side in "qk" if layer.attention.qk_norm else "":
            yield from affine(f"{here}.self_attn.{side}_layernorm", f"{there}.attn.{side}_norm")
        yield from affine(f"{here}.input_layernorm", f"{there}.attn_norms.pre")
        yield LinearRule(f"{here}.mlp.fc1", f"{there}.mlp.up")
        yield LinearRule(f"{here}.mlp.fc2", f"{there}.mlp.down")
    yield from affine("final_layernorm", "decoder.final_norm")
    yield from classifier_rules(config)
    if config.head is not None and config.head.tied:
        yield TensorRule("lm_head.bias", "head.bias")
    elif config.head is not None:
        yield LinearRule("lm_head", "head")


FAMILIES = {"phi": Family(config, rules, "model.", ("layers.*.self_attn.rotary_emb.inv_freq",))}
