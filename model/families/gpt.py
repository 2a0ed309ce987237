"""GPT-2 and the decoders that follow it: LayerNorm, an MLP without a gate, as many keys as queries.

GPT-2 (Radford et al. 2019), StarCoder's first version (Li et al. 2023: one key for all queries), and GPT-Neo (Black et
al. 2021: windows in every second layer) have learned positions. OPT (Zhang et al. 2022) has them too; its 350M has
embeddings that are narrower than its layers. XGLM (Lin et al. 2021) has sinusoids.

The others turn a part of each head, and compute attention and MLP in parallel: GPT-J and CodeGen (Wang and Komatsuzaki
2021; Nijkamp et al. 2022), GPT-NeoX and Pythia (Black et al. 2022), Phi 1 and 2 (Li et al. 2023).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import islice

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind, RotaryConfig
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import PositionConfig, PositionKind, StackConfig
from triptych.model.errors import ConfigError
from triptych.model.families.table.decoders import decoder_model, with_attention
from triptych.model.families.table.helpers import (
    activation,
    check_layers,
    ignore_unless,
    refuse_unless,
    repeat,
    split_width,
    switched_on,
)
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rope import number, rotary
from triptych.model.families.table.rules import Family, Interleaved
from triptych.model.families.table.stored_names import StoredNames


def gpt2(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    ignore_unless(raw, add_cross_attention=False)  # which a source that it does not have would pass through
    raw.get("reorder_and_upcast_attn")  # how scores are rounded in float16
    size, heads = raw["n_embd"], raw["n_head"]
    dim = split_width(size, heads)
    scale = dim**-0.5 if raw.get("scale_attn_weights", True) else 1.0
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_epsilon", 1e-5))
    layer = LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, scale, qkv_bias=True, out_bias=True),
        feed_forward=MLPConfig(raw.get("n_inner") or 4 * size, activation(raw, "activation_function", "gelu_new")),
        norms=(Norms(pre=norm),) * 2,
    )
    layers = repeat(layer, raw["n_layer"])
    if switched_on(raw, "scale_attn_by_inverse_layer_idx"):
        attention, count = layer.attention, len(layers)
        layers = tuple(replace(layer, mixer=replace(attention, scale=scale / (i + 1))) for i in range(count))
    decoder = StackConfig(
        layers=layers,
        hidden_size=size,
        causal=True,
        position=PositionConfig(PositionKind.LEARNED, max_positions=raw["n_positions"]),
        final_norm=norm,
    )
    return decoder_model(raw, names, decoder, raw["n_positions"])


def bigcode(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    for unused in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads"):
        raw.get(unused)  # of float16; what `multi_query` says
    base = gpt2(raw.otherwise(activation_function="gelu_pytorch_tanh"), names)
    return with_attention(base, num_kv_heads=1) if raw.get("multi_query", True) else base


_KINDS = ("global", "local")


def gpt_neo(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    size, heads, positions = raw["hidden_size"], raw["num_heads"], raw.get("max_position_embeddings", 2048)
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_epsilon", 1e-5))
    plain = LayerConfig(
        mixer=AttentionConfig(heads, heads, split_width(size, heads), 1.0, out_bias=True),
        feed_forward=MLPConfig(
            raw.get("intermediate_size") or 4 * size, activation(raw, "activation_function", "gelu_new")
        ),
        norms=(Norms(pre=norm),) * 2,
    )
    local = replace(plain, mixer=replace(plain.attention, window=raw.get("window_size", 256)))
    decoder = StackConfig(
        layers=tuple(plain if kind == _KINDS[0] else local for kind in _kinds(raw)),
        hidden_size=size,
        causal=True,
        position=PositionConfig(PositionKind.LEARNED, max_positions=positions),
        final_norm=norm,
    )
    return decoder_model(raw, names, decoder, positions)


def _kinds(raw: Settings) -> list[str]:
    """Return the kind of each layer, which `attention_types` has as lists to be repeated: `[[kinds, times], ...]`."""
    count, types = raw["num_layers"], raw.get("attention_types") or [[list(_KINDS), 12]]
    raw.get("attention_layers")  # the same, written out
    check_layers(count)
    listed = (kind for kinds, times in types for _ in range(min(times, count + 1)) for kind in kinds)
    found = list(islice(listed, count + 1))
    if len(found) != count or set(found) - set(_KINDS):
        raise ConfigError(f"attention_types must name {count} layers as global or local, found {str(types)[:200]}")
    return found


_CORES = 4  # CodeGen's q, v and k are stored for each of the 4 cores that it was trained on


def gptj(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, rotary=True, scale_attn_weights=True)
    size, heads, positions = raw["n_embd"], raw["n_head"], raw.get("n_positions", 2048)
    dim, rotated = split_width(size, heads), raw.get("rotary_dim", 64)
    if raw["model_type"] == "codegen" and heads % _CORES:
        raise ConfigError(f"heads of CodeGen come in fours, found {heads}")
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_epsilon", 1e-5))
    position = RotaryConfig(rotated, interleaved=True)
    layer = LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, dim**-0.5, position=position),
        feed_forward=MLPConfig(raw.get("n_inner") or 4 * size, activation(raw, "activation_function", "gelu_new")),
        norms=(Norms(pre=norm), Norms()),
        parallel=True,
        one_norm=True,
    )
    decoder = StackConfig(repeat(layer, raw["n_layer"]), size, causal=True, final_norm=norm)
    return decoder_model(raw.otherwise(tie_word_embeddings=False), names, decoder, positions, head_bias=True)


_NEOX_HEAD = "embed_out"


def gpt_neox(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    size, heads = raw["hidden_size"], raw["num_attention_heads"]
    dim = split_width(size, heads)
    bias = bool(raw.get("attention_bias", True))
    raw.get("is_decoder")  # always
    share, theta = number(raw, "rotary_pct", 0.25), number(raw, "rotary_emb_base", 10_000.0)
    # Its class has these two by other names, and does not read the usual ones outside of the rotary settings.
    own = raw.but(rope_theta=None, partial_rotary_factor=None) if raw.follows_class else raw
    rotation = rotary(own, dim, share=share, theta=theta, partial=True)
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", 1e-5))
    layer = LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=bias, out_bias=bias, position=rotation),
        feed_forward=MLPConfig(raw["intermediate_size"], activation(raw, "hidden_act", "gelu")),
        norms=(Norms(pre=norm),) * 2,
        parallel=bool(raw.get("use_parallel_residual", True)),
    )
    decoder = StackConfig(repeat(layer, raw["num_hidden_layers"]), size, causal=True, final_norm=norm)
    raw = raw.otherwise(tie_word_embeddings=False)
    return decoder_model(raw, names, decoder, raw.get("max_position_embeddings", 2048), head=f"{_NEOX_HEAD}.weight")


def phi(raw: Settings, names: Collection[str] | None) -> ModelConfig:
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


def opt(raw: Settings, names: Collection[str] | None) -> ModelConfig:
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


def xglm(raw: Settings, names: Collection[str] | None) -> ModelConfig:
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


def _all_heads(attention: AttentionConfig) -> Interleaved | None:
    """q, k and v are stored head by head, where there are as many of each."""
    return Interleaved(attention.num_heads) if attention.num_kv_heads == attention.num_heads > 1 else None


def _by_core(attention: AttentionConfig) -> Interleaved:
    local = attention.num_heads // _CORES
    return Interleaved(_CORES, (local, local, local), order=(0, 2, 1))


_LN = ("ln_1", "ln_2")
_SEPARATE = ("q_proj", "k_proj", "v_proj", "out_proj")
_GPT2 = StoredNames(
    tokens="wte",
    positions="wpe",
    layer="h.{}",
    attention=("attn.c_attn", "attn.c_proj"),
    norms=_LN,
    mlp=("mlp.c_fc", "mlp.c_proj"),
    final_norm="ln_f",
    transpose=True,
)
_BIGCODE = replace(_GPT2, transpose=False, interleaved=_all_heads)
_NEO = replace(_GPT2, transpose=False, attention=tuple(f"attn.attention.{part}" for part in _SEPARATE))
_GPTJ = replace(_NEO, attention=tuple(f"attn.{part}" for part in _SEPARATE), mlp=("mlp.fc_in", "mlp.fc_out"))
_CODEGEN = replace(_GPTJ, attention=("attn.qkv_proj", "attn.out_proj"), interleaved=_by_core)
_NEOX = StoredNames(
    tokens="embed_in",
    layer="layers.{}",
    attention=("attention.query_key_value", "attention.dense"),
    norms=("input_layernorm", "post_attention_layernorm"),
    mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    final_norm="final_layer_norm",
    head=_NEOX_HEAD,
    interleaved=lambda attention: Interleaved(attention.num_heads),
)
_PHI = StoredNames(
    tokens="embed_tokens",
    layer="layers.{}",
    attention=tuple(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "dense")),
    norms=("input_layernorm", ""),
    heads_norm="self_attn.{}_layernorm",
    mlp=("mlp.fc1", "mlp.fc2"),
    final_norm="final_layernorm",
)
_XGLM = StoredNames(
    tokens="embed_tokens",
    layer="layers.{}",
    attention=tuple(f"self_attn.{part}" for part in _SEPARATE),
    norms=("self_attn_layer_norm", "final_layer_norm"),
    mlp=("fc1", "fc2"),
    final_norm="layer_norm",
)
_OPT = replace(
    _XGLM,
    tokens="decoder.embed_tokens",
    positions="decoder.embed_positions",
    project="decoder.project_in",
    output="decoder.project_out",
    layer="decoder.layers.{}",
    final_norm="decoder.final_layer_norm",
)

# Old checkpoints have causal masks, angles and sinusoids as tensors.
_MASKS = ("h.*.attn.bias", "h.*.attn.masked_bias")
_NEO_MASKS = ("h.*.attn.attention.bias", "h.*.attn.attention.masked_bias")
_NEOX_DROPPED = ("layers.*.attention.bias", "layers.*.attention.masked_bias", "layers.*.attention.rotary_emb.inv_freq")
_GPT = Family(gpt2, _GPT2.rules, "transformer.", _MASKS, tables=("wte.weight",))
_GPTJ_FAMILY = replace(
    _GPT, config=gptj, rules=_GPTJ.rules, dropped=(*_MASKS, "h.*.attn.embed_positions", "h.*.attn.causal_mask")
)
FAMILIES = {
    "gpt2": _GPT,
    "gpt_bigcode": replace(_GPT, config=bigcode, rules=_BIGCODE.rules),
    "gpt_neo": replace(_GPT, config=gpt_neo, rules=_NEO.rules, dropped=_NEO_MASKS),
    "gptj": _GPTJ_FAMILY,
    "codegen": replace(_GPTJ_FAMILY, rules=_CODEGEN.rules),
    "gpt_neox": Family(
        gpt_neox,
        _NEOX.rules,
        "gpt_neox.",
        _NEOX_DROPPED,
        {"lm_head": _NEOX_HEAD},  # as `transformers` 5 calls it in memory
        tables=("embed_in.weight",),
        heads=(f"{_NEOX_HEAD}.weight",),
    ),
    "phi": Family(phi, _PHI.rules, "model.", ("layers.*.self_attn.rotary_emb.inv_freq",)),
    "opt": Family(opt, _OPT.rules, "model.", tables=("decoder.embed_tokens.weight",)),
    "xglm": Family(xglm, _XGLM.rules, "model.", ("embed_positions.weights",)),
}
