"""Models of text and images, or sounds: their language models are served, and the pictures of those with a table.

The settings of the language model are config.json's `text_config`, and its tensors have a prefix of their own. The
rest of config.json is about images and sounds: `transformers` builds the language model from `text_config` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, Rule

# Keys of the whole that replace those of its text part.
_SHARED = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "architectures"),
    *("id2label", "num_labels", "problem_type"),
)
_PREFIXES = ("language_model.model.", "model.language_model.", "model.text_model.", "language_model.", "model.")
_DROPPED = (
    *("*vision_tower.*", "*vision_model.*", "*vision_encoder.*", "*visual.*", "*image_tower.*", "*video_tower.*"),
    *("*audio_tower.*", "*multi_modal_projector.*", "*connector.*", "*aligner.*", "*vision_projection.*"),
    *("*embed_vision.*", "*embed_audio.*", "*vision_embedder.*", "*visual_embeddings_table.*", "*image_newline"),
    *("*generation_aligner.*", "*generation_embeddings.*", "*generation_head.*", "*vqmodel.*", "*high_res_vision_*"),
)


# Types whose output is the token table where the text says so, though the whole denies it, as older files do.
_TIE_AS_THEIR_TEXT = {"fast_vlm", "llava", "llava_next_video", "llava_onevision"}
_TIE_AS_THEIR_TEXT |= {"qwen2_vl", "qwen2_5_vl"}


@dataclass(frozen=True, slots=True)
class PictureTable:
    """How the pictures of a whole are read: a language model that gets them, and the rules of their tensors."""

    config: Callable[[Settings, ModelConfig], ModelConfig]
    rules: Callable[[ModelConfig], Iterable[Rule]]
    mark: str  # a tensor that is stored where pictures can be read

    def fits(self, text: ModelConfig, names: Collection[str] | None) -> bool:
        """Whether a folder with these tensors has what reads pictures, for a model that generates."""
        return text.head is not None and (names is None or self.mark in names)


@dataclass(frozen=True, slots=True)
class Whole:
    """A `model_type` with a language model in it."""

    text: str  # the type of its language model where that does not say its own
    flat: bool = False  # older files have the settings of the language model next to the others
    scales: bool = False  # logits are scaled and bounded as those of the language model alone
    pictures: PictureTable | None = None  # None: pictures are not served

    def text_type(self, raw: Mapping[str, Any]) -> str:
        """Return the type of the language model; raises `ConfigError` where config.json has none."""
        text = raw.get("text_config")
        if text is None and self.flat:
            return self.text
        if not isinstance(text, dict):
            raise ConfigError(f"config.json of a {raw['model_type']} lacks 'text_config', found {text!r:.80}")
        return str(text.get("model_type") or self.text)

    def settings(self, raw: Settings, kind: str) -> Settings:
        """Return the settings of the language model, of the type `kind`; what a whole's class knows counts as read.

        Older files leave out what is as the class of that type has it.
        """
        raw.pass_over_known()
        if raw.get("text_config") is None:
            text = raw.as_type(kind)
        else:
            for key in raw["text_config"]:
                raw.get(key)  # the reference reads it there alone
            text = raw.part("text_config", raw["text_config"], kind)
            tied = _ties(raw, text)
            text = text.but(**{key: raw[key] for key in _SHARED if key in raw})
            if tied is not None:
                text = text.but(tie_word_embeddings=tied)
        return text.otherwise(**text.class_defaults())


def _ties(raw: Settings, text: Settings) -> Any:
    """Return whether the output is the token table: the whole says it, by its class (Mistral 3 ties, Mistral does not).

    None where neither does.
    """
    said = text.get("tie_word_embeddings", text.class_defaults().get("tie_word_embeddings"))
    if said and raw["model_type"] in _TIE_AS_THEIR_TEXT:
        return True
    whole = raw.get("tie_word_embeddings")
    return raw.class_defaults().get("tie_word_embeddings") if whole is None else whole


def text_part(whole: Whole, kind: str, family: Family) -> Family:
    """Return the table of a model whose language model is of the type `kind`, with the table `family`."""

    def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
        text = whole.settings(raw, kind)
        found = family.config(text, names)
        text.refuse_unread()
        if found.form != "decoder-only":
            encoder = f"an encoder ({kind!r}, or is_causal false)"
            raise ConfigError(f"text_config of a {raw['model_type']} is {encoder}; only decoders are served")
        head = found.head
        if head is not None and not whole.scales:
            head = replace(head, scale=1.0, softcap=None)
        found = replace(found, model_type=raw["model_type"], text_type=kind, head=head)
        if whole.pictures is None or not whole.pictures.fits(found, names):
            return found
        try:
            return whole.pictures.config(raw, found)
        except (ConfigError, KeyError) as error:  # its texts are served as those of a model without pictures
            why = f"config.json lacks {error}" if isinstance(error, KeyError) else str(error)
            return replace(found, unread_pictures=why)

    def rules(config: ModelConfig) -> Iterable[Rule]:
        yield from family.rules(replace(config, model_type=kind, text_type=None, pictures=None))
        if config.pictures is not None and whole.pictures is not None:
            yield from whole.pictures.rules(config)

    dropped, spelled = (*family.dropped, *_DROPPED), {**family.spelled, "vision_tower.vision_model.": "vision_tower."}
    return replace(family, config=config, rules=rules, prefix=_PREFIXES, dropped=dropped, spelled=spelled)


# -- Refuses architectures that use an encoder-decoder's parts for something else than it is served for.

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
