"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 with experts in most layers; Qwen2's have a shared one too."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from triptych.model.config.layer import ExpertsConfig
from triptych.model.config.model import ModelConfig
from triptych.model.families import llama
from triptych.model.families.table.decoders import ExpertNames, with_attention, with_experts
from triptych.model.families.table.helpers import split_width
from triptych.model.families.table.raw_config import Settings

NAMES = ExpertNames()


def sparse(raw: Settings, base: ModelConfig, *, shared: int | None = None) -> ModelConfig:
    """Return the model with experts in the layers that are to have them, and a gated shared one of width `shared`."""
    mlp, step = base.decoder_stack.layers[0].mlp, raw.get("decoder_sparse_step", 1)
    every = range(base.decoder_stack.num_layers)
    dense = {*(raw.get("mlp_only_layers") or ()), *(index for index in every if (index + 1) % step)}
    experts = ExpertsConfig(
        raw["num_experts"],
        raw["num_experts_per_tok"],
        replace(mlp, intermediate_size=raw["moe_intermediate_size"]),
        renormalised=bool(raw.get("norm_topk_prob", False)),
        shared=None if shared is None else replace(mlp, intermediate_size=shared),
        shared_gate=shared is not None,
    )
    return with_experts(base, experts, dense)


def _slides(index: int, limit: int) -> bool:
    """Whether a layer of Qwen2-MoE has a window: every second one of the first `max_window_layers`."""
    return index < limit and index % 2 == 0


def qwen2(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_key_value_heads=16,
    )
    base = with_attention(llama.qwen2(raw, names, _slides), qkv_bias=bool(raw.get("qkv_bias", True)))
    return sparse(raw, base, shared=raw["shared_expert_intermediate_size"])


def qwen3(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(
        num_experts=raw.get("num_local_experts", 128),  # as `transformers` 5 calls it
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        num_key_value_heads=4,
        head_dim=split_width(raw["hidden_size"], raw["num_attention_heads"]),
    )
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    full = llama.qwen3(raw.but(use_sliding_window=False, layer_types=None), names)
    return sparse(raw, with_attention(full, window=window))  # in every layer


def qwen3_vl(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build the language model of Qwen3-VL with experts, whose scores are always of the chosen ones alone."""
    raw = raw.otherwise(
        num_experts=raw.get("num_local_experts", 60),
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        num_key_value_heads=16,
        max_position_embeddings=128_000,
        rope_theta=500_000.0,
    )
    return qwen3(llama.without_windows(raw).but(norm_topk_prob=True), names)


_RULES = partial(llama.rules, experts=NAMES)
# Published folders have inputs first, those that `transformers` 5 writes outputs first.
_EITHER_WAY = tuple(replace(one, either_way=True) for one in NAMES.fused(written=True))
FAMILIES = {
    "qwen2_moe": llama.family(qwen2, _RULES, fused=NAMES.fused()),
    "qwen3_moe": llama.family(qwen3, _RULES, fused=NAMES.fused()),
    "qwen3_vl_moe_text": llama.family(qwen3_vl, _RULES, fused=_EITHER_WAY),
}
