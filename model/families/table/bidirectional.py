"""Decoders whose attention sees both directions: the same tensors as an encoder, which embeds and generates nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

from model.config.layer import LayerConfig
from model.config.model import ModelConfig
from model.families.table.raw_config import Settings
from model.families.table.rules import Family, Rule


def either_way(family: Family) -> Family:
    """Return a decoder's table that reads `is_causal` too, as `transformers` does: false makes it an encoder."""

    def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
        found = family.config(raw, names)
        if raw.get("is_causal", True) is not False or found.decoder is None:
            return found
        return as_encoder(replace(found, decoder=found.decoder.with_layers(see_one_more)))

    return replace(family, config=config, rules=encoder_rules(family.rules))


def as_encoder(config: ModelConfig) -> ModelConfig:
    """Return a decoder-only model as an encoder, whose windows are as wide on both sides."""
    assert config.decoder is not None
    return replace(config, encoder=replace(config.decoder, causal=False), decoder=None, head=None)


def encoder_rules(rules: Callable[[ModelConfig], Iterable[Rule]]) -> Callable[[ModelConfig], Iterable[Rule]]:
    """Return the rules of a decoder, for the parameters of an encoder where the model is one."""

    def either(config: ModelConfig) -> Iterator[Rule]:
        if config.encoder is None:
            yield from rules(config)
            return
        for rule in rules(replace(config, encoder=None, decoder=config.encoder)):
            own, rest = rule.target.partition(".")[::2]
            yield replace(rule, target=f"encoder.{rest}") if own == "decoder" else rule

    return either


def see_one_more(layer: LayerConfig) -> LayerConfig:
    """In both directions `transformers` counts a window without the token itself."""
    window = layer.attention.window
    return layer if window is None else replace(layer, mixer=replace(layer.attention, window=window + 1))
