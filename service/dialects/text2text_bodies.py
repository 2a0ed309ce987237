"""Request bodies of Hugging Face's tasks for encoder-decoders: translation, summarization and text2text-generation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from service.dialects.common import DialectBody, Ignored, NotSupported, Refused
from service.dialects.huggingface_bodies import HuggingFaceBody
from service.schemas.parameters import TEXT2TEXT, Parameters
from service.schemas.types import TextOrTexts


@TEXT2TEXT.body
class GenerationOptions(DialectBody, Parameters):
    """Settings of generation as `transformers` names them; the defaults are the checkpoint's."""

    max_new_tokens: int | None = Field(None, ge=1, description="Maximum tokens of the output.", examples=[64])
    max_length: int | None = Field(
        None, ge=2, description="The same with the decoder's start token counted; `max_new_tokens` wins.", examples=[65]
    )
    min_new_tokens: int | None = Field(None, ge=0, description="Minimum tokens of the output.", examples=[8])
    min_length: int | None = Field(
        None, ge=0, description="The same with the decoder's start token counted; `min_new_tokens` wins.", examples=[9]
    )
    do_sample: bool | None = Field(
        None, description="Sample, or not; default: if a field of sampling is given.", examples=[False]
    )
    temperature: float | None = Field(None, gt=0, description="As in /generate, but never 0.", examples=[0.8])
    early_stopping: Literal[True, False, "never"] | None = Field(None, description="As in /generate.", examples=[True])
    num_return_sequences: int | None = Field(None, ge=1, description="`n` of /generate.", examples=[1])
    max_time: float | None = Field(
        None, gt=0, description="Seconds after which the output ends; `timeout_s` of /generate.", examples=[5.0]
    )
    num_beam_groups: Annotated[Any, Refused(1)] = None
    diversity_penalty: Annotated[Any, Refused(0, 0.0)] = None
    encoder_no_repeat_ngram_size: Annotated[Any, Refused(0)] = None
    encoder_repetition_penalty: Annotated[Any, Refused(1, 1.0)] = None
    epsilon_cutoff: Annotated[Any, Refused(0, 0.0)] = None
    eta_cutoff: Annotated[Any, Refused(0, 0.0)] = None
    penalty_alpha: NotSupported = None
    bad_words_ids: NotSupported = None
    forced_bos_token_id: Annotated[Any, Refused(instead="tgt_lang")] = None
    use_cache: Annotated[Any, Ignored("the KV cache is always used, and changes no output")] = None


class Text2TextParameters(GenerationOptions):
    """Parameters of text2text-generation and summarization. Options of generation may stand here or within."""

    generate_parameters: GenerationOptions | None = Field(None, description="Options of the generation.")
    generate_kwargs: GenerationOptions | None = Field(None, description="The same, by another name.")
    clean_up_tokenization_spaces: bool | None = Field(
        None, description="Remove spaces before punctuation; default: as the tokenizer's settings say.", examples=[True]
    )
    truncation: Literal[False, True, "do_not_truncate", "longest_first", "only_first"] | None = Field(
        None,
        description="Cut an input that is too long at its end; default: refuse it.",
        examples=["only_first"],
    )


class TranslationParameters(Text2TextParameters):
    """Parameters of translation."""

    src_lang: str | None = Field(
        None, min_length=1, max_length=64, description="The inputs' language, as the model names it.", examples=["en"]
    )
    tgt_lang: str | None = Field(
        None, min_length=1, max_length=64, description="The output's language, as the model names it.", examples=["de"]
    )


class Text2TextBody(HuggingFaceBody):
    """Turn texts into others, as InferenceClient asks for it."""

    inputs: TextOrTexts = Field(description="A text, or several.", examples=["they paid twelve dollars fifty"])
    parameters: Text2TextParameters | None = Field(None, description="Parameters.")


class TranslationBody(HuggingFaceBody):
    """Translate texts, as InferenceClient asks for it."""

    inputs: TextOrTexts = Field(description="A text, or several.", examples=["the third of march"])
    parameters: TranslationParameters | None = Field(None, description="Parameters.")
