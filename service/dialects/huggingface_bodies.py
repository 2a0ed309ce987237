"""Request bodies of text-generation-inference and text-embeddings-inference: all have `inputs` or `texts`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from service.dialects.common import DialectBody, Extended, Never, NotFilled, NotTrue, Refused, Schema
from service.schemas.types import Prompt, Text, Texts


class Grammar(DialectBody):
    """What the output must match."""

    type: Literal["json", "json_schema", "regex"] = Field(
        description="Of `value`: a JSON schema, one as OpenAI wraps it, or a pattern.", examples=["regex"]
    )
    value: Schema = Field(description="The schema, as an object or its text, or the pattern.", examples=["[0-9]{4}"])


class GenerateParameters(DialectBody):
    """How to generate."""

    max_new_tokens: int | None = Field(None, description="`max_tokens` of /generate.", examples=[32])
    do_sample: bool | None = Field(
        None, description="Sample, even if no other field says how; else greedy.", examples=[False]
    )
    temperature: float | None = Field(None, gt=0, description="As in /generate, but never 0.", examples=[0.8])
    top_k: int | None = Field(None, description="As in /generate.", examples=[40])
    top_p: float | None = Field(None, description="As in /generate.", examples=[0.95])
    typical_p: float | None = Field(None, description="As in /generate.", examples=[0.9])
    repetition_penalty: float | None = Field(None, description="As in /generate.", examples=[1.1])
    frequency_penalty: float | None = Field(None, description="As in /generate.", examples=[0.0])
    seed: int | None = Field(None, description="As in /generate.", examples=[7])
    stop: list[Text] | None = Field(None, description="Texts that end the output, which keeps them.", examples=[["\n"]])
    return_full_text: bool | None = Field(None, description="Put the inputs before the output.", examples=[False])
    details: bool | None = Field(None, description="Say more about the output's tokens.", examples=[True])
    decoder_input_details: bool | None = Field(
        None, description="With `details`: say more about the prompt's tokens.", examples=[False]
    )
    top_n_tokens: int | None = Field(None, description="With `details`: so many alternatives.", examples=[2])
    best_of: Annotated[Any, Refused(1)] = None
    truncate: Never = None
    watermark: NotTrue = None
    grammar: Grammar | None = Field(None, description="What the output must match.")
    adapter_id: Never = None


class TextGenerationBody(Extended):
    """Generate text, as text-generation-inference does."""

    inputs: Text = Field(description="The prompt.", examples=["def add(a, b):"])
    parameters: GenerateParameters | None = Field(None, description="How to generate.")
    stream: bool | None = Field(None, description="Answer as server-sent events.", examples=[False])


class _Truncated(Extended):
    truncate: bool | None = Field(
        None, description="Cut an input that is too long; otherwise it is refused.", examples=[False]
    )
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = Field(
        None, description="Which end is cut; right unless told.", examples=["right"]
    )


class EmbedBody(_Truncated):
    """Turn inputs into vectors, as text-embeddings-inference does."""

    inputs: Prompt = Field(description="Text, token ids, or several of either.", examples=["a cat", ["a cat", "a dog"]])
    normalize: bool | None = Field(None, description="Scale to length 1; true unless told.", examples=[True])
    dimensions: int | None = Field(None, description="Keep only so many leading dimensions.", examples=[128])
    encoding_format: Annotated[Any, Refused("float")] = None
    prompt_name: Never = None
    parameters: NotFilled = None


class RerankBody(_Truncated):
    """Score texts against a query with a classifier of pairs, as text-embeddings-inference does."""

    query: Text = Field(description="The question.", examples=["What is Ray?"])
    texts: Texts = Field(description="What may answer it.", examples=[["Ray is a framework.", "A ray of light."]])
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


class PredictBody(_Truncated):
    """Classify texts, as text-embeddings-inference does."""

    inputs: PredictInput = Field(
        description="A text, a pair of texts, or a list of lists of one or two.",
        examples=["a fine film", ["a question", "an answer"], [["one"], ["two"]]],
    )
    raw_scores: bool | None = Field(None, description="Logits instead of probabilities.", examples=[False])
    parameters: NotFilled = None
