"""Experts that a router chooses by scores and learned biases, next to shared ones, as in DeepSeek-V3.

GLM-4.5 (GLM team 2025), dots.llm1 (rednote 2025) and MiniMax-M2 (2025) score by a sigmoid, ERNIE 4.5 (Baidu 2025) by
the softmax. Their attention is Llama's, with norms of queries and keys or neighbours that turn.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from triptych.model.config.attention import NormSpan
from triptych.model.config.layer import ChoiceConfig, ExpertsConfig
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError
from triptych.model.families import glm, llama, mixtral
from triptych.model.families.table.decoders import ExpertNames, with_attention, with_experts
from triptych.model.families.table.raw_config import Settings


def glm4_moe(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(
        **dict(num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131_072, partial_rotary_factor=0.5),
        **dict(n_routed_experts=128, n_shared_experts=1, first_k_dense_replace=1, norm_topk_prob=True),
        head_dim=raw["hidden_size"] // raw["num_attention_heads"],
    )
    raw.get("num_nextn_predict_layers"), raw.get("num_mtp_layers")  # of layers that are not served
    base = with_attention(llama.config(raw, names, partial=True), out_bias=False)
    if raw.get("use_qk_norm", False):
        base = with_attention(base, qk_norm=base.decoder_stack.final_norm)
    return _deepseek(raw, base)


def dots1(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(num_key_value_heads=32)
    base = llama.config(raw, names)
    base = with_attention(base, qk_norm=base.decoder_stack.final_norm)
    base = _deepseek(raw, base)
    count, window = base.decoder_stack.num_layers, raw.get("sliding_window", 4096)
    full, first = "full_attention", raw.get("max_window_layers", 62)
    kinds = raw.get("layer_types") or [
        full if window is None or i < first else "sliding_attention" for i in range(count)
    ]
    if len(kinds) != count or set(kinds) - {full, "sliding_attention"}:
        raise ConfigError(f"layer_types of a dots1 must name {count} layers of full or sliding attention")
    layers = (
        layer if kind == full else replace(layer, mixer=replace(layer.attention, window=window))
        for layer, kind in zip(base.decoder_stack.layers, kinds, strict=True)
    )
    return replace(base, decoder=replace(base.decoder_stack, layers=tuple(layers)))


def _deepseek(raw: Settings, base: ModelConfig) -> ModelConfig:
    """Return the model with experts in all layers but the first ones, by DeepSeek-V3's settings."""
    mlp = base.decoder_stack.layers[0].mlp
    width, shared = raw.get("moe_intermediate_size", 1408), raw.get("n_shared_experts") or 0
    choice = ChoiceConfig(
        groups=raw.get("n_group") or 1,
        groups_per_token=raw.get("topk_group") or 1,
        factor=float(raw.get("routed_scaling_factor", 1.0)),
    )
    experts = ExpertsConfig(
        raw["n_routed_experts"],
        raw.get("num_experts_per_tok") or 8,
        replace(mlp, intermediate_size=width),
        renormalised=bool(raw.get("norm_topk_prob", False)),
        shared=replace(mlp, intermediate_size=shared * width) if shared else None,
        choice=choice,
    )
    return with_experts(base, experts, range(raw.get("first_k_dense_replace") or 0))


def ernie4_5_moe(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    count = raw["num_hidden_layers"]
    raw = raw.otherwise(num_key_value_heads=4, head_dim=raw["hidden_size"] // raw["num_attention_heads"])
    base = glm.ernie4_5(raw, names)
    base = replace(base, head=base.head and replace(base.head, bias=bool(raw.get("use_bias", False))))
    mlp, width = base.decoder_stack.layers[0].mlp, raw.get("moe_intermediate_size", 1536)
    shared = raw.get("moe_num_shared_experts", 2)
    experts = ExpertsConfig(
        raw.get("moe_num_experts", 64),
        raw.get("moe_k", 6),
        replace(mlp, intermediate_size=width, bias=False),
        renormalised=True,
        shared=replace(mlp, intermediate_size=shared * width) if shared else None,
        choice=ChoiceConfig(sigmoid=False, least=float(raw.get("moe_norm_min", 1e-12))),
    )
    first, last, step = (raw.get(f"moe_layer_{name}", default) for name, default in _RANGE)
    last = count - 1 if last == -1 else last
    sparse = {index for index in range(count) if first <= index <= last and (index + 1) % step == 0}
    return with_experts(base, experts, set(range(count)) - sparse)


def minimax_m2(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(head_dim=128, num_key_value_heads=8, max_position_embeddings=196_608, rope_theta=5e6)
    if raw.get("rotary_dim") is not None:
        raw = raw.otherwise(partial_rotary_factor=raw["rotary_dim"] / raw["head_dim"])
    base = llama.config(raw, names, partial=True)
    base = with_attention(base, qk_norm=base.decoder_stack.final_norm, qk_norm_span=NormSpan.ALL_HEADS)
    count, per_token = raw.get("num_local_experts", 256), raw.get("num_experts_per_tok", 8)
    mlp = base.decoder_stack.layers[0].mlp
    return with_experts(base, ExpertsConfig(count, per_token, mlp, renormalised=True, choice=ChoiceConfig()))


_RANGE = (("start_index", 1), ("end_index", -1), ("interval", 1))
_NAMES = ExpertNames(shared="mlp.shared_experts")
_ERNIE = ExpertNames(shared="mlp.shared_experts", choice="mlp.moe_statics.e_score_correction_bias", choice_shape=(1,))
_RULES = partial(llama.rules, experts=_NAMES)
_MINIMAX = replace(mixtral.NAMES, choice="block_sparse_moe.e_score_correction_bias")
FAMILIES = {
    "minimax_m2": llama.family(
        minimax_m2,
        partial(llama.rules, experts=_MINIMAX),
        fused=_MINIMAX.fused(),
        spelled={".mlp.": ".block_sparse_moe."},
    ),
    "glm4_moe": llama.family(glm4_moe, _RULES, fused=_NAMES.fused()),
    "dots1": llama.family(dots1, _RULES, fused=_NAMES.fused()),
    "ernie4_5_moe": llama.family(
        ernie4_5_moe,
        partial(llama.rules, experts=_ERNIE),
        fused=_ERNIE.fused(),
        spelled={".gate.moe_statics.": ".moe_statics."},
    ),
}
