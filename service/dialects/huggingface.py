"""The APIs of Hugging Face's servers: text-generation-inference (TGI) and text-embeddings-inference (TEI).

TGI has `/`, `/generate` and `/generate_stream`, TEI has `/embed`, `/rerank` and `/predict`. The finish reasons are
`eos_token`, `stop_sequence` and `length`; a deadline or a cancellation is reported as `length`. As in TGI, the output
includes the stop text, and decoding is greedy unless a field requests sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from triptych.service.core.errors import ApiError, invalid, tgi_error_type
from triptych.service.core.models import ServedModel
from triptych.service.dialects.common import (
    DialectBody,
    Extended,
    Ignored,
    Native,
    NotFilled,
    NotSupported,
    NotTrue,
    Refused,
    Schema,
    fields_of,
    json_format,
    native,
    native_encode,
    native_field,
    native_seed,
)
from triptych.service.dialects.ranking import Judgement, RankingPlan
from triptych.service.http.json_replies import DataEvents, Generation, Json
from triptych.service.planning.encode import EncodePlan
from triptych.service.schemas.bodies import GenerateBody
from triptych.service.schemas.encode_bodies import EncodeBody
from triptych.service.schemas.parameters import HUGGING_FACE, Parameters
from triptych.service.schemas.types import Prompt, Text, Texts

# -- Request bodies of TGI and TEI.


class Grammar(DialectBody):
    """A constraint of the output."""

    type: Literal["json", "json_schema", "regex"] = Field(
        description="Type of `value`: a JSON schema, one wrapped as in OpenAI's API, or a regular expression.",
        examples=["regex"],
    )
    value: Schema = Field(
        description="The schema, as an object or as text, or the regular expression.", examples=["[0-9]{4}"]
    )


@HUGGING_FACE.body
class GenerateParameters(DialectBody, Parameters):
    """Parameters of the generation."""

    max_new_tokens: int | None = Field(
        None,
        description="`max_tokens` of /generate. Default: until the model ends or the context is full.",
        examples=[32],
    )
    do_sample: bool | None = Field(
        None, description="Sample even if no other sampling field is given; default: greedy.", examples=[False]
    )
    temperature: float | None = Field(None, gt=0, description="As in /generate, but never 0.", examples=[0.8])
    stop: list[Text] | None = Field(
        None, description="Texts that end the output; the output includes them.", examples=[["\n"]]
    )
    return_full_text: bool | None = Field(None, description="Put the inputs before the output.", examples=[False])
    details: bool | None = Field(None, description="Return details of the output's tokens.", examples=[True])
    decoder_input_details: bool | None = Field(
        None, description="With `details`: return details of the prompt's tokens.", examples=[False]
    )
    top_n_tokens: int | None = Field(
        None, description="With `details`: number of alternatives for each token.", examples=[2]
    )
    best_of: Annotated[Any, Refused(1)] = None
    truncate: NotSupported = None
    watermark: NotTrue = None
    grammar: Grammar | None = Field(None, description="A constraint of the output.")
    adapter_id: str | None = Field(
        None, min_length=1, description="A LoRA adapter, by its name; TGI's and LoRAX'.", examples=[None]
    )


class HuggingFaceBody(Extended):
    """The fields that clients of hosted inference send with every task."""

    options: Annotated[Any, Ignored("the service's settings decide about loading and caching")] = None


class TextGenerationBody(HuggingFaceBody):
    """Generate text, as text-generation-inference does."""

    inputs: Text = Field(description="The prompt.", examples=["def add(a, b):"])
    parameters: GenerateParameters | None = Field(None, description="Parameters of the generation.")
    adapter_id: str | None = Field(
        None, min_length=1, description="As `parameters.adapter_id`; text-generation-inference's.", examples=[None]
    )
    stream: bool | None = Field(None, description="Answer as server-sent events.", examples=[False])

    def adapter_named(self) -> tuple[str, str] | None:
        if self.adapter_id is not None:
            return "adapter_id", self.adapter_id
        given = None if self.parameters is None else self.parameters.adapter_id
        return None if given is None else ("parameters.adapter_id", given)


class Truncated(HuggingFaceBody):
    """The fields for truncating inputs that are too long."""

    truncate: bool | None = Field(
        None, description="Truncate an input that is too long; default: refuse it.", examples=[False]
    )
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = Field(
        None, description="Which end is truncated; default: right.", examples=["right"]
    )


class EmbedBody(Truncated):
    """Turn inputs into vectors, as text-embeddings-inference does."""

    inputs: Prompt = Field(description="Text, token ids, or several of either.", examples=["a cat", ["a cat", "a dog"]])
    normalize: bool | None = Field(None, description="Scale vectors to length 1; default: true.", examples=[True])
    dimensions: Annotated[int | None, Native()] = Field(
        None, description="Number of leading dimensions to keep.", examples=[128]
    )
    encoding_format: Annotated[Any, Refused("float")] = None
    prompt_name: str | None = native_field("", "query")
    parameters: NotFilled = None


class RerankBody(Truncated):
    """Score texts against a query, as text-embeddings-inference does."""

    query: Text = Field(description="The question.", examples=["What is Ray?"])
    texts: Texts = Field(description="The texts to rank.", examples=[["Ray is a framework.", "A ray of light."]])
    raw_scores: bool | None = Field(
        None, description="Return logits, not probabilities; a cosine stays.", examples=[False]
    )
    return_text: bool | None = Field(None, description="Repeat each text in the reply.", examples=[False])


Pair = Annotated[list[Text], Field(min_length=1, max_length=2)]


def _shape(value: Any) -> str:
    if not isinstance(value, list):
        return "<text>"
    return "<pairs>" if value and isinstance(value[0], list) else "<pair>"


PredictInput = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[Pair, Tag("<pair>")]
    | Annotated[list[Pair], Field(min_length=1, fail_fast=True), Tag("<pairs>")],
    Discriminator(_shape),
]


class PredictBody(Truncated):
    """Classify texts, as text-embeddings-inference does."""

    inputs: PredictInput = Field(
        description="A text, a pair of texts, or a list of lists of one or two.",
        examples=["a fine film", ["a question", "an answer"], [["one"], ["two"]]],
    )
    raw_scores: bool | None = Field(None, description="Return logits instead of probabilities.", examples=[False])
    parameters: NotFilled = None


GENERATE_NAMES = {
    **HUGGING_FACE.names,
    "prompt": "inputs",
    "prompt_logprobs": "parameters.top_n_tokens",
    "logprobs": "parameters.top_n_tokens",
    "response_format.json_schema.schema": "parameters.grammar.value",
    "regex": "parameters.grammar.value",
}
ENCODE_NAMES = {"input": "inputs"}


def generate(body: TextGenerationBody, *, stream: bool | None = None) -> GenerateBody:
    """Translate a body; `stream` overrides its field. Raises `ApiError` with native field names."""
    parameters = body.parameters or GenerateParameters.model_validate({})
    fields = fields_of(body) | HUGGING_FACE.fields(parameters)
    fields |= {
        "stop": parameters.stop,
        "prompt": body.inputs,
        "stream": body.stream if stream is None else stream,
        "max_tokens": parameters.max_new_tokens,
        "temperature": _temperature(parameters),
        "num_beams": 1,
        "seed": native_seed(parameters.seed),
        "include_stop": True,
        "return_token_ids": True,
        "logprobs": parameters.top_n_tokens or 0,
        **_structure(parameters.grammar),
    }
    if parameters.details and parameters.decoder_input_details:
        fields["prompt_logprobs"] = 0
    return native(GenerateBody, fields)


class TextGeneration(DataEvents):
    """Renders text generation: an event for each token; the last one has the whole text.

    `as_list`: the reply is a list with one entry, as at `/`.
    """

    done = b""

    def __init__(self, generation: Generation, body: TextGenerationBody, *, as_list: bool = False) -> None:
        self._plan = generation.plan
        self._parameters = body.parameters or GenerateParameters.model_validate({})
        self._prefix = body.inputs if self._parameters.return_full_text else ""
        self._as_list = as_list
        self._text = ""
        self._count = 0

    def events(self, event: Json) -> Iterable[Json]:
        [delta] = event["choices"]
        self._text += delta["text"]
        entries = delta.get("logprobs") or []
        for place, entry in enumerate(entries, start=1):
            last = place == len(entries)
            self._count += 1
            shown = self._token(entry) | {"text": delta["text"] if last else ""}
            ended = last and delta["finish_reason"] is not None
            yield self._event(shown, entry["top"], delta if ended else None)
        if not entries and delta["finish_reason"] is not None:
            nothing = {"id": 0, "text": delta["text"], "logprob": 0.0, "special": True}
            yield self._event(nothing, [], delta)

    def failed(self, error: ApiError) -> Iterable[Json]:
        return (error.body() | tgi_error_type(error),)

    def reply(self, reply: Json) -> object:
        [choice] = reply["choices"]
        found: Json = {"generated_text": self._prefix + choice["text"]}
        if self._parameters.details:
            found["details"] = self._details(choice)
        return [found] if self._as_list else found

    def _event(self, token: Json, top: Sequence[Json], ended: Json | None) -> Json:
        event: Json = {"index": self._count, "token": token}
        if self._parameters.top_n_tokens:
            event["top_tokens"] = [self._token(one) for one in top]
        event |= {"generated_text": None, "details": None}
        if ended is not None:
            event["generated_text"] = self._prefix + self._text
            event["details"] = self._ending(ended, self._count) | {"input_length": self._plan.prompt_tokens}
        return event

    def _details(self, choice: Json) -> Json:
        entries = choice.get("logprobs") or []
        details = self._ending(choice, len(entries))
        details |= {"prefill": self._prefill(choice), "tokens": [self._token(entry) for entry in entries]}
        if self._parameters.top_n_tokens:
            details["top_tokens"] = [[self._token(one) for one in entry["top"]] for entry in entries]
        return details

    def _ending(self, choice: Json, tokens: int) -> Json:
        params = self._plan.requests[0].params
        seed = params.seed if params.temperature else None
        return {"finish_reason": _finish(choice), "generated_tokens": tokens, "seed": seed}

    def _prefill(self, choice: Json) -> list[Json]:
        found = []
        request = self._plan.requests[0]
        for token_id, entry in zip(request.prompt_token_ids, choice.get("prompt_logprobs") or (), strict=False):
            logprob = entry and entry["logprob"]
            found.append({"id": token_id, "text": self._token_text(token_id), "logprob": logprob})
        return found

    def _token_text(self, token_id: int) -> str:
        tokenizer = self._plan.served.tokenizer
        return tokenizer.token_text(token_id) if tokenizer is not None else ""

    def _token(self, entry: Json) -> Json:
        special = self._is_special(entry["id"], entry["text"])
        return {"id": entry["id"], "text": entry["text"], "logprob": entry["logprob"], "special": special}

    def _is_special(self, token_id: int, text: str) -> bool:
        tokenizer = self._plan.served.tokenizer
        return bool(text) and tokenizer is not None and not tokenizer.decode([token_id])


def embed(body: EmbedBody) -> EncodeBody:
    """Translate an embedding body."""
    return native_encode(encode_fields(body) | {"normalize": body.normalize is not False}, body.inputs)


def embed_reply(plan: EncodePlan, reply: Json) -> object:
    """Return a list of vectors, even for a single input."""
    return [item["embedding"] for item in reply["data"]]


def rerank(body: RerankBody, served: ServedModel) -> RankingPlan:
    """Translate a reranking body: a classifier reads each text together with the query, another model embeds them.

    The reply has the texts by descending score.
    """
    judgement = Judgement(served, [body.query], body.texts)

    def show(plan: EncodePlan, reply: Json) -> object:
        scores = sorted(enumerate(judgement.scores(reply)), key=lambda one: -one[1])
        return [
            {"index": index, "score": score} | ({"text": body.texts[index]} if body.return_text else {})
            for index, score in scores
        ]

    native_body = judgement.body(encode_fields(body), output=_output(body))
    names = judgement.first_names(["query"]) | {"input": "texts"}
    return RankingPlan(native_body, show, judgement.uncounted, names)


def predict(body: PredictBody) -> EncodeBody:
    """Translate a classification body."""
    several = body.inputs if _is_batch(body) else [body.inputs]
    pairs = [[one] if isinstance(one, str) else one for one in several]
    inputs = [{"text": pair[0], "text_pair": pair[1] if len(pair) == 2 else None} for pair in pairs]
    return native(EncodeBody, encode_fields(body) | {"input": inputs, "output": _output(body)})


def predict_reply(body: PredictBody) -> Callable[[EncodePlan, Json], object]:
    """Return each input's classes by descending score; a single input has no outer list."""

    def show(plan: EncodePlan, reply: Json) -> object:
        found = [_classes(item["scores"], reply["labels"]) for item in reply["data"]]
        return found if _is_batch(body) else found[0]

    return show


def _output(body: RerankBody | PredictBody) -> str:
    return "logits" if body.raw_scores else "scores"


def _classes(scores: Sequence[float], labels: Sequence[str]) -> list[Json]:
    found = [{"score": score, "label": label} for score, label in zip(scores, labels, strict=True)]
    return sorted(found, key=lambda one: -float(one["score"]))


def _is_batch(body: PredictBody) -> bool:
    return not isinstance(body.inputs, str) and isinstance(body.inputs[0], list)


def encode_fields(body: Truncated) -> Json:
    """Return the native fields of all bodies that can truncate their inputs."""
    side = (body.truncation_direction or "right").lower()
    return fields_of(body) | {"truncate": side if body.truncate else None}


def _structure(grammar: Grammar | None) -> dict[str, Any]:
    """Return the native fields of the output constraint."""
    if grammar is None:
        return {}
    param, value = "parameters.grammar.value", grammar.value
    if grammar.type == "regex":
        if not isinstance(value, str):
            raise invalid(f"{param} must be a string", param)
        return {"regex": value}
    if grammar.type == "json_schema":
        wrapped = json_format(value, param)["json_schema"]["schema"]
        value = wrapped.get("schema")
        if not isinstance(value, dict):
            raise invalid(f"{param}.schema must be a JSON object", f"{param}.schema")
    return {"response_format": json_format(value, param)}


def _temperature(parameters: GenerateParameters) -> float | None:
    """Return 0 unless a field requests sampling; then the given temperature, or 1."""
    given = [getattr(parameters, name) for name in HUGGING_FACE.drawing]
    if not parameters.do_sample and all(one is None for one in given):
        return 0.0
    return 1.0 if parameters.temperature is None else parameters.temperature


def _finish(choice: Json) -> str:
    if choice["finish_reason"] != "stop":
        return "length"
    return "stop_sequence" if isinstance(choice.get("stop_reason"), str) else "eos_token"
