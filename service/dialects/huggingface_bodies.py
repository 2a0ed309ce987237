"""Request bodies of text-generation-inference and text-embeddings-inference, all with `inputs` or `texts`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from service.dialects.common import (
    DialectBody,
    Extended,
    Ignored,
    Native,
    NotFilled,
    NotSupported,
    NotTrue,
    Refused,
    Schema,
    native_field,
)
from service.schemas.parameters import HUGGING_FACE, Parameters
from service.schemas.types import Prompt, Text, Texts


class Grammar(DialectBody):
    """Constrains the output."""

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
        None, description="Texts that end the output, and are part of it.", examples=[["\n"]]
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
    grammar: Grammar | None = Field(None, description="Constrains the output.")
    adapter_id: NotSupported = None


class HuggingFaceBody(Extended):
    """Adds what clients of hosted inference send with every task."""

    options: Annotated[Any, Ignored("models are loaded and results are kept as the service is set up")] = None


class TextGenerationBody(HuggingFaceBody):
    """Generate text, as text-generation-inference does."""

    inputs: Text = Field(description="The prompt.", examples=["def add(a, b):"])
    parameters: GenerateParameters | None = Field(None, description="Parameters of the generation.")
    stream: bool | None = Field(None, description="Answer as server-sent events.", examples=[False])


class Truncated(HuggingFaceBody):
    """Adds how inputs that are too long are read."""

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
    """Score texts against a query with a classifier of pairs, as text-embeddings-inference does."""

    query: Text = Field(description="The question.", examples=["What is Ray?"])
    texts: Texts = Field(description="The texts to rank.", examples=[["Ray is a framework.", "A ray of light."]])
    raw_scores: bool | None = Field(None, description="Logits instead of probabilities.", examples=[False])
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
    raw_scores: bool | None = Field(None, description="Logits instead of probabilities.", examples=[False])
    parameters: NotFilled = None
