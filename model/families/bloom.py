"""Decoders whose scores fall with the distance of tokens (ALiBi: Press et al. 2021), or may do so.

BLOOM (BigScience 2022); MPT (MosaicML 2023), without biases; Falcon (Almazrouei et al. 2023), with rotary positions but
for its first models, and attention and MLP in parallel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from triptych.model.config.attention import AlibiConfig, AttentionConfig, NormConfig, NormKind, RotaryConfig
from triptych.model.config.layer import Activation, LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.errors import ConfigError
from triptych.model.families.table.decoders import decoder_model
from triptych.model.families.table.helpers import activation, ignore_unless, refuse_unless, repeat, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rope import rotary
from triptych.model.families.table.rules import Family, Interleaved, Rule
from triptych.model.families.table.stored_names import StoredNames

_OLDER = {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
# Keys of training, and of the choice between equal kernels.
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


def falcon(raw: Settings, names: Collection[str] | None) -> ModelConfig:
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


def _grouped(attention: AttentionConfig) -> Interleaved:
    """Head by head of the keys: its queries, the key, the value. Of one head that is the order of ours."""
    return Interleaved(attention.num_kv_heads, (attention.num_heads // attention.num_kv_heads, 1, 1))


def falcon_rules(config: ModelConfig) -> Iterator[Rule]:
    layer = config.decoder_stack.layers[0]
    both = layer.parallel and not layer.one_norm
    return (replace(_BLOOM, norms=("ln_attn", "ln_mlp")) if both else _BLOOM).rules(config)


_BLOOM = StoredNames(
    tokens="word_embeddings",
    embed_norm="word_embeddings_layernorm",
    layer="h.{}",
    attention=("self_attention.query_key_value", "self_attention.dense"),
    norms=("input_layernorm", "post_attention_layernorm"),
    mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    final_norm="ln_f",
    interleaved=_grouped,
)
_MPT = StoredNames(
    tokens="wte",
    layer="blocks.{}",
    attention=("attn.Wqkv", "attn.out_proj"),
    norms=("norm_1", "norm_2"),
    mlp=("ffn.up_proj", "ffn.down_proj"),
    final_norm="norm_f",
)
_DROPPED = ("h.*.self_attention.rotary_emb.inv_freq",)
_FAMILY = Family(bloom, _BLOOM.rules, "transformer.", tables=("word_embeddings.weight",))
FAMILIES = {
    "bloom": _FAMILY,
    "mpt": Family(mpt, _MPT.rules, "transformer.", tables=("wte.weight",)),
    "falcon": replace(_FAMILY, config=falcon, rules=falcon_rules, dropped=_DROPPED),
}
