"""Falcon: attention and MLP in parallel, one head of keys for all queries (Almazrouei et al. 2023).

The 40B and later have groups of queries, mostly a norm for each of the two sublayers; Falcon-RW is sequential, with
slopes of scores (ALiBi) in the place of rotary positions, and biases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from triptych.model.config.attention import AlibiConfig, AttentionConfig, NormConfig, NormKind, RotaryConfig
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.errors import ConfigError
from triptych.model.families.table.decoders import decoder_model
from triptych.model.families.table.heads import classifier_rules
from triptych.model.families.table.helpers import activation, affine, refuse_unless, repeat, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rope import rotary
from triptych.model.families.table.rules import Family, Interleaved, LinearRule, Rule, TensorRule


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, apply_residual_connection_post_layernorm=False, ff_factor=4)
    raw = raw.but(hidden_size=raw.get("n_embed") or raw["hidden_size"])  # the former name wins
    size, bias = raw["hidden_size"], bool(raw.get("bias", False))
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_epsilon", 1e-5))
    parallel, one_norm = _block(raw)
    layer = LayerConfig(
        mixer=_attention(raw, bias),
        feed_forward=MLPConfig(
            raw.get("ffn_hidden_size") or 4 * size, activation(raw, "activation", "gelu"), bias=bias
        ),
        norms=(Norms(pre=norm), Norms() if one_norm else Norms(pre=norm)),
        parallel=parallel,
        one_norm=one_norm,
    )
    decoder = StackConfig(repeat(layer, raw["num_hidden_layers"]), size, causal=True, final_norm=norm)
    return decoder_model(raw, names, decoder, raw.get("max_position_embeddings", 2048))


def _block(raw: Settings) -> tuple[bool, bool]:
    """Return whether the sublayers are parallel, and whether they then share a norm."""
    grouped, parallel = bool(raw.get("new_decoder_architecture", False)), bool(raw.get("parallel_attn", True))
    norms = raw.get("num_ln_in_parallel_attn")
    if grouped and not parallel:
        raise ConfigError("parallel_attn = false is not served for Falcon's new decoder architecture")
    return parallel, parallel and not (grouped and norms in (None, 2))


def _attention(raw: Settings, bias: bool) -> AttentionConfig:
    heads = raw["num_attention_heads"]
    dim, grouped = split_width(raw["hidden_size"], heads), raw.get("new_decoder_architecture", False)
    kv_heads = raw.get("num_kv_heads") or heads
    if not grouped:
        kv_heads = 1 if raw.get("multi_query", True) else heads
    raw.get("multi_query")
    scale = dim**-0.5
    position: AlibiConfig | RotaryConfig = rotary(raw, dim)
    if raw.get("alibi", False):  # which is added to scores before these are scaled
        position = AlibiConfig(tuple(slope * scale for slope in AlibiConfig.of_heads(heads).slopes))
    return AttentionConfig(heads, kv_heads, dim, scale, qkv_bias=bias, out_bias=bias, position=position)


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.decoder is not None
    yield TensorRule("word_embeddings.weight", "tokens.weight")
    for i, layer in enumerate(config.decoder.layers):
        attention, bias = layer.attention, layer.mlp.bias
        here, there = f"h.{i}", f"decoder.layers.{i}"
        # Head by head of the keys: its queries, the key, the value. Of one head that is the order of ours.
        stored = Interleaved(attention.num_kv_heads, (attention.num_heads // attention.num_kv_heads, 1, 1))
        qkv = f"{here}.self_attention.query_key_value"
        yield LinearRule(qkv, f"{there}.attn.qkv", bias, interleaved=stored)
        yield LinearRule(f"{here}.self_attention.dense", f"{there}.attn.out", bias)
        yield from _norms(layer, here, there)
        yield LinearRule(f"{here}.mlp.dense_h_to_4h", f"{there}.mlp.up", bias)
        yield LinearRule(f"{here}.mlp.dense_4h_to_h", f"{there}.mlp.down", bias)
    yield from affine("ln_f", "decoder.final_norm")
    yield from classifier_rules(config)
    if config.head is not None and not config.head.tied:
        yield LinearRule("lm_head", "head", bias=False)


def _norms(layer: LayerConfig, here: str, there: str) -> Iterator[Rule]:
    both = layer.parallel and not layer.one_norm
    yield from affine(f"{here}.ln_attn" if both else f"{here}.input_layernorm", f"{there}.attn_norms.pre")
    if not layer.one_norm:
        yield from affine(f"{here}.ln_mlp" if both else f"{here}.post_attention_layernorm", f"{there}.mlp_norms.pre")


_DROPPED = ("h.*.self_attention.rotary_emb.inv_freq",)
FAMILIES = {"falcon": Family(config, rules, "transformer.", _DROPPED, tables=("word_embeddings.weight",))}
