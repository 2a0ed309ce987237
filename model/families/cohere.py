"""Cohere's Command R: attention and MLP in parallel after one norm without a bias, rotary positions of neighbours,
scaled logits (Cohere 2024).

Command R+ has norms of queries and keys, with gains of each head. Of Command R7B and A (cohere2) three of four layers
have a window, and the others no positions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from triptych.model.config.attention import NormConfig, NormKind, NormSpan
from triptych.model.config.layer import Norms
from triptych.model.config.model import ModelConfig
from triptych.model.families import llama
from triptych.model.families.table.decoders import either_way, turning_neighbours, with_attention, with_layers
from triptych.model.families.table.helpers import layers_by_type, refuse_unless
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family

_PERIOD = 4  # every fourth layer of cohere2 has full attention


def cohere(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(max_position_embeddings=8192, rope_theta=500_000.0)
    return _parallel(raw, names, qk_norm=bool(raw.get("use_qk_norm", False)))


def _parallel(raw: Settings, names: Collection[str] | None, *, qk_norm: bool) -> ModelConfig:
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", 1e-5), bias=False)
    base = llama.config(raw, names, norm=norm, head_scale=raw.get("logit_scale", 0.0625))
    base = turning_neighbours(base)
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
    assert base.decoder is not None
    layer = base.decoder.layers[0]
    layers = {
        "sliding_attention": replace(layer, mixer=replace(layer.attention, window=raw.get("sliding_window", 4096))),
        "full_attention": replace(layer, mixer=replace(layer.attention, position=None)),
    }
    period = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", _PERIOD))
    return replace(
        base, decoder=replace(base.decoder, layers=layers_by_type(raw, layers, base.decoder.num_layers, period))
    )


_RULES = partial(llama.rules, norms={"input_layernorm": "attn_norms.pre"})
FAMILIES = {
    "cohere": either_way(Family(cohere, _RULES, "model.", llama.DROPPED)),
    "cohere2": either_way(Family(cohere2, _RULES, "model.", llama.DROPPED)),
}
