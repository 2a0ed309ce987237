"""What the tables of decoder-only families share: the model around a stack, and changes of its layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from model.config.layer import RotaryConfig
from model.config.model import EmbeddingConfig, ModelConfig, StackConfig
from model.families.table.classifiers import classifier
from model.families.table.helpers import decoder_head, ids
from model.families.table.raw_config import Settings


def decoder_model(
    raw: Settings,
    names: Collection[str] | None,
    decoder: StackConfig,
    max_positions: int | None,
    *,
    head: str = "lm_head.weight",
    head_bias: bool = False,
    head_scale: float = 1.0,
) -> ModelConfig:
    """Return the model of a decoder with a head for tokens, stored as `head`, or a classifier instead."""
    labels = classifier(raw, names)
    vocabulary = None if labels else decoder_head(raw, names, head)
    return ModelConfig(
        model_type=raw["model_type"],
        embedding=EmbeddingConfig(raw["vocab_size"], decoder.hidden_size),
        decoder=decoder,
        head=vocabulary and replace(vocabulary, bias=head_bias, scale=head_scale),
        classifier=labels,
        max_positions=max_positions,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=ids(raw.get("eos_token_id")),
        pad_token_id=raw.get("pad_token_id"),
    )


def with_layers(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Return a decoder-only model with fields of every layer changed."""
    assert config.decoder is not None
    return replace(config, decoder=config.decoder.with_layers(lambda layer: replace(layer, **changes)))


def with_attention(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Return a decoder-only model with fields of every layer's attention changed."""
    assert config.decoder is not None
    changed = config.decoder.with_layers(lambda layer: replace(layer, mixer=replace(layer.attention, **changes)))
    return replace(config, decoder=changed)


def turning_neighbours(config: ModelConfig) -> ModelConfig:
    """Return a decoder-only model whose rotary positions turn pairs of neighbours."""
    assert config.decoder is not None
    position = config.decoder.layers[0].attention.position
    assert isinstance(position, RotaryConfig)
    return with_attention(config, position=replace(position, interleaved=True))
