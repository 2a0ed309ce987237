"""Gemma: Llama with scaled embeddings and norm weights stored minus 1 (Mesnard et al. 2024)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from triptych.model.config.layer import Norms
from triptych.model.config.model import ModelConfig
from triptych.model.families import llama
from triptych.model.families.table.decoders import either_way
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family

# The stored names of Gemma 2's and 3's norms before and after each sublayer.
SANDWICH_NORMS = {
    "input_layernorm": "attn_norms.pre",
    "post_attention_layernorm": "attn_norms.output",
    "pre_feedforward_layernorm": "mlp_norms.pre",
    "post_feedforward_layernorm": "mlp_norms.output",
}


def config(raw: Settings, names: Collection[str] | None, *, sandwich: bool = False) -> ModelConfig:
    """What all Gemmas have; with `sandwich` the output of a sublayer is normalised too (Gemma 2 and 3)."""
    raw = raw.otherwise(max_position_embeddings=8192)
    act = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
    # The first checkpoints have "gelu" for the tanh approximation, which `transformers` uses too.
    act = "gelu_pytorch_tanh" if act == "gelu" else act
    base = llama.config(raw.but(hidden_act=act, head_dim=raw["head_dim"]), names)
    assert base.decoder is not None and base.decoder.final_norm is not None
    norm = replace(base.decoder.final_norm, unit_offset=True)
    norms = Norms(pre=norm, output=norm if sandwich else None)
    decoder = base.decoder.with_layers(lambda layer: replace(layer, norms=(norms, norms)))
    embedding = replace(base.embedding, scale=raw["hidden_size"] ** 0.5)
    return replace(base, embedding=embedding, decoder=replace(decoder, final_norm=norm))


FAMILIES = {"gemma": either_way(Family(config, llama.rules, "model.", llama.DROPPED))}
