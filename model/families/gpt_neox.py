"""GPT-NeoX and Pythia: rotary positions on a part of each head, attention and MLP in parallel (Black et al. 2022)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.families.table.decoders import decoder_model
from triptych.model.families.table.heads import classifier_rules
from triptych.model.families.table.helpers import activation, affine, repeat, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rope import number, rotary
from triptych.model.families.table.rules import Family, Interleaved, LinearRule, Rule, TensorRule

_HEAD = "embed_out.weight"


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    size, heads = raw["hidden_size"], raw["num_attention_heads"]
    dim = split_width(size, heads)
    bias = bool(raw.get("attention_bias", True))
    raw.get("is_decoder")  # always
    share, theta = number(raw, "rotary_pct", 0.25), number(raw, "rotary_emb_base", 10_000.0)
    # Its class has these two by other names, and does not read the usual ones outside of the rotary settings.
    own = raw.but(rope_theta=None, partial_rotary_factor=None) if raw.follows_class else raw
    turning = rotary(own, dim, share=share, theta=theta, partial=True)
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", 1e-5))
    layer = LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=bias, out_bias=bias, position=turning),
        feed_forward=MLPConfig(raw["intermediate_size"], activation(raw, "hidden_act", "gelu")),
        norms=(Norms(pre=norm),) * 2,
        parallel=bool(raw.get("use_parallel_residual", True)),
    )
    decoder = StackConfig(repeat(layer, raw["num_hidden_layers"]), size, causal=True, final_norm=norm)
    raw = raw.otherwise(tie_word_embeddings=False)
    return decoder_model(raw, names, decoder, raw.get("max_position_embeddings", 2048), head=_HEAD)


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.decoder is not None
    yield TensorRule("embed_in.weight", "tokens.weight")
    for i, layer in enumerate(config.decoder.layers):
        attention = layer.attention
        here, there = f"layers.{i}", f"decoder.layers.{i}"
        yield from affine(f"{here}.input_layernorm", f"{there}.attn_norms.pre")
        qkv = f"{here}.attention.query_key_value"
        yield LinearRule(qkv, f"{there}.attn.qkv", attention.qkv_bias, interleaved=Interleaved(attention.num_heads))
        yield LinearRule(f"{here}.attention.dense", f"{there}.attn.out", bias=attention.out_bias)
        yield from affine(f"{here}.post_attention_layernorm", f"{there}.mlp_norms.pre")
        yield LinearRule(f"{here}.mlp.dense_h_to_4h", f"{there}.mlp.up")
        yield LinearRule(f"{here}.mlp.dense_4h_to_h", f"{there}.mlp.down")
    yield from affine("final_layer_norm", "decoder.final_norm")
    yield from classifier_rules(config)
    if config.head is not None and not config.head.tied:
        yield TensorRule(_HEAD, "head.weight")


_DROPPED = ("layers.*.attention.bias", "layers.*.attention.masked_bias", "layers.*.attention.rotary_emb.inv_freq")
_TABLES = ("embed_in.weight",)
_RENAMED = {"lm_head": "embed_out"}  # as `transformers` 5 calls it in memory
FAMILIES = {"gpt_neox": Family(config, rules, "gpt_neox.", _DROPPED, _RENAMED, tables=_TABLES, heads=(_HEAD,))}
