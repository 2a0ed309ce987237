"""Gemma 3's language model: five layers of windows to one of full attention, each kind with a rotary base of its own,
sandwich norms, norms of q and k (Kamath et al. 2025).

EmbeddingGemma has attention in both
directions, and windows on both sides (Schechter Vera et al. 2025).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from triptych.model.config.model import ModelConfig
from triptych.model.families import gemma, llama
from triptych.model.families.table.decoders import as_encoder, either_way
from triptych.model.families.table.helpers import ignore_unless, layers_by_type, query_scale
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rope import number, rotary, settings_by_type
from triptych.model.families.table.rules import Family

_PERIOD = 6  # every sixth layer has full attention


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    ignore_unless(raw, attn_logit_softcapping=None)
    both_ways, window = bool(raw.get("use_bidirectional_attention", False)), raw.get("sliding_window", 4096)
    ropes = _ropes(raw.otherwise(max_position_embeddings=131_072, num_key_value_heads=4))
    base = gemma.config(ropes["full_attention"], names, sandwich=True)
    assert base.decoder is not None
    layer = base.decoder.layers[0]
    full = replace(
        layer.attention,
        scale=query_scale(raw),
        qk_norm=base.decoder.final_norm,
    )
    position = rotary(ropes["sliding_attention"], full.head_dim)
    sliding = replace(full, window=window // 2 + 1 if both_ways else window, position=position)
    layers = {"sliding_attention": replace(layer, mixer=sliding), "full_attention": replace(layer, mixer=full)}
    period = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", _PERIOD))
    decoder = replace(base.decoder, layers=layers_by_type(raw, layers, base.decoder.num_layers, period))
    head = base.head and replace(base.head, softcap=raw.get("final_logit_softcapping"))
    found = replace(base, decoder=decoder, head=head)
    return as_encoder(found) if both_ways else found


def _ropes(raw: Settings) -> dict[str, Settings]:
    """Return the settings of each type of layer; old checkpoints have two bases, and scale full attention alone."""
    local = number(raw, "rope_local_base_freq", 10_000.0)
    return settings_by_type(
        raw,
        {
            "full_attention": raw.otherwise(rope_theta=1_000_000.0),
            "sliding_attention": raw.but(rope_scaling=None, rope_theta=local),
        },
    )


_RULES = partial(llama.rules, norms=gemma.SANDWICH_NORMS)
FAMILIES = {"gemma3_text": either_way(Family(config, _RULES, "model.", llama.DROPPED))}
