"""Hugging Face's tasks other than generation, as `InferenceClient` sends them, and similar routes of TEI."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, cast

import numpy as np
from pydantic import Field

from triptych.service.dialects.common import DialectBody, Native, NotSupported, fields_of, native, native_field
from triptych.service.dialects.huggingface import HuggingFaceBody, Truncated, encode_fields
from triptych.service.http.json_replies import Json
from triptych.service.planning.encode import EncodePlan
from triptych.service.schemas.encode_bodies import EncodeBody
from triptych.service.schemas.types import PIXEL, Prompt, Text, TextOrTexts, Texts

# -- Request bodies of Hugging Face's tasks (`inputs`, and `parameters` of each task), and of TEI's routes.

INPUT = Native("input")


class EmbedAllBody(Truncated):
    """Turn inputs into a vector for each token, as text-embeddings-inference does."""

    inputs: Annotated[Prompt, INPUT] = Field(
        description="Text, token ids, or several of either.", examples=["a cat", ["a cat", "a dog"]]
    )
    prompt_name: str | None = native_field("", "query")


class EmbedSparseBody(EmbedAllBody):
    """Turn inputs into weights of vocabulary entries, as text-embeddings-inference does."""


class SimilarityInputs(DialectBody):
    """A sentence, and the sentences to compare it with."""

    source_sentence: Text = Field(description="The sentence.", examples=["a cat on a mat"])
    sentences: Texts = Field(
        description="The sentences to compare it with.", examples=[["a kitten on a rug", "a ship at sea"]]
    )


class SimilarityParameters(DialectBody):
    """Parameters of sentence-similarity."""

    truncate: bool | None = Field(None, description="Truncate a sentence that is too long.", examples=[False])
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = Field(
        None, description="Which end is truncated; default: right.", examples=["right"]
    )
    prompt_name: str | None = Field(None, description="As in /encode.", examples=["query"])


class SimilarityBody(HuggingFaceBody):
    """Compare a sentence with others by the cosine of their vectors."""

    inputs: SimilarityInputs = Field(description="The sentences.")
    parameters: SimilarityParameters | None = Field(None, description="Parameters.")


class FillMaskParameters(DialectBody):
    """Parameters of fill-mask."""

    top_k: int | None = native_field("", 5)
    targets: Texts | None = native_field("", ["cat", "dog"])


class FillMaskBody(HuggingFaceBody):
    """Fill the masks of texts."""

    inputs: Annotated[TextOrTexts, INPUT] = Field(
        description="A text with mask tokens, or several.", examples=["the [MASK] sat"]
    )
    parameters: FillMaskParameters | None = Field(None, description="Parameters.")


class QuestionInputs(DialectBody):
    """A question and the text that may answer it."""

    question: Text = Field(description="The question.", examples=["Who sat on the mat?"])
    context: Text = Field(description="The text.", examples=["The cat sat on the mat."])


class QuestionParameters(DialectBody):
    """Parameters of question-answering."""

    top_k: int | None = native_field("", 1)
    doc_stride: int | None = native_field("stride", 128)
    max_answer_len: int | None = native_field("max_answer_length", 15)
    handle_impossible_answer: bool | None = native_field("no_answer", False)
    align_to_words: bool | None = native_field("", True)
    max_question_len: NotSupported = None
    max_seq_len: NotSupported = None


class QuestionBody(HuggingFaceBody):
    """Answer a question from a text."""

    inputs: Annotated[QuestionInputs, INPUT] = Field(
        description="Question and text.",
        examples=[{"question": "Who sat on the mat?", "context": "The cat sat on the mat."}],
    )
    parameters: QuestionParameters | None = Field(None, description="Parameters.")


class EntityParameters(DialectBody):
    """Parameters of token-classification."""

    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] | None = native_field(
        "aggregation", "simple"
    )
    ignore_labels: list[str] | None = native_field("", ["O"])
    stride: int | None = native_field("", 64)


class EntityBody(HuggingFaceBody):
    """Find entities in texts."""

    inputs: Annotated[TextOrTexts, INPUT] = Field(description="A text, or several.", examples=["Ada wrote it."])
    parameters: EntityParameters | None = Field(None, description="Parameters.")


class ZeroShotParameters(DialectBody):
    """Parameters of zero-shot-classification."""

    candidate_labels: Texts = native_field("labels", ["sports", "politics"], default=...)
    hypothesis_template: str | None = native_field("", "This is about {}.")
    multi_label: bool | None = native_field("", False)


class ZeroShotBody(HuggingFaceBody):
    """Classify a text by the labels in the request."""

    inputs: Annotated[Text, INPUT] = Field(description="The text.", examples=["The match ended in a draw."])
    parameters: ZeroShotParameters = Field(
        description="Labels and other parameters.", examples=[{"candidate_labels": ["sports", "politics"]}]
    )


class ClassParameters(DialectBody):
    """Parameters of text-classification."""

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = Field(
        None, description="From logits to scores; default: as the model was trained.", examples=["softmax"]
    )
    top_k: int | None = Field(None, ge=1, description="Return this many classes; default: all.", examples=[2])


class ImageBody(HuggingFaceBody):
    """Classify an image, as InferenceClient does if there are parameters."""

    inputs: str = Field(
        min_length=1, description="A JPEG, PNG, WebP or GIF file in base64, or as a data URL.", examples=[PIXEL]
    )
    parameters: ClassParameters | None = Field(None, description="Parameters.")


class ImageLabelParameters(DialectBody):
    """Parameters of zero-shot-image-classification."""

    candidate_labels: Texts = native_field("labels", ["a cat", "a dog"], default=...)
    hypothesis_template: str | None = native_field("", "This is a photo of {}.")


class ImageLabelBody(HuggingFaceBody):
    """Classify an image by the labels in the request."""

    inputs: str = Field(
        min_length=1, description="A JPEG, PNG, WebP or GIF file in base64, or as a data URL.", examples=[PIXEL]
    )
    parameters: ImageLabelParameters = Field(
        description="Labels and other parameters.", examples=[{"candidate_labels": ["a cat", "a dog"]}]
    )


class ClassBody(HuggingFaceBody):
    """Classify texts."""

    inputs: Annotated[TextOrTexts, INPUT] = Field(description="A text, or several.", examples=["a fine film"])
    parameters: ClassParameters | None = Field(None, description="Parameters.")


Show = Callable[[EncodePlan, Json], object]

IMAGE_NAMES = {"input[0].image": "inputs", "input": "inputs"}


def embed_all(body: EmbedAllBody, output: str) -> EncodeBody:
    """Translate a body for vectors of all tokens, or for sparse vectors."""
    return native(EncodeBody, encode_fields(body) | {"output": output})


def embed_all_reply(plan: EncodePlan, reply: Json) -> object:
    return [item["tokens"] for item in reply["data"]]


def embed_sparse_reply(plan: EncodePlan, reply: Json) -> object:
    """Return each input's vocabulary entries with their weights."""
    return [
        [{"index": index, "value": weight} for index, weight in zip(item["indices"], item["weights"], strict=True)]
        for item in reply["data"]
    ]


def similarity(body: SimilarityBody) -> EncodeBody:
    """Translate a body; the source sentence becomes the last input."""
    parameters = body.parameters
    fields: Json = {"input": [*body.inputs.sentences, body.inputs.source_sentence], "normalize": True}
    if parameters is not None:
        side = (parameters.truncation_direction or "right").lower()
        fields |= {"truncate": side if parameters.truncate else None, "prompt_name": parameters.prompt_name}
    return native(EncodeBody, fields_of(body) | fields)


def similarity_names(body: SimilarityBody) -> dict[str, str]:
    """Return the client's names of native fields; the source sentence is the last input."""
    source = {f"input[{len(body.inputs.sentences)}]": "inputs.source_sentence"}
    return source | {"input": "inputs.sentences", "prompt_name": "parameters.prompt_name"}


def similarity_reply(plan: EncodePlan, reply: Json) -> object:
    """Return the cosine similarity of the source sentence and each of the others."""
    vectors = np.array([item["embedding"] for item in reply["data"]])
    return (vectors[:-1] @ vectors[-1]).tolist()


def fill_mask(body: FillMaskBody) -> EncodeBody:
    return native(EncodeBody, fields_of(body) | {"output": "fill_mask"})


def fill_mask_reply(body: FillMaskBody) -> Show:
    """Return a list of candidates for a mask; a list of lists for several masks, and another for several inputs."""

    def show(plan: EncodePlan, reply: Json) -> object:
        found: list[Any] = []
        for item in reply["data"]:
            masks = [[_fill(one) for one in mask["candidates"]] for mask in item["masks"]]
            found.append(masks[0] if len(masks) == 1 else masks)
        return found[0] if isinstance(body.inputs, str) else found

    return show


def question(body: QuestionBody) -> EncodeBody:
    pair = {"text": body.inputs.question, "text_pair": body.inputs.context}
    return native(EncodeBody, fields_of(body) | {"input": [pair], "output": "question_answering"})


def question_reply(body: QuestionBody) -> Show:
    """Return the best answer, or a list of answers if `top_k` is above 1."""
    several = body.parameters is not None and (body.parameters.top_k or 1) > 1

    def show(plan: EncodePlan, reply: Json) -> object:
        [item] = reply["data"]
        found = [
            {"score": one["score"], "start": one["start"], "end": one["end"], "answer": one["text"]}
            for one in item["answers"]
        ]
        return found if several else found[0]

    return show


def entities(body: EntityBody) -> EncodeBody:
    fields = fields_of(body)
    fields["aggregation"] = fields["aggregation"] or "simple"
    return native(EncodeBody, fields | {"output": "token_classification"})


def entities_reply(body: EntityBody) -> Show:
    """Return the list of entities of a text, or a list of lists for several texts."""

    def show(plan: EncodePlan, reply: Json) -> object:
        found = [[_entity(one) for one in item["entities"]] for item in reply["data"]]
        return found[0] if isinstance(body.inputs, str) else found

    return show


def zero_shot(body: ZeroShotBody) -> EncodeBody:
    return native(EncodeBody, fields_of(body) | {"output": "zero_shot"})


def zero_shot_reply(plan: EncodePlan, reply: Json) -> object:
    [item] = reply["data"]
    return [{"label": label, "score": score} for label, score in zip(item["labels"], item["scores"], strict=True)]


def classes(body: ClassBody) -> EncodeBody:
    """Translate texts to classify. The scores are the model's own, or a given function of its logits."""
    return native(EncodeBody, fields_of(body) | {"output": _numbers_of(body)})


def image(body: ImageBody) -> EncodeBody:
    return native(EncodeBody, fields_of(body) | {"input": [{"image": body.inputs}], "output": _numbers_of(body)})


def image_labels(body: ImageLabelBody) -> EncodeBody:
    return native(EncodeBody, fields_of(body) | {"input": [{"image": body.inputs}], "output": "zero_shot"})


def _numbers_of(body: ClassBody | ImageBody) -> str:
    """Return the output of /encode from which the scores are computed."""
    named = body.parameters is not None and body.parameters.function_to_apply is not None
    return "logits" if named else "scores"


def classes_reply(body: ClassBody | ImageBody) -> Show:
    """Return each text's classes by descending score: a list of lists, even for one text."""
    parameters = body.parameters
    function = parameters.function_to_apply if parameters is not None else None
    top_k = parameters.top_k if parameters is not None else None

    def show(plan: EncodePlan, reply: Json) -> object:
        scored = _FUNCTIONS[function or "none"]
        found = []
        for item in reply["data"]:
            pairs = zip(scored(item["scores"]), reply["labels"], strict=True)
            ranked = sorted(pairs, key=lambda pair: -float(pair[0]))[:top_k]
            found.append([{"label": label, "score": score} for score, label in ranked])
        return found

    return show


def image_reply(body: ImageBody) -> Show:
    """Return the image's classes by descending score."""
    several = classes_reply(body)

    def show(plan: EncodePlan, reply: Json) -> object:
        [found] = cast("list[object]", several(plan, reply))
        return found

    return show


def _sigmoid(logits: Sequence[float]) -> list[float]:
    return [1 / (1 + math.exp(-logit)) if logit > -700 else 0.0 for logit in logits]


def _softmax(logits: Sequence[float]) -> list[float]:
    """Return the softmax of the logits."""
    weights = [math.exp(one - max(logits)) for one in logits]
    return [weight / sum(weights) for weight in weights]


_FUNCTIONS: dict[str, Callable[[Sequence[float]], Sequence[float]]] = {
    "none": list,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
}


def _fill(one: Json) -> Json:
    return {"score": one["score"], "token": one["token"], "token_str": one["text"], "sequence": one["sequence"]}


def _entity(one: Json) -> Json:
    place: Json = {"word": one["text"], "start": one["start"], "end": one["end"]}
    if "position" in one:
        return {"entity": one["label"], "score": one["score"], "index": one["position"], **place}
    return {"entity_group": one["label"], "score": one["score"], **place}
