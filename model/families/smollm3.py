"""SmolLM3: Llama whose every fourth layer has no positions (Hugging Face 2025; Yang et al. 2025)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from triptych.model.config.layer import LayerConfig
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError
from triptych.model.families import llama
from triptych.model.families.table.decoders import either_way
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family

_KINDS = ("full_attention", "sliding_attention")


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(num_key_value_heads=4, max_position_embeddings=32_768, rope_theta=2_000_000.0)
    raw.get("max_window_layers")  # of Qwen
    base = llama.config(raw, names)
    assert base.decoder is not None
    count, plain = base.decoder.num_layers, base.decoder.layers[0]
    interval, window = raw.get("no_rope_layer_interval", 4), raw.get("sliding_window")
    turns = raw.get("no_rope_layers") or [(index + 1) % interval != 0 for index in range(count)]
    slides = raw.get("use_sliding_window", False) and window is not None
    kinds = raw.get("layer_types") or [_KINDS[bool(slides and not turn)] for turn in turns]
    if len(turns) < count or len(kinds) != count or set(kinds) - set(_KINDS):
        raise ConfigError(f"no_rope_layers and layer_types are not of {count} layers of full or sliding attention")
    found: dict[tuple[bool, bool], LayerConfig] = {}

    def layer(turn: bool, sliding: bool) -> LayerConfig:
        if (turn, sliding) not in found:
            position = plain.attention.position if turn else None
            mixer = replace(plain.attention, position=position, window=window if sliding else None)
            found[turn, sliding] = replace(plain, mixer=mixer)
        return found[turn, sliding]

    layers = tuple(layer(bool(turn), kind == _KINDS[1]) for turn, kind in zip(turns, kinds, strict=False))
    return replace(base, decoder=replace(base.decoder, layers=layers))


FAMILIES = {"smollm3": either_way(Family(config, llama.rules, "model.", llama.DROPPED))}
