"""Mixtral (Jiang et al. 2024): Mistral with eight experts in each layer, two for each token."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from triptych.model.config.layer import ExpertsConfig
from triptych.model.config.model import ModelConfig
from triptych.model.families import llama
from triptych.model.families.table.decoders import ExpertNames, either_way, with_attention, with_experts
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family

_MOE = "block_sparse_moe"
NAMES = ExpertNames(f"{_MOE}.gate", f"{_MOE}.experts", ("w1", "w3", "w2"))


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(max_position_embeddings=131_072, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6)
    base = with_attention(llama.config(raw, names), window=raw.get("sliding_window"))
    assert base.decoder is not None
    count, per_token = raw.get("num_local_experts", 8), raw.get("num_experts_per_tok", 2)
    return with_experts(base, ExpertsConfig(count, per_token, base.decoder.layers[0].mlp, renormalised=True))


_RULES = partial(llama.rules, experts=NAMES)
FAMILIES = {
    "mixtral": either_way(
        Family(config, _RULES, "model.", llama.DROPPED, fused=NAMES.fused(), spelled={".mlp.": f".{_MOE}."})
    )
}
