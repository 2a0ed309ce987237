"""BLOOM and MPT: no positions but slopes of scores (ALiBi, Press et al. 2022).

BLOOM (Scao et al. 2022) has a norm after the embeddings, and biases; MPT (MosaicML 2023) has no biases at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from triptych.model.config.attention import AlibiConfig, AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import Activation, LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.families.table.decoders import decoder_model
from triptych.model.families.table.heads import classifier_rules
from triptych.model.families.table.helpers import affine, ignore_unless, refuse_unless, repeat, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, Interleaved, LinearRule, Rule, TensorRule

_OLDER = {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
# Of training, or of kernels that are as good as others.
_UNUSED = (
    *("pretraining_tp", "slow_but_exact", "seq_length", "offset_alibi", "attention_softmax_in_fp32"),
    *("bias_dropout_fusion", "masked_softmax_fusion", "skip_bias_add", "skip_bias_add_qkv", "n_inner"),
)


def bloom(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    for unused in _UNUSED:
        raw.get(unused)
    raw = raw.otherwise(**{name: raw[older] for name, older in _OLDER.items() if older in raw})
    raw = raw.but(hidden_size=raw.get("n_embed") or raw["hidden_size"])  # the former name wins
    size, heads = raw["hidden_size"], raw["n_head"]
    norm, dim = NormConfig(NormKind.LAYER, raw.get("layer_norm_epsilon", 1e-5)), split_width(size, heads)
    position = AlibiConfig.of_heads(heads)
    layer = LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=True, out_bias=True, position=position),
        feed_forward=MLPConfig(4 * size, Activation.GELU_TANH),
        norms=(Norms(pre=norm),) * 2,
        normed_residual=bool(raw.get("apply_residual_connection_post_layernorm", False)),
    )
    layers = repeat(layer, raw["n_layer"])
    # Slopes have no end; it was trained with 2,048 tokens.
    return decoder_model(raw, names, StackConfig(layers, size, causal=True, embed_norm=norm, final_norm=norm), None)


def bloom_rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.decoder is not None
    yield TensorRule("word_embeddings.weight", "tokens.weight")
    yield from affine("word_embeddings_layernorm", "decoder.embed_norm")
    for i, layer in enumerate(config.decoder.layers):
        here, there = f"h.{i}", f"decoder.layers.{i}"
        stored = Interleaved(layer.attention.num_heads)
        yield from affine(f"{here}.input_layernorm", f"{there}.attn_norms.pre")
        yield LinearRule(f"{here}.self_attention.query_key_value", f"{there}.attn.qkv", interleaved=stored)
        yield LinearRule(f"{here}.self_attention.dense", f"{there}.attn.out")
        yield from affine(f"{here}.post_attention_layernorm", f"{there}.mlp_norms.pre")
        yield LinearRule(f"{here}.mlp.dense_h_to_4h", f"{there}.mlp.up")
        yield LinearRule(f"{here}.mlp.dense_4h_to_h", f"{there}.mlp.down")
    yield from affine("ln_f", "decoder.final_norm")
    yield from _head(config)


def mpt(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    ignore_unless(raw, expansion_ratio=4, no_bias=True, logit_scale=None, norm_type="low_precision_layernorm")
    for unused in ("learned_pos_emb", "embedding_fraction", "init_device", "init_config", "tokenizer_name", "verbose"):
        raw.get(unused)  # positions are not learned where there are slopes; the rest is of training
    attention = raw.part("attn_config", raw.get("attn_config") or {}, "mpt.attn_config")
    refuse_unless(attention, alibi=True, attn_type="multihead_attention", prefix_lm=False, qk_ln=False)
    refuse_unless(attention, attn_uses_sequence_id=False)
    attention.get("attn_impl")
    size, heads = raw["d_model"], raw["n_heads"]
    dim = split_width(size, heads)
    position = AlibiConfig.of_heads(heads, attention.get("alibi_bias_max", 8))
    scale = attention.get("softmax_scale") or dim**-0.5
    clip = attention.get("clip_qkv") or None
    attention.refuse_unread()
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_epsilon", 1e-5), bias=False)
    layer = LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, scale, position=position, clip=clip),
        feed_forward=MLPConfig(4 * size, Activation.GELU, bias=False),
        norms=(Norms(pre=norm),) * 2,
    )
    decoder = StackConfig(repeat(layer, raw["n_layers"]), size, causal=True, final_norm=norm)
    return decoder_model(raw, names, decoder, raw.get("max_seq_len", 2048))


def mpt_rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.decoder is not None
    yield TensorRule("wte.weight", "tokens.weight")
    for i in range(config.decoder.num_layers):
        here, there = f"blocks.{i}", f"decoder.layers.{i}"
        yield from affine(f"{here}.norm_1", f"{there}.attn_norms.pre", bias=False)
        yield LinearRule(f"{here}.attn.Wqkv", f"{there}.attn.qkv", bias=False)
        yield LinearRule(f"{here}.attn.out_proj", f"{there}.attn.out", bias=False)
        yield from affine(f"{here}.norm_2", f"{there}.mlp_norms.pre", bias=False)
        yield LinearRule(f"{here}.ffn.up_proj", f"{there}.mlp.up", bias=False)
        yield LinearRule(f"{here}.ffn.down_proj", f"{there}.mlp.down", bias=False)
    yield from affine("norm_f", "decoder.final_norm", bias=False)
    yield from _head(config)


def _head(config: ModelConfig) -> Iterator[Rule]:
    yield from classifier_rules(config)
    if config.head is not None and not config.head.tied:
        yield LinearRule("lm_head", "head", bias=False)


FAMILIES = {
    "bloom": Family(bloom, bloom_rules, "transformer.", tables=("word_embeddings.weight",)),
    "mpt": Family(mpt, mpt_rules, "transformer.", tables=("wte.weight",)),
}
