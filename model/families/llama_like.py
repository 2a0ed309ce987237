"""Llama with other biases or a plain MLP: Seed-OSS (ByteDance 2025), AFM (Arcee 2025) and Nemotron (NVIDIA 2024).

AFM and Nemotron have one projection up and a squared ReLU instead of a gate. Nemotron's norms are LayerNorms whose
gains are stored as their distance from 1, and half of each head's dimensions turn.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from model.config.layer import NormConfig, NormKind
from model.config.model import ModelConfig
from model.families import llama
from model.families.table.bidirectional import either_way
from model.families.table.decoders import with_attention, with_layers
from model.families.table.raw_config import Settings
from model.families.table.rules import Family


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


def _ungated(base: ModelConfig) -> ModelConfig:
    """Return the model with one projection up in every layer."""
    assert base.decoder is not None
    return with_layers(base, feed_forward=replace(base.decoder.layers[0].mlp, gated=False))


FAMILIES = {
    "seed_oss": either_way(Family(seed_oss, llama.rules, "model.", llama.DROPPED)),
    "arcee": either_way(Family(arcee, llama.rules, "model.", llama.DROPPED)),
    "nemotron": either_way(Family(nemotron, llama.rules, "model.", llama.DROPPED)),
}
