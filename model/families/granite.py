"""Granite: Llama with a multiplier for embeddings, scores, residual sums and logits (Granite team 2024)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from model.config.model import ModelConfig
from model.families import llama
from model.families.table.bidirectional import either_way
from model.families.table.decoders import with_attention, with_layers
from model.families.table.raw_config import Settings
from model.families.table.rules import Family


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    base = llama.config(raw, names, head_scale=1.0 / raw.get("logits_scaling", 1.0))
    base = with_attention(base, scale=float(raw.get("attention_multiplier", 1.0)))
    base = with_layers(base, residual_scale=float(raw.get("residual_multiplier", 1.0)))
    return replace(base, embedding=replace(base.embedding, scale=float(raw.get("embedding_multiplier", 1.0))))


FAMILIES = {"granite": either_way(Family(config, llama.rules, "model.", llama.DROPPED))}
