"""Reads rotary settings from config.json: `rope_parameters`, or the older `rope_scaling` and `rope_theta`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from model.config.layer import RopeScaling, RotaryConfig
from model.errors import ConfigError
from model.families.table.helpers import refuse_unless
from model.families.table.raw_config import Settings

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"}
_KNOWN = {
    "default": _COMMON,
    "linear": _COMMON,
    "dynamic": _COMMON | {"original_max_position_embeddings"},
    "llama3": _COMMON | {"original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    # The context stands in Ministral 3's settings too.
    "yarn": _COMMON
    | {"llama_4_scaling_beta", "max_position_embeddings"}
    | {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
    | {"mscale", "mscale_all_dim", "truncate"},
    "proportional": _COMMON,
    "longrope": _COMMON | {"original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}
# Which dimensions turn by which of an image's three positions; in a text these are one and the same number.
_OF_IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")
_OLDER_LONGROPE = ("su", "yarn")  # what the first Phi-3 called it


def rotary(
    raw: Settings, head_dim: int, *, share: float = 1.0, theta: float = 10_000.0, interleaved: bool = False
) -> RotaryConfig:
    """Return the rotary settings of a raw config.json; by default `share` of a head's dimensions is rotated."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ConfigError(f"rope settings must be an object, found {scaling!r}")
    scaling = {key: value for key, value in scaling.items() if key not in _OF_IMAGE_POSITIONS}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = "default" if kind == "mrope" else kind
    kind = "longrope" if "long_factor" in scaling and kind in _OLDER_LONGROPE else kind
    if kind not in _KNOWN:
        raise ConfigError(f"rope type {kind!r} is not served; served are {', '.join(_KNOWN)}")
    unknown = sorted(scaling.keys() - _KNOWN[kind])
    if unknown:
        raise ConfigError(f"rope settings {', '.join(unknown)} are not known for rope type {kind!r}")
    top_level = raw.get("partial_rotary_factor")
    share = scaling.get("partial_rotary_factor") or top_level or share
    dim, theta = int(head_dim * share), float(scaling.get("rope_theta") or raw.get("rope_theta") or theta)
    if kind == "proportional":
        return _proportional(scaling, head_dim, share, theta)
    if kind == "default":
        return RotaryConfig(dim, theta, interleaved=interleaved)
    max_positions = raw["max_position_embeddings"]
    if kind == "longrope":
        return _longrope(raw, scaling, RotaryConfig(dim, theta, interleaved=interleaved), max_positions)
    original = scaling.get("original_max_position_embeddings") or max_positions
    factor = scaling.get("factor")
    if factor is None:
        raise ConfigError(f"rope type {kind!r} lacks its factor")
    return RotaryConfig(
        dim,
        theta,
        RopeScaling(kind),
        factor=float(factor),
        original_max_positions=max_positions if kind == "dynamic" else original,
        length=max_positions if kind == "dynamic" else 0,
        low_freq_factor=scaling.get("low_freq_factor", 1.0),
        high_freq_factor=scaling.get("high_freq_factor", 4.0),
        beta_fast=scaling.get("beta_fast") or 32.0,
        beta_slow=scaling.get("beta_slow") or 1.0,
        truncate=scaling.get("truncate", True),
        attention_factor=_attention_factor(scaling, float(factor)) if kind == "yarn" else 1.0,
        growth=float(scaling.get("llama_4_scaling_beta") or 0.0),
        interleaved=interleaved,
    )


def _proportional(scaling: Mapping[str, Any], head_dim: int, share: float, theta: float) -> RotaryConfig:
    """Return settings of which a share of pairs turns, at wavelengths and places of the whole head (Gemma 4)."""
    refuse_unless(scaling, factor=1.0)
    return RotaryConfig(head_dim, theta, turning=2 * int(share * head_dim // 2))


def _longrope(raw: Settings, scaling: Mapping[str, Any], plain: RotaryConfig, max_positions: int) -> RotaryConfig:
    """Return LongRoPE's settings; its temperature is `sqrt(1 + ln s / ln L)` for a context of L, stretched by s, unless
    it is set (Ding et al. 2024; the temperature is of Phi-3's code)."""
    # As in `transformers` the one outside of the rope settings comes first.
    original = raw.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    if not original:
        raise ConfigError("rope type 'longrope' needs original_max_position_embeddings")
    factor, temperature = scaling.get("factor") or max_positions / original, scaling.get("attention_factor")
    if temperature is None:
        temperature = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return replace(
        plain,
        scaling=RopeScaling.LONGROPE,
        factor=float(factor),
        original_max_positions=original,
        attention_factor=float(temperature),
        short_factors=tuple(map(float, scaling["short_factor"])),
        long_factors=tuple(map(float, scaling["long_factor"])),
    )


def settings_by_type(raw: Settings, older: Mapping[str, Settings]) -> dict[str, Settings]:
    """Return the settings with the rotary parameters of each type of layer, for `rotary`.

    `older` has the types, each with what a file without `rope_parameters` says of it. Raises `ConfigError` for others.
    """
    sets = raw.get("rope_parameters") or {}
    unknown = sorted(set(sets) - older.keys())
    if unknown:
        raise ConfigError(f"rope_parameters of types {', '.join(unknown)} are not served for {raw['model_type']!r}")
    return {kind: settings.but(rope_parameters=sets.get(kind)) for kind, settings in older.items()}


def _attention_factor(scaling: dict[str, Any], factor: float) -> float:
    """Return YaRN's temperature, `0.1 ln(factor) + 1` unless it is set (Peng et al. 2023, section 3.3)."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return temperature(scaling["mscale"]) / temperature(scaling["mscale_all_dim"])
    return temperature(1.0)
