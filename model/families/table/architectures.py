"""Refuses architectures that use an encoder-decoder's parts for something else than it is served for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from model.config.model import ModelConfig
from model.errors import ConfigError

_HEADS = (
    *("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"),
    "ForAudioClassification",
)


def check_architecture(raw: Mapping[str, Any], config: ModelConfig, names: Collection[str] | None) -> None:
    """Raise `ConfigError` for a head that is not served, and for a decoder whose encoder is not stored."""
    architecture = str((raw.get("architectures") or [""])[0])
    if config.encoder is None or config.decoder is None or config.classifier is not None:
        return
    what = ""
    if architecture.endswith(_HEADS):
        what = "its head is"
    elif architecture.endswith("ForCausalLM") and names is not None and not any("encoder." in one for one in names):
        what = "a decoder without its encoder is"
    if what:
        whole = architecture.partition("For")[0] + "ForConditionalGeneration"
        raise ConfigError(
            f"config.json: architectures is {architecture}: {what} not served; served is the whole encoder-decoder, "
            f"as {whole} or its like saves it"
        )
