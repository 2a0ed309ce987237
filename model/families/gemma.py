"""Gemma: Llama with scaled embeddings and norm weights stored minus 1 (Mesnard et al. 2024).

Gemma 2 has windows in every second layer, softcaps of scores and logits, sandwich norms (Riviere et al. 2024).
Gemma 3's language model has five layers of windows to one of full attention, each kind with a rotary base of its own,
and norms of q and k (Kamath et al. 2025). EmbeddingGemma sees both directions, with windows on both sides (Schechter
Vera et al. 2025).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from triptych.model.config.layer import Norms
from triptych.model.config.model import ModelConfig
from triptych.model.families import llama
from triptych.model.families.table.decoders import as_encoder, with_attention, with_layers, with_windows
from triptych.model.families.table.helpers import ignore_unless, query_scale, refuse_unless
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rope import number, rotary, settings_by_type

# The stored names of Gemma 2's and 3's norms before and after each sublayer.
SANDWICH_NORMS = {
    "input_layernorm": "attn_norms.pre",
    "post_attention_layernorm": "attn_norms.output",
    "pre_feedforward_layernorm": "mlp_norms.pre",
    "post_feedforward_layernorm": "mlp_norms.output",
}


_TANH = "gelu_pytorch_tanh"


def gemma(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    act = raw.get("hidden_act") or _TANH
    act = _TANH if act == "gelu" else act  # the first checkpoints call the approximation so, which is computed
    ignore_unless(raw, hidden_activation=act)
    return _gemma(raw, names, act)


def _sandwiched(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build what Gemma 2 and 3 have in common: the output of a sublayer is normalised too."""
    act = raw.get("hidden_activation") or _TANH
    ignore_unless(raw, hidden_act=act)
    base = _gemma(raw, names, act)
    norm = base.decoder_stack.final_norm
    return with_layers(base, norms=(Norms(pre=norm, output=norm),) * 2)


def _gemma(raw: Settings, names: Collection[str] | None, act: str) -> ModelConfig:
    """Build what all Gemmas have."""
    raw = raw.otherwise(max_position_embeddings=8192)
    base = llama.config(raw.but(hidden_act=act, head_dim=raw["head_dim"]), names)
    assert base.decoder_stack.final_norm is not None
    norm = replace(base.decoder_stack.final_norm, unit_offset=True)
    base = with_layers(base, norms=(Norms(pre=norm),) * 2)
    embedding = replace(base.embedding, scale=raw["hidden_size"] ** 0.5)
    return replace(base, embedding=embedding, decoder=replace(base.decoder_stack, final_norm=norm))


_GEMMA2_PERIOD = 2  # every second layer has full attention


def gemma2(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    # `transformers` sees both directions with flash attention alone.
    refuse_unless(raw, use_bidirectional_attention=False)
    base = _sandwiched(raw.otherwise(num_key_value_heads=4), names)
    base = with_attention(base, scale=query_scale(raw), softcap=raw.get("attn_logit_softcapping", 50.0))
    base = with_windows(base, raw, raw.get("sliding_window", 4096), _GEMMA2_PERIOD)
    softcap = raw.get("final_logit_softcapping", 30.0)
    return replace(base, head=base.head and replace(base.head, softcap=softcap))


_GEMMA3_PERIOD = 6  # every sixth layer has full attention


def gemma3(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    ignore_unless(raw, attn_logit_softcapping=None)
    both_ways, window = bool(raw.get("use_bidirectional_attention", False)), raw.get("sliding_window", 4096)
    ropes = _ropes(raw.otherwise(max_position_embeddings=131_072, num_key_value_heads=4))
    base = _sandwiched(ropes["full_attention"], names)
    sliding = {"position": rotary(ropes["sliding_attention"], base.decoder_stack.layers[0].attention.head_dim)}
    base = with_attention(base, scale=query_scale(raw), qk_norm=base.decoder_stack.final_norm)
    window = window // 2 + 1 if both_ways else window
    raw.get("_sliding_window_pattern")  # what `layer_types` were made of
    period = raw.get("sliding_window_pattern", _GEMMA3_PERIOD)
    found = with_windows(base, raw, window, period, sliding=sliding)
    softcap = raw.get("final_logit_softcapping")
    found = replace(found, head=found.head and replace(found.head, softcap=softcap))
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


_SANDWICH = partial(llama.rules, norms=SANDWICH_NORMS)
FAMILIES = {
    "gemma": llama.family(gemma),
    "gemma2": llama.family(gemma2, _SANDWICH),
    "gemma3_text": llama.family(gemma3, _SANDWICH),
}
