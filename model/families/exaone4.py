"""EXAONE 4: Llama with norms after the sublayers and of each query and key; where some layers have windows, the others
have no positions (LG AI Research 2025)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from triptych.model.config.layer import Norms
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError
from triptych.model.families import llama
from triptych.model.families.olmo import OUTPUT_NORMS
from triptych.model.families.table.decoders import either_way, with_attention, with_layers
from triptych.model.families.table.helpers import layers_by_type
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    base = llama.config(raw.otherwise(rms_norm_eps=1e-5), names)
    assert base.decoder is not None
    norm, count = base.decoder.final_norm, base.decoder.num_layers
    base = with_attention(with_layers(base, norms=(Norms(output=norm),) * 2), qk_norm=norm)
    assert base.decoder is not None
    layer, window = base.decoder.layers[0], raw.get("sliding_window", 4096)
    if window is None:
        layers_by_type(raw, {"full_attention": layer}, count, 1)
        raw.get("sliding_window_pattern")
        return base
    layers = {
        "sliding_attention": replace(layer, mixer=replace(layer.attention, window=window)),
        "full_attention": replace(layer, mixer=replace(layer.attention, position=None)),
    }
    return replace(base, decoder=replace(base.decoder, layers=layers_by_type(raw, layers, count, _period(raw))))


def _period(raw: Settings) -> int:
    """Return the period of layers with full attention; raises `ConfigError` for a pattern without `layer_types`."""
    pattern = raw.get("sliding_window_pattern", 4)
    if raw.get("layer_types") is None and not isinstance(pattern, int):
        raise ConfigError(f"sliding_window_pattern {pattern!r} is served with layer_types only")
    return pattern if isinstance(pattern, int) else 1


FAMILIES = {
    "exaone4": either_way(Family(config, partial(llama.rules, norms=OUTPUT_NORMS), "model.", llama.DROPPED)),
}
