"""Llama with other biases, norms or multipliers, another MLP, or layers without positions.

Seed-OSS (ByteDance 2025); AFM (Arcee 2025) and Nemotron (NVIDIA 2024), which have a squared ReLU and no gate; HunYuan
(Tencent 2025); Apertus (Swiss AI 2025) with xIELU. Nemotron's norms are LayerNorms whose gains are stored as their
distance from 1, and half of each head's dimensions turn.

Granite (2024) multiplies embeddings, scores, residual sums and logits; GraniteMoe has experts too, those of a layer in
one tensor; GraniteMoeShared one more for every token. Every fourth layer of SmolLM3 (Hugging Face 2025; Yang et al.
2025) has no positions. StableLM (Bellagente et al. 2024) has LayerNorms, and StarCoder 2 (Lozhkov et al. 2024) biases
and no gate.

Command R (Cohere 2024) computes attention and MLP in parallel after one norm. Command R+ has norms of queries and keys,
with gains of each head. Of Command R7B and A (cohere2) three of four layers have a window, the others no positions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

from triptych.model.config.attention import NormConfig, NormKind, NormSpan
from triptych.model.config.layer import Activation, ExpertsConfig, LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError, shown
from triptych.model.families import llama
from triptych.model.families.table.decoders import (
    ExpertNames,
    with_attention,
    with_experts,
    with_interleaved_pairs,
    with_layers,
    with_windows,
)
from triptych.model.families.table.helpers import activation, ignore_unless, refuse_unless, switched_on
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rope import with_default_rope
from triptych.model.families.table.rules import Rule, TensorRule


def seed_oss(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(attention_bias=True, head_dim=128, max_position_embeddings=524_288, num_key_value_heads=8)
    base = llama.config(raw, names)
    return with_attention(base, out_bias=bool(raw.get("attention_out_bias", False)))


def arcee(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(hidden_act="relu2", max_position_embeddings=4096, rms_norm_eps=1e-5)
    return _ungated(llama.config(raw, names))


def nemotron(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    norm = NormConfig(NormKind.LAYER, raw.get("norm_eps", 1e-5), unit_offset=True)
    raw = raw.otherwise(hidden_act="relu2", max_position_embeddings=4096, partial_rotary_factor=0.5)
    return _ungated(llama.config(raw, names, norm=norm, partial=True))


def hunyuan(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build HunYuan, whose queries and keys are normalised after they turn."""
    raw.get("eod_token_id"), raw.get("pretraining_tp")  # of training
    raw = raw.otherwise(rms_norm_eps=1e-5).but(pretraining_tp=1)
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind, alpha = scaling.get("rope_type", scaling.get("type")), scaling.get("alpha")
    if kind == "dynamic" and alpha:  # a base that is stretched once and for all
        dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0
        raw = raw.but(rope_parameters=None, rope_scaling=None, rope_theta=theta * alpha ** (dim / (dim - 2)))
    base = llama.config(raw, names)
    _read_own_code(raw, base)
    return with_attention(base, qk_norm=base.decoder_stack.final_norm, rotates_first=True)


# Keys that HunYuan's own code reads and the reference's class does not, with the only value that is computed.
_OWN_CODE = {
    **dict.fromkeys(("use_qk_norm", "use_rotary_pos_emb", "norm_topk_prob"), True),
    **dict.fromkeys(("use_cla", "use_mla", "position_embedding_xdrope", "group_limited_greedy", "mlp_bias"), False),
    **dict.fromkeys(("moe_drop_tokens", "moe_random_routing_dropped_token", "add_classification_head"), False),
    **{"norm_type": "rms", "num_shared_expert": 1, "routed_scaling_factor": 1.0, "moe_layer_num_skipped": 0},
}
# Keys of images, of classifiers that are not stored, and of parts that are switched off above.
_OWN_CODE_UNUSED = (
    *("im_*", "image_*", "text_*_id", "vit_*", "anyres_*", "video_*", "num_media_embeds", "mask_init_id"),
    *("class_num", "pool_type", "skip_cls_token", "dense_list", "pad_id", "cla_share_factor"),
    *("capacity_factor", "sep_token_id", "xdrope_section"),
)


def _read_own_code(raw: Settings, base: ModelConfig) -> None:
    layer = base.decoder_stack.layers[0]
    served = {**_OWN_CODE, "use_mixed_mlp_moe": raw["model_type"] == "hunyuan_v1_moe"}
    served |= {"org_vocab_size": raw["vocab_size"], "attention_head_dim": layer.attention.head_dim}
    served["moe_intermediate_size"] = layer.mlp.intermediate_size
    for key, value in served.items():
        found = raw.get(key, value)  # or a list with one for each layer
        if found is not None and any(one != value for one in (found if isinstance(found, list) else [found])):
            raw.ignore(key, found)
    for key in raw:
        if any(fnmatchcase(key, pattern) for pattern in _OWN_CODE_UNUSED):
            raw.get(key)


def hunyuan_moe(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build HunYuan with experts, which are as wide as the one of all tokens."""
    base, count = hunyuan(raw, names), raw["num_hidden_layers"]
    mlp, chosen, experts = base.decoder_stack.layers[0].mlp, raw.get("moe_topk", 1), raw.get("num_experts", 1)
    each = chosen if isinstance(chosen, list) else [chosen] * count
    if len(each) != count or not all(type(one) is int for one in each) or type(experts) is not int or experts < 2:
        raise ConfigError(
            f"moe_topk of a hunyuan_v1_moe must be a whole number or one for each of {count} layers, and num_experts a "
            f"whole number from 2 on, found {shown(chosen)} and {shown(experts)}"
        )
    kinds = {one: ExpertsConfig(experts, one, mlp, renormalised=True, shared=mlp) for one in set(each)}
    stack = base.decoder_stack
    layers = (replace(layer, feed_forward=kinds[one]) for layer, one in zip(stack.layers, each, strict=True))
    return replace(base, decoder=replace(stack, layers=tuple(layers)))


def apertus(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, hidden_act="xielu")
    raw = with_default_rope(raw, _APERTUS_ROPE)
    raw = raw.otherwise(max_position_embeddings=65_536, rms_norm_eps=1e-5, rope_theta=12e6)
    base = llama.config(raw.but(hidden_act="silu"), names)
    mlp = MLPConfig(raw["intermediate_size"], Activation.IDENTITY, bias=False, xielu=True)
    return with_attention(with_layers(base, feed_forward=mlp), qk_norm=base.decoder_stack.final_norm)


def apertus_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield Llama's rules, and those of the numbers of xIELU; two of them are stored without dimensions.

    Its `beta` is called a bias by then, as those of old norms are.
    """
    norms = {"attention_layernorm": "attn_norms.pre", "feedforward_layernorm": "mlp_norms.pre"}
    yield from llama.rules(config, norms=norms)
    shapes: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "bias": (), "eps": ()}
    for i in range(config.decoder_stack.num_layers):
        for place, (name, shape) in enumerate(shapes.items()):
            target = f"decoder.layers.{i}.mlp.xielu"
            yield TensorRule(f"layers.{i}.mlp.act_fn.{name}", target, (place, place + 1), shape=shape)


_APERTUS_ROPE = dict(rope_type="llama3", rope_theta=12e6, factor=8.0, original_max_position_embeddings=8192)
_APERTUS_ROPE |= dict(low_freq_factor=1.0, high_freq_factor=4.0)


def _ungated(base: ModelConfig) -> ModelConfig:
    """Return the model with one projection up in every layer."""
    return with_layers(base, feed_forward=replace(base.decoder_stack.layers[0].mlp, gated=False))


_HUNYUAN_NORMS = {".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm."}
_HUNYUAN_EXPERTS = ExpertNames("mlp.gate.wg", shared="mlp.shared_mlp")


def granite(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    base = llama.config(raw, names, head_scale=1.0 / raw.get("logits_scaling", 1.0))
    base = with_attention(base, scale=float(raw.get("attention_multiplier", 1.0)))
    base = with_layers(base, residual_scale=float(raw.get("residual_multiplier", 1.0)))
    return replace(base, embedding=replace(base.embedding, scale=float(raw.get("embedding_multiplier", 1.0))))


def granite_moe(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    base = granite(raw, names)
    count, per_token = raw.get("num_local_experts", 8), raw.get("num_experts_per_tok", 2)
    mlp = base.decoder_stack.layers[0].mlp
    width = raw["shared_intermediate_size"] if switched_on(raw, "shared_intermediate_size") else 0
    shared = replace(mlp, intermediate_size=width) if width else None
    return with_experts(base, ExpertsConfig(count, per_token, mlp, renormalised=True, shared=shared))


_MOE = "block_sparse_moe"
_GRANITE_SHARED = ("shared_mlp.input_linear", "shared_mlp.output_linear")
_GRANITE_NAMES = ExpertNames(f"{_MOE}.router.layer", f"{_MOE}.experts", shared_fused=_GRANITE_SHARED)
_GRANITE_FUSED = (
    *_GRANITE_NAMES.fused(f"{_MOE}.input_linear.weight", f"{_MOE}.output_linear.weight", written=True),
    *_GRANITE_NAMES.fused(f"{_MOE}.experts.gate_up_proj", f"{_MOE}.experts.down_proj"),
)


_KINDS = ("full_attention", "sliding_attention")


def smollm3(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(num_key_value_heads=4, max_position_embeddings=32_768, rope_theta=2_000_000.0)
    raw.get("max_window_layers")  # of Qwen
    base = llama.config(raw, names)
    count, plain = base.decoder_stack.num_layers, base.decoder_stack.layers[0]
    interval, window = raw.get("no_rope_layer_interval", 4), raw.get("sliding_window")
    turns = raw.get("no_rope_layers") or [(index + 1) % interval != 0 for index in range(count)]
    slides = raw.get("use_sliding_window", False) and window is not None
    kinds = raw.get("layer_types") or [_KINDS[bool(slides and not turn)] for turn in turns]
    if len(turns) < count or len(kinds) != count or set(kinds) - set(_KINDS):
        raise ConfigError(f"no_rope_layers and layer_types are not of {count} layers of full or sliding attention")
    found: dict[tuple[bool, bool], LayerConfig] = {}

    def layer(turn: bool, sliding: bool) -> LayerConfig:
        if (turn, sliding) not in found:
            position = plain.attention.position if turn else None
            mixer = replace(plain.attention, position=position, window=window if sliding else None)
            found[turn, sliding] = replace(plain, mixer=mixer)
        return found[turn, sliding]

    layers = tuple(layer(bool(turn), kind == _KINDS[1]) for turn, kind in zip(turns, kinds, strict=False))
    return replace(base, decoder=replace(base.decoder_stack, layers=layers))


def stablelm(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", 1e-5))
    raw = raw.otherwise(max_position_embeddings=4096, partial_rotary_factor=0.25)
    ignore_unless(raw, rope_pct=raw["partial_rotary_factor"])  # what the first files called it
    base = llama.config(raw, names, norm=norm, partial=True)
    base = with_attention(base, qkv_bias=bool(raw.get("use_qkv_bias", False)), out_bias=False)
    if raw.get("qk_layernorm", False):
        base = with_attention(base, qk_norm=replace(norm, bias=False), qk_norm_span=NormSpan.OWN_GAINS)
    if raw.get("use_parallel_residual", False):
        base = with_layers(base, parallel=True, one_norm=True, norms=(Norms(pre=norm), Norms()))
    return base


def stablelm_rules(config: ModelConfig) -> Iterator[Rule]:
    one_norm = config.decoder_stack.layers[0].one_norm
    norms = {"input_layernorm": "attn_norms.pre"} | ({} if one_norm else {"post_attention_layernorm": "mlp_norms.pre"})
    yield from llama.rules(with_attention(config, qk_norm=None), norms=norms)
    for i, layer in enumerate(config.decoder_stack.layers):
        attention = layer.attention
        for side, heads in (("q", attention.num_heads), ("k", attention.num_kv_heads)) if attention.qk_norm else ():
            for head in range(heads):
                source = f"layers.{i}.self_attn.{side}_layernorm.norms.{head}.weight"
                target, rows = f"decoder.layers.{i}.attn.{side}_norm.weight", (head, head + 1)
                yield TensorRule(source, target, rows, shape=(attention.head_dim,))


# Of StarCoder's first files: how its softmax was computed, and what has other names now.
_OLDER = ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "activation_function", "layer_norm_epsilon")


def starcoder2(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, mlp_type="default", norm_type="layer_norm", scale_attn_weights=True)
    for unused in _OLDER:
        raw.get(unused)
    raw = raw.otherwise(max_position_embeddings=4096, num_key_value_heads=2)
    bias = bool(raw.get("use_bias", True))
    norm = NormConfig(NormKind.LAYER, raw.get("norm_epsilon", 1e-5))
    base = llama.config(raw.but(hidden_act="silu"), names, norm=norm)
    base = with_attention(base, qkv_bias=bias, out_bias=bias, window=raw.get("sliding_window"))
    mlp = MLPConfig(raw["intermediate_size"], activation(raw, "hidden_act", "gelu_pytorch_tanh"), bias=bias)
    return with_layers(base, feed_forward=mlp)


_PERIOD = 4  # every fourth layer of cohere2 has full attention


def cohere(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(max_position_embeddings=8192, rope_theta=500_000.0)
    return _parallel(raw, names, qk_norm=bool(raw.get("use_qk_norm", False)))


def _parallel(raw: Settings, names: Collection[str] | None, *, qk_norm: bool) -> ModelConfig:
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", 1e-5), bias=False)
    base = llama.config(raw, names, norm=norm, head_scale=raw.get("logit_scale", 0.0625))
    base = with_interleaved_pairs(base)
    if qk_norm:
        base = with_attention(base, qk_norm=norm, qk_norm_span=NormSpan.OWN_GAINS)
    return with_layers(base, parallel=True, one_norm=True, norms=(Norms(pre=norm), Norms()))


def cohere2(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, use_qk_norm=False, use_parallel_block=True, use_embedding_sharing=True)
    refuse_unless(raw, use_gated_activation=True, rotary_pct=1.0)
    for unused in ("use_parallel_embedding", "layer_switch"):
        raw.get(unused)  # of training; the same as the pattern
    refuse_unless(raw, position_embedding_type="rope_gptj", order_of_interleaved_layers="local_attn_first")
    base = _parallel(raw.otherwise(max_position_embeddings=8192), names, qk_norm=False)
    raw.get("_sliding_window_pattern")  # what `layer_types` were made of
    period = raw.get("sliding_window_pattern", _PERIOD)
    return with_windows(base, raw, raw.get("sliding_window", 4096), period, full={"position": None})


_COHERE_RULES = partial(llama.rules, norms={"input_layernorm": "attn_norms.pre"})


_SPARSE = llama.family(
    granite_moe,
    partial(llama.rules, experts=_GRANITE_NAMES),
    fused=_GRANITE_FUSED,
    spelled={f"{_MOE}.router.weight": f"{_MOE}.router.layer.weight"},
)
FAMILIES = {
    "seed_oss": llama.family(seed_oss),
    "arcee": llama.family(arcee),
    "nemotron": llama.family(nemotron),
    "hunyuan_v1_dense": llama.family(hunyuan, spelled=_HUNYUAN_NORMS),
    "hunyuan_v1_moe": llama.family(
        hunyuan_moe,
        partial(llama.rules, experts=_HUNYUAN_EXPERTS),
        fused=_HUNYUAN_EXPERTS.fused(),
        spelled=_HUNYUAN_NORMS,
    ),
    "apertus": llama.family(apertus, apertus_rules),
    "granite": llama.family(granite),
    "granitemoe": _SPARSE,
    "granitemoeshared": _SPARSE,
    "smollm3": llama.family(smollm3),
    "stablelm": llama.family(stablelm, stablelm_rules),
    "starcoder2": llama.family(starcoder2, replace(llama.NAMES, mlp=("mlp.c_fc", "mlp.c_proj")).rules),
    "cohere": llama.family(cohere, _COHERE_RULES),
    "cohere2": llama.family(cohere2, _COHERE_RULES),
}
