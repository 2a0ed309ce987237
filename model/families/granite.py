"""Granite: Llama with a multiplier for embeddings, scores, residual sums and logits (Granite team 2024).

GraniteMoe has experts too, those of a layer in one tensor; GraniteMoeShared one more for every token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from triptych.model.config.layer import ExpertsConfig
from triptych.model.config.model import ModelConfig
from triptych.model.families import llama
from triptych.model.families.table.decoders import ExpertNames, either_way, with_attention, with_experts, with_layers
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    base = llama.config(raw, names, head_scale=1.0 / raw.get("logits_scaling", 1.0))
    base = with_attention(base, scale=float(raw.get("attention_multiplier", 1.0)))
    base = with_layers(base, residual_scale=float(raw.get("residual_multiplier", 1.0)))
    return replace(base, embedding=replace(base.embedding, scale=float(raw.get("embedding_multiplier", 1.0))))


def moe(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    base = config(raw, names)
    assert base.decoder is not None
    count, per_token = raw.get("num_local_experts", 8), raw.get("num_experts_per_tok", 2)
    mlp, width = base.decoder.layers[0].mlp, raw.get("shared_intermediate_size", 0)
    shared = replace(mlp, intermediate_size=width) if width else None
    return with_experts(base, ExpertsConfig(count, per_token, mlp, renormalised=True, shared=shared))


_MOE = "block_sparse_moe"
_SHARED = ("shared_mlp.input_linear", "shared_mlp.output_linear")
_NAMES = ExpertNames(f"{_MOE}.router.layer", f"{_MOE}.experts", shared_fused=_SHARED)
_FUSED = (
    *_NAMES.fused(f"{_MOE}.input_linear.weight", f"{_MOE}.output_linear.weight", written=True),
    *_NAMES.fused(f"{_MOE}.experts.gate_up_proj", f"{_MOE}.experts.down_proj"),
)
_SPARSE = either_way(
    Family(
        moe,
        partial(llama.rules, experts=_NAMES),
        "model.",
        llama.DROPPED,
        fused=_FUSED,
        spelled={f"{_MOE}.router.weight": f"{_MOE}.router.layer.weight"},
    )
)
FAMILIES = {
    "granite": either_way(Family(config, llama.rules, "model.", llama.DROPPED)),
    "granitemoe": _SPARSE,
    "granitemoeshared": _SPARSE,
}
