"""OLMo: Llama with LayerNorms that have no parameters; OLMo 2 and 3 with RMS norms after the sublayers, not before.

OLMo 1 is of Groeneveld et al. 2024. In 2 and 3 norms of all queries' and all keys' heads together are added.
OLMo 2 (OLMo team 2025) has full attention; in OLMo 3 three of four layers have a window, and only the others stretch
their rotary positions. OLMoE (Muennighoff et al. 2024) has experts, the same norms of heads, and Llama's of sublayers.
EXAONE 4 (LG AI Research 2025) normalises each head; where some layers have windows, the others have no positions.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from triptych.model.config.attention import NormConfig, NormKind, NormSpan
from triptych.model.config.layer import ExpertsConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError
from triptych.model.families import llama
from triptych.model.families.table.decoders import ExpertNames, with_attention, with_experts, with_layers, with_windows
from triptych.model.families.table.helpers import layers_by_type
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rope import rotary, settings_by_type

# The stored names of norms after the sublayers.
_OUTPUT_NORMS = {"post_attention_layernorm": "attn_norms.output", "post_feedforward_layernorm": "mlp_norms.output"}
_PERIOD = 4  # every fourth layer of OLMo 3 has full attention


def olmo(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build OLMo 1; some models bound queries, keys and values."""
    base = llama.config(raw, names, norm=NormConfig(NormKind.LAYER, 1e-5, bias=False, gain=False))
    return with_attention(base, clip=raw.get("clip_qkv"))


def olmo2(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    base = llama.config(raw.otherwise(rms_norm_eps=1e-5), names)
    norm = base.decoder_stack.final_norm
    base = with_layers(base, norms=(Norms(output=norm),) * 2)
    return with_attention(base, qk_norm=norm, qk_norm_span=NormSpan.ALL_HEADS)


def olmo3(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    sets = raw.get("rope_parameters") or {}
    if "rope_type" in sets:  # one set, as the older `rope_scaling` and `rope_theta` are
        theta = sets.get("rope_theta") or raw.get("rope_theta", 500_000.0)
        raw = raw.but(rope_parameters=None, rope_scaling=sets, rope_theta=theta)
    plain = raw.otherwise(rope_theta=500_000.0)
    ropes = settings_by_type(raw, {"full_attention": plain, "sliding_attention": plain.but(rope_scaling=None)})
    base = olmo2(ropes["full_attention"], names)
    position = rotary(ropes["sliding_attention"], base.decoder_stack.layers[0].attention.head_dim)
    return with_windows(base, raw, raw.get("sliding_window", 4096), _PERIOD, sliding={"position": position})


def olmoe(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(rms_norm_eps=1e-5, max_position_embeddings=4096)
    base = llama.config(raw, names)
    experts = ExpertsConfig(
        raw.get("num_experts", 64),
        raw.get("num_experts_per_tok", 8),
        base.decoder_stack.layers[0].mlp,
        renormalised=bool(raw.get("norm_topk_prob", False)),
    )
    base = with_attention(
        base, qk_norm=base.decoder_stack.final_norm, qk_norm_span=NormSpan.ALL_HEADS, clip=raw.get("clip_qkv")
    )
    return with_experts(base, experts)


def exaone4(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    base = with_attention(olmo2(raw, names), qk_norm_span=NormSpan.HEAD)
    window = raw.get("sliding_window", 4096)
    if window is None:
        layers_by_type(raw, {"full_attention": base.decoder_stack.layers[0]}, base.decoder_stack.num_layers, 1)
        raw.get("sliding_window_pattern")
        return base
    return with_windows(base, raw, window, _exaone_period(raw), full={"position": None})


def _exaone_period(raw: Settings) -> int:
    """Return the period of layers with full attention; raises `ConfigError` for a pattern without `layer_types`."""
    pattern = raw.get("sliding_window_pattern", 4)
    if raw.get("layer_types") is None and not isinstance(pattern, int):
        raise ConfigError(f"sliding_window_pattern {pattern!r} is served with layer_types only")
    return pattern if isinstance(pattern, int) else 1


_EXPERTS = ExpertNames()
_RULES = partial(llama.rules, norms=_OUTPUT_NORMS)
FAMILIES = {
    "olmo": llama.family(olmo),
    "olmo2": llama.family(olmo2, _RULES),
    "olmoe": llama.family(olmoe, partial(llama.rules, experts=_EXPERTS), fused=_EXPERTS.fused()),
    "olmo3": llama.family(olmo3, _RULES),
    "exaone4": llama.family(exaone4, _RULES),
}
