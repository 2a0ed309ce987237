"""Hugging Face's tasks for encoder-decoders: translation, summarization and text2text-generation.

A reply is a list with an object for each output, which has the text under the name of the task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from model.text.cleanup import clean_up
from service.core.errors import invalid
from service.core.models import ServedModel
from service.dialects.common import native, native_seed
from service.dialects.text2text_bodies import (
    GenerationOptions,
    Text2TextBody,
    Text2TextParameters,
    TranslationBody,
    TranslationParameters,
)
from service.http.json_replies import DataEvents, Generation, Json
from service.planning.translation import Translation, translation
from service.schemas.bodies import GenerateBody
from service.schemas.parameters import TEXT2TEXT

AnyBody = Text2TextBody | TranslationBody
SUMMARY, TEXT, TRANSLATED = "summary_text", "generated_text", "translation_text"
_SAME = TEXT2TEXT.same
_OPTIONS = ("generate_parameters", "generate_kwargs")


class Options:
    """The options of a body with the place where they stand."""

    def __init__(self, body: AnyBody) -> None:
        """Raises a 400 for an option that stands in two places."""
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
        """Return the client's name of an option."""
        return f"{self._places.get(name, 'parameters')}.{name}"


def names_of(options: Options) -> Mapping[str, str]:
    """Return the client's names of native fields, for errors."""
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
    """Return what chooses the languages; raises a 400 that names `src_lang` or `tgt_lang`."""
    parameters = body.parameters
    if not isinstance(parameters, TranslationParameters):
        return translation(served, None, None)
    return translation(served, parameters.src_lang, parameters.tgt_lang)


def task_of(served: ServedModel, task: str) -> Translation:
    """Return the settings of a task that the folder has, such as the prefix of T5's summaries."""
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
    """Return how many tokens follow those that the decoder begins with; `transformers` counts a language as new."""
    new, whole = options.get(f"{bound}_new_tokens"), options.get(f"{bound}_length")
    if new is not None:
        return max(least, int(new) - (forced - 1))
    return None if whole is None else max(least, int(whole) - forced)


def _temperature(options: Options) -> float | None:
    """Return 0 for no sampling, None for what the folder says."""
    sampled = options.get("do_sample")
    if sampled is False:
        return 0.0
    if sampled is None and all(options.get(name) is None for name in TEXT2TEXT.drawing):
        return None
    return 1.0 if options.get("temperature") is None else float(options.get("temperature"))


class Text2Text(DataEvents):
    """Shows each output under the names of tasks."""

    def __init__(self, generation: Generation, options: Options, keys: Sequence[str]) -> None:
        self._clean = bool(options.parameters.clean_up_tokenization_spaces)
        self._keys = keys

    def events(self, event: Json) -> Iterable[Json]:
        """Return nothing: these tasks have no streams."""
        return ()

    def reply(self, reply: Json) -> object:
        texts = [clean_up(one["text"]) if self._clean else one["text"] for one in reply["choices"]]
        return [dict.fromkeys(self._keys, text) for text in texts]
