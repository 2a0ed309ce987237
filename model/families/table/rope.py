"""Reads rotary settings from config.json: `rope_parameters`, or the older `rope_scaling` and `rope_theta`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from triptych.model.config.attention import RopeScaling, RotaryConfig
from triptych.model.config.bounds import MOST
from triptych.model.errors import ConfigError, listed, shown
from triptych.model.families.table.raw_config import Settings

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# The settings that the library computes with, by type; it warns of others.
_KNOWN = {
    "default": _COMMON,
    "linear": _COMMON | {"factor"},
    "dynamic": _COMMON | {"factor"},
    "llama3": _COMMON | {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": _COMMON
    | {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
    | {"mscale", "mscale_all_dim", "truncate"},
    "proportional": _COMMON | {"factor"},
    "longrope": _COMMON
    | {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}
# Passed over without a word: published files have them, of contexts that stand elsewhere too, and of images.
_PASSED_OVER = {"max_position_embeddings", "original_max_position_embeddings", "mrope_section", "mrope_interleaved"}
_OLDER_LONGROPE = ("su", "yarn")  # what the first Phi-3 called it


def rotary(
    raw: Settings,
    head_dim: int,
    *,
    share: float = 1.0,
    theta: float = 10_000.0,
    interleaved: bool = False,
    partial: bool = False,
    growing: bool = False,
) -> RotaryConfig:
    """Return the rotary settings of a raw config.json; by default `share` of a head's dimensions is rotated.

    `partial`: the family's model reads which share that is. `growing`: it reads `llama_4_scaling_beta`.
    """
    scaling, kind = _settings(raw, growing)
    share = _share(raw, scaling, kind, share, partial=partial)
    base = number(scaling, "rope_theta", number(raw, "rope_theta", theta))
    if kind == "proportional":
        return _proportional(raw, scaling, RotaryConfig(head_dim, base, rotated=2 * int(share * head_dim // 2)))
    plain = RotaryConfig(int(head_dim * share), base, interleaved=interleaved)
    growth = number(scaling, "llama_4_scaling_beta", 0.0) if growing else 0.0
    if kind == "default":
        return replace(plain, growth=growth, original_max_positions=_original(raw, scaling, 0)) if growth else plain
    max_positions = raw["max_position_embeddings"]
    original = _original(raw, scaling, max_positions)
    if kind == "longrope":
        return _longrope(scaling, plain, max_positions, original)
    if (kind != "yarn" and scaling.get("factor") is None) or "factor" not in scaling:
        raise ConfigError(f"rope type {kind!r} lacks its factor")
    factor = number(scaling, "factor", max_positions / original)
    return replace(
        plain,
        scaling=RopeScaling(kind),
        factor=factor,
        original_max_positions=max_positions if kind in ("dynamic", "linear") else original,
        length=max_positions if kind == "dynamic" else 0,
        low_freq_factor=number(scaling, "low_freq_factor", 1.0),
        high_freq_factor=number(scaling, "high_freq_factor", 4.0),
        beta_fast=number(scaling, "beta_fast", 0.0) or 32.0,
        beta_slow=number(scaling, "beta_slow", 0.0) or 1.0,
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        growth=growth,
    )


def _settings(raw: Settings, growing: bool) -> tuple[dict[str, Any], str]:
    """Return the settings and their type; notes those that are not used."""
    older, newer = raw.get("rope_scaling"), raw.get("rope_parameters")
    scaling = older or newer or {}
    if not isinstance(scaling, dict):
        raise ConfigError(f"rope settings must be an object, found {shown(scaling)}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = "default" if kind == "mrope" else kind  # positions of a text are one and the same
    if growing and scaling.get("llama_4_scaling_beta") and kind not in ("yarn", "default"):
        raise ConfigError(f"llama_4_scaling_beta is served with rope types 'yarn' and 'default', found {shown(kind)}")
    kind = "longrope" if "long_factor" in scaling and kind in _OLDER_LONGROPE else kind
    if not isinstance(kind, str) or kind not in _KNOWN:
        raise ConfigError(f"rope type {shown(kind)} is not served; served are {', '.join(_KNOWN)}")
    known = (
        _KNOWN[kind]
        | _PASSED_OVER
        | ({"llama_4_scaling_beta", "original_max_position_embeddings"} if growing else set())
    )
    for key in sorted(scaling.keys() - known):
        raw.ignore(f"{'rope_scaling' if older else 'rope_parameters'}.{key}", scaling[key])
    return scaling, kind


def _share(raw: Settings, scaling: Mapping[str, Any], kind: str, share: float, *, partial: bool) -> float:
    """Return which share of a head's dimensions turns.

    A model that does not read it turns whole heads; where its positions are stretched too, the library fails.
    """
    found = number(scaling, "partial_rotary_factor", number(raw, "partial_rotary_factor", share))
    if not 0 < found <= 1:
        raise ConfigError(f"partial_rotary_factor must be above 0 and at most 1, found {found}")
    if partial or found == 1 or kind == "proportional" or not raw.follows_class:
        return found
    if kind != "default":
        raise ConfigError(f"partial_rotary_factor = {found} is not served with rope type {kind!r} here")
    raw.ignore("partial_rotary_factor", found)
    return share


def _original(raw: Settings, scaling: Mapping[str, Any], max_positions: int) -> int | float:
    """Return the context before stretching; as in `transformers` the one outside of the rope settings comes first."""
    key = "original_max_position_embeddings"
    found = raw.get(key) or scaling.get(key) or max_positions
    if isinstance(found, bool) or not isinstance(found, int | float) or not 1 <= found <= MOST:
        raise ConfigError(f"{key} must be a number from 1 to {MOST}, found {shown(found)}")
    return found


def number(settings: Mapping[str, Any], key: str, default: float) -> float:
    """Return a number of the settings; `default` where it is absent or null."""
    value = settings.get(key)
    if value is None:
        return float(default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{key} must be a number, found {shown(value)}")
    return float(value)


def _proportional(raw: Settings, scaling: Mapping[str, Any], plain: RotaryConfig) -> RotaryConfig:
    """Return settings that rotate a share of the pairs, with the whole head's wavelengths and places (Gemma 4)."""
    if (factor := number(scaling, "factor", 1.0)) == 1.0:
        return plain
    longest = raw["max_position_embeddings"]
    return replace(plain, scaling=RopeScaling.LINEAR, factor=factor, original_max_positions=longest)


def _longrope(scaling: Mapping[str, Any], plain: RotaryConfig, max_positions: int, original: float) -> RotaryConfig:
    """Return LongRoPE's settings; its temperature is `sqrt(1 + ln s / ln L)` for a context of L, stretched by s, unless
    it is set (Ding et al. 2024; the temperature is of Phi-3's code)."""
    factor = number(scaling, "factor", max_positions / original)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return replace(
        plain,
        scaling=RopeScaling.LONGROPE,
        factor=factor,
        original_max_positions=original,
        attention_factor=number(scaling, "attention_factor", usual),
        short_factors=tuple(map(float, scaling["short_factor"])),
        long_factors=tuple(map(float, scaling["long_factor"])),
    )


def with_default_rope(raw: Settings, parameters: Mapping[str, Any]) -> Settings:
    """Return the settings with a class's own rotary parameters, where a file has none; `{}` is one that has."""
    if raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
        return raw.but(rope_parameters=parameters)
    return raw


def settings_by_type(raw: Settings, older: Mapping[str, Settings]) -> dict[str, Settings]:
    """Return the settings with the rotary parameters of each type of layer, for `rotary`.

    `older` has the types, each with what a file without `rope_parameters` says of it. A `rope_scaling` that stands
    there counts over the type's `rope_parameters`. As in `transformers` two settings have no effect: `truncate`, which
    it looks for outside of the type's object, and `original_max_position_embeddings` outside of it. Raises
    `ConfigError` for other types.
    """
    sets = raw.get("rope_parameters") or {}
    unknown = sorted(set(sets) - older.keys())
    if unknown:
        raise ConfigError(
            f"rope_parameters of a {raw['model_type']} must have an object for each type of its layers "
            f"({', '.join(older)}), found {listed(unknown)}"
        )
    found = {}
    for kind, settings in older.items():
        own, scaling = sets.get(kind), settings.get("rope_scaling")
        if own and isinstance(own, dict) and isinstance(scaling, dict):
            own = {**own, **scaling}
        own, scaling = _without_truncate(raw, own), _without_truncate(raw, scaling)
        scaling = None if own else scaling
        found[kind] = settings.but(rope_parameters=own, rope_scaling=scaling, original_max_position_embeddings=None)
    return found


def _without_truncate(raw: Settings, scaling: object) -> object:
    """Return settings of a type of layers without `truncate`, which is noted as ignored where it says something."""
    if not isinstance(scaling, dict) or "truncate" not in scaling:
        return scaling
    if not scaling["truncate"]:
        raw.ignore("rope_parameters.truncate", scaling["truncate"])
    return {key: value for key, value in scaling.items() if key != "truncate"}


def _attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """Return YaRN's temperature, `0.1 ln(factor) + 1` unless it is set (Peng et al. 2023, section 3.3)."""

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    usual, (scale, whole) = temperature(1.0), (number(scaling, key, 0.0) for key in ("mscale", "mscale_all_dim"))
    if scale and whole:
        usual = temperature(scale) / temperature(whole)
    return number(scaling, "attention_factor", usual)
