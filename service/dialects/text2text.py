"""Hugging Face's tasks for encoder-decoders: translation, summarization and text2text-generation.

A reply is a list with an object for each output; the name of its text depends on the task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from triptych.model.text.decoders import clean_up
from triptych.service.core.errors import invalid
from triptych.service.core.models import ServedModel
from triptych.service.dialects.common import DialectBody, Ignored, NotSupported, Refused, native, native_seed
from triptych.service.dialects.huggingface import HuggingFaceBody
from triptych.service.http.json_replies import DataEvents, Generation, Json
from triptych.service.planning.translation import Translation, translation
from triptych.service.schemas.bodies import GenerateBody
from triptych.service.schemas.parameters import TEXT2TEXT, Parameters
from triptych.service.schemas.types import TextOrTexts

# -- Request bodies of Hugging Face's tasks for encoder-decoders: translation, summarization and text2text-generation.


@TEXT2TEXT.body
class GenerationOptions(DialectBody, Parameters):
    """Settings of generation as `transformers` names them; the defaults are the checkpoint's."""

    max_new_tokens: int | None = Field(None, ge=1, description="Maximum tokens of the output.", examples=[64])
    max_length: int | None = Field(
        None, ge=2, description="The same, counting the decoder's start token; `max_new_tokens` wins.", examples=[65]
    )
    min_new_tokens: int | None = Field(None, ge=0, description="Minimum tokens of the output.", examples=[8])
    min_length: int | None = Field(
        None, ge=0, description="The same, counting the decoder's start token; `min_new_tokens` wins.", examples=[9]
    )
    do_sample: bool | None = Field(
        None, description="Whether to sample; default: if a field of sampling is given.", examples=[False]
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
    """Parameters of text2text-generation and summarization. Options of generation may be here or in a nested field."""

    generate_parameters: GenerationOptions | None = Field(None, description="Options of the generation.")
    generate_kwargs: GenerationOptions | None = Field(None, description="The same, by another name.")
    clean_up_tokenization_spaces: bool | None = Field(
        None, description="Remove spaces before punctuation; default: the tokenizer's setting.", examples=[True]
    )
    truncation: Literal[False, True, "do_not_truncate", "longest_first", "only_first"] | None = Field(
        None,
        description="Truncate an input that is too long at its end; default: refuse it.",
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
    """Turn texts into other texts, as InferenceClient does."""

    inputs: TextOrTexts = Field(description="A text, or several.", examples=["they paid twelve dollars fifty"])
    parameters: Text2TextParameters | None = Field(None, description="Parameters.")


class TranslationBody(HuggingFaceBody):
    """Translate texts, as InferenceClient does."""

    inputs: TextOrTexts = Field(description="A text, or several.", examples=["the third of march"])
    parameters: TranslationParameters | None = Field(None, description="Parameters.")


AnyBody = Text2TextBody | TranslationBody
SUMMARY, TEXT, TRANSLATED = "summary_text", "generated_text", "translation_text"
_SAME = TEXT2TEXT.same
_OPTIONS = ("generate_parameters", "generate_kwargs")


class Options:
    """The options of a body, with the place of each."""

    def __init__(self, body: AnyBody) -> None:
        """Raises a 400 for an option that is given in two places."""
        self.parameters = body.parameters or Text2TextParameters.model_validate({})
        self._places: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        for place, options in (
            ("parameters", self.parameters),
            *((f"parameters.{name}", getattr(self.parameters, name)) for name in _OPTIONS),
        ):
            self._add(place, options)

    def _add(self, place: str, options: GenerationOptions | None) -> None:
        given = {} if options is None else options.model_dump(include={*GenerationOptions.model_fields})
        for name, value in given.items():
            if value is None:
                continue
            if name in self._values:
                message = f"{place}.{name}: {self._places[name]}.{name} says the same; send one of them"
                raise invalid(message, f"{place}.{name}")
            self._places[name], self._values[name] = place, value

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def place(self, name: str) -> str:
        """Return the path of an option in the client's body."""
        return f"{self._places.get(name, 'parameters')}.{name}"


def names_of(options: Options) -> Mapping[str, str]:
    """Return the client's paths of native fields, for errors."""
    lengths = {
        native_name: options.place(next((one for one in ways if options.get(one) is not None), ways[0]))
        for native_name, ways in (
            ("max_tokens", ("max_new_tokens", "max_length")),
            ("min_tokens", ("min_new_tokens", "min_length")),
            ("n", ("num_return_sequences",)),
            ("timeout_s", ("max_time", "timeout_s")),
        )
        if native_name != "timeout_s" or options.get("max_time") is not None
    }
    return {
        "prompt": "inputs",
        "source_language": "parameters.src_lang",
        "target_language": "parameters.tgt_lang",
        **lengths,
        **{name: options.place(name) for name in _SAME},
    }


def languages_of(body: AnyBody, served: ServedModel) -> Translation:
    """Return the fields that choose the languages; raises a 400 that names `src_lang` or `tgt_lang`."""
    parameters = body.parameters
    if not isinstance(parameters, TranslationParameters):
        return translation(served, None, None)
    return translation(served, parameters.src_lang, parameters.tgt_lang)


def task_of(served: ServedModel, task: str) -> Translation:
    """Return the settings of a task of the checkpoint, such as the prefix of T5's summaries."""
    return Translation(task=task if task in served.checkpoint.tasks else None)


def generate(
    body: AnyBody, options: Options, served: ServedModel, chosen: Translation, texts: Sequence[str]
) -> GenerateBody:
    """Translate a body with its texts; raises `ApiError` with native field names."""
    if options.parameters.clean_up_tokenization_spaces is False and served.require_tokenizer("prompt").cleans_up:
        field = "parameters.clean_up_tokenization_spaces"
        raise invalid(f"{field}: the folder of model {served.name} says true, and false is not served", field)
    forced = 1 + (chosen.target_language is not None)  # tokens of the decoder before the output
    fields: dict[str, Any] = {name: options.get(name) for name in _SAME} | {
        "model": served.name,
        "prompt": [chosen.prefix + text for text in texts],
        "task": chosen.task,
        "source_language": chosen.source_language,
        "target_language": chosen.target_language,
        "max_tokens": _tokens(options, "max", forced, least=1),
        "min_tokens": _tokens(options, "min", forced, least=0),
        "temperature": _temperature(options),
        "seed": native_seed(options.get("seed")),
        "n": options.get("num_return_sequences"),
        "timeout_s": options.get("max_time") or body.timeout_s,
        "request_id": body.request_id,
    }
    return native(GenerateBody, fields)


def _tokens(options: Options, bound: str, forced: int, least: int) -> int | None:
    """Return the bound without the `forced` tokens of the decoder; `transformers` counts a language token as new."""
    new, whole = options.get(f"{bound}_new_tokens"), options.get(f"{bound}_length")
    if new is not None:
        return max(least, int(new) - (forced - 1))
    return None if whole is None else max(least, int(whole) - forced)


def _temperature(options: Options) -> float | None:
    """Return 0 for no sampling, None for the checkpoint's default."""
    sampled = options.get("do_sample")
    if sampled is False:
        return 0.0
    if sampled is None and all(options.get(name) is None for name in TEXT2TEXT.drawing):
        return None
    return 1.0 if options.get("temperature") is None else float(options.get("temperature"))


class Text2Text(DataEvents):
    """Renders each output as an object with its text under each of `keys`."""

    def __init__(self, generation: Generation, options: Options, keys: Sequence[str]) -> None:
        self._clean = bool(options.parameters.clean_up_tokenization_spaces)
        self._keys = keys

    def events(self, event: Json) -> Iterable[Json]:
        """Return nothing: these tasks have no streams."""
        return ()

    def reply(self, reply: Json) -> object:
        texts = [clean_up(one["text"]) if self._clean else one["text"] for one in reply["choices"]]
        return [dict.fromkeys(self._keys, text) for text in texts]
