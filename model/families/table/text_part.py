"""Models of images and text, of which the language model is served: its settings and tensors lie one level deeper."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from model.config.model import ModelConfig
from model.families.table.raw_config import Settings
from model.families.table.rules import Family

# What is said of images and sounds, and of where they stand in a text.
_OF_IMAGES = (
    *("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
    *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer"),
    *("audio_config", "eoa_token_index", "vision_soft_tokens_per_image"),
)
# What the whole says of the text too, which then holds.
_SHARED = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "architectures"),
    *("id2label", "num_labels", "problem_type"),
)
_DROPPED = (
    *("*vision_tower.*", "*audio_tower.*", "*multi_modal_projector.*"),
    *("*embed_vision.*", "*embed_audio.*", "*vision_embedder.*"),
)


def text_part(family: Family, text_type: str, **defaults: Any) -> Family:
    """Return the table of a model whose `text_config` is of `family`; `defaults` are of what that does not say.

    `text_type` is the `model_type` of the settings where they name none.
    """

    def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
        for unused in _OF_IMAGES:
            raw.get(unused)
        text = raw.part("text_config", raw["text_config"], text_type)
        text = text.otherwise(**defaults).but(**{key: raw[key] for key in _SHARED if key in raw})
        found = family.config(text, names)
        text.refuse_unread()
        return replace(found, model_type=raw["model_type"])

    prefixes = ("language_model.model.", "model.language_model.", "language_model.")
    return replace(family, config=config, prefix=prefixes, dropped=(*family.dropped, *_DROPPED))
