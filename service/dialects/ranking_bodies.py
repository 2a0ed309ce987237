"""Request bodies of Cohere, Jina and vLLM for ranking, scoring and classifying texts, and Cohere's for vectors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from service.dialects.common import DialectBody, Extended, Ignored, Native, NotFilled, NotSupported, NotTrue, Refused
from service.schemas.types import Text, TextOrTexts, Texts


class _Pooled(Extended):
    """Adds the fields of vLLM's and SGLang's pooling routes that are ignored or refused by name."""

    user: Annotated[Any, Ignored("no score depends on the end user")] = None
    rid: Annotated[Any, Ignored("`request_id` names the request; SGLang's")] = None
    cache_salt: Annotated[Any, Ignored("scores are not kept in the prefix cache")] = None
    truncate_prompt_tokens: NotSupported = None
    truncation_side: NotSupported = None
    padding: NotTrue = None
    add_special_tokens: Annotated[Any, Refused(True)] = None
    mm_processor_kwargs: NotFilled = None
    use_activation: NotSupported = None
    priority: Annotated[Any, Refused(0)] = None


class _Scoring(_Pooled):
    """Adds those of scores."""

    instruction: NotSupported = None
    instruct: NotSupported = None
    chat_template_kwargs: NotFilled = None
    max_tokens_per_query: NotSupported = None


class Document(DialectBody):
    """A text to rank."""

    text: Text = Field(description="The text.", examples=["Ray is a framework."])


def _document_shape(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<document>"


AnyDocument = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[Document, Tag("<document>")], Discriminator(_document_shape)
]


class RankBody(_Scoring):
    """Rank documents by their relevance to a query, as Cohere, Jina and vLLM do."""

    query: Text = Field(description="The question.", examples=["What is Ray?"])
    documents: Annotated[list[AnyDocument], Field(min_length=1, fail_fast=True)] = Field(
        description="Texts, or objects with `text`.", examples=[["Ray is a framework.", "A ray of light."]]
    )
    top_n: int | None = Field(None, ge=1, description="Return this many of the best; default: all.", examples=[3])
    return_documents: bool | None = Field(
        None, description="Repeat each document in the reply; default: false.", examples=[True]
    )
    truncation: bool | None = Field(
        None, description="Truncate a document that is too long; default: refuse it. Jina's.", examples=[True]
    )
    max_tokens_per_doc: int | None = Field(
        None,
        ge=1,
        description="Truncate documents to this many tokens first; default: none. Cohere's.",
        examples=[4096],
    )
    max_chunks_per_doc: NotSupported = None
    rank_fields: NotFilled = None
    relevant_spans: NotSupported = None


class ScoreBody(_Scoring):
    """Score pairs of texts, as vLLM does: one with each of several, or each with the other of its place."""

    text_1: TextOrTexts = Field(description="A text, or several.", examples=["What is Ray?"])
    text_2: TextOrTexts = Field(description="As many texts, or any number if `text_1` is one.", examples=[["A fish."]])
    data_1: Annotated[Any, Refused(instead="text_1")] = None
    data_2: Annotated[Any, Refused(instead="text_2")] = None
    queries: Annotated[Any, Refused(instead="text_1")] = None
    documents: Annotated[Any, Refused(instead="text_2")] = None
    items: Annotated[Any, Refused(instead="text_2")] = None
    max_tokens_per_doc: NotSupported = None


class ClassifyBody(_Pooled):
    """Classify texts, as vLLM does."""

    input: TextOrTexts = Field(description="A text, or several.", examples=["a fine film", ["good", "bad"]])
    labels: NotSupported = None
    messages: NotSupported = None
    add_generation_prompt: NotTrue = None
    continue_final_message: NotTrue = None
    chat_template: NotSupported = None
    chat_template_kwargs: NotFilled = None
    media_io_kwargs: NotFilled = None


CohereType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereEmbedBody(Extended):
    """Turn texts into vectors, as Cohere does; they have length 1."""

    texts: Texts = Field(description="The texts.", examples=[["a cat", "a dog"]])
    input_type: str | None = Field(
        None,
        max_length=128,
        description="What the texts are for. It chooses the model's prompt: `search_query` that called `query`, "
        "`search_document` that called `document` or `passage`, others the one of their name, if there are any.",
        examples=["search_query"],
    )
    embedding_types: list[CohereType] | None = Field(
        None, min_length=1, description="Which numbers to return; default: float.", examples=[["float", "int8"]]
    )
    output_dimension: Annotated[int | None, Native("dimensions")] = Field(
        None, description="Number of leading dimensions to keep.", examples=[128]
    )
    truncate: Literal["NONE", "START", "END", "LEFT", "RIGHT"] | None = Field(
        None, description="Which end of a too long text is truncated; default: END.", examples=["END"]
    )
    images: NotFilled = None
    inputs: NotFilled = None
    max_tokens: NotSupported = None
    priority: Annotated[Any, Refused(0)] = None
