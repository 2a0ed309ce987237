"""Request bodies of Hugging Face's tasks: `inputs`, and `parameters` of each task; and of TEI's similarity."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from service.dialects.common import DialectBody, Native, NotSupported, native_field
from service.dialects.huggingface_bodies import HuggingFaceBody, Truncated
from service.schemas.types import Prompt, Text, TextOrTexts, Texts

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
    """A sentence, and those to compare it with."""

    source_sentence: Text = Field(description="The sentence.", examples=["a cat on a mat"])
    sentences: Texts = Field(description="What to compare it with.", examples=[["a kitten on a rug", "a ship at sea"]])


class SimilarityParameters(DialectBody):
    """How the sentences are read."""

    truncate: bool | None = Field(None, description="Truncate a sentence that is too long.", examples=[False])
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = Field(
        None, description="Which end is truncated; default: right.", examples=["right"]
    )
    prompt_name: str | None = Field(None, description="As in /encode.", examples=["query"])


class SimilarityBody(HuggingFaceBody):
    """Compare a sentence with others by the cosine of their vectors."""

    inputs: SimilarityInputs = Field(description="The sentences.")
    parameters: SimilarityParameters | None = Field(None, description="How they are read.")


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

    inputs: Annotated[QuestionInputs, INPUT] = Field(description="Question and text.")
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
    """Classify a text by labels of the request."""

    inputs: Annotated[Text, INPUT] = Field(description="The text.", examples=["The match ended in a draw."])
    parameters: ZeroShotParameters = Field(description="Labels, and how they are read.")


class ClassParameters(DialectBody):
    """Parameters of text-classification."""

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = Field(
        None, description="Logits to scores; default: as the model was trained.", examples=["softmax"]
    )
    top_k: int | None = Field(None, ge=1, description="Return this many classes; default: all.", examples=[2])


class ImageBody(HuggingFaceBody):
    """Classify an image, as InferenceClient asks for it where there are parameters."""

    inputs: str = Field(min_length=1, description="A JPEG or PNG file as base64.", examples=["iVBORw0KGgo="])
    parameters: ClassParameters | None = Field(None, description="Parameters.")


class ClassBody(HuggingFaceBody):
    """Classify texts."""

    inputs: Annotated[TextOrTexts, INPUT] = Field(description="A text, or several.", examples=["a fine film"])
    parameters: ClassParameters | None = Field(None, description="Parameters.")
