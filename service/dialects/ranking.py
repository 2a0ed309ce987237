"""Reranking, scoring and classification as in the APIs of Cohere, Jina and vLLM.

A cross-encoder (a classifier of texts) reads a pair as one input. Its last class means "relevant"; its checkpoint sets
the activation of scores. Any other model embeds the texts, and the score is the cosine similarity of the vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Discriminator, Field, Tag

from triptych.service.core.errors import invalid
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
    fields_of,
    native,
    native_encode,
)
from triptych.service.http.json_replies import Json
from triptych.service.planning.encode import EncodePlan
from triptych.service.schemas.encode_bodies import EncodeBody
from triptych.service.schemas.types import Text, TextOrTexts, TextPair, Texts

# -- Request bodies of Cohere, Jina and vLLM for ranking, scoring and classification, and of Cohere for embeddings.


class _Pooled(Extended):
    """The fields of vLLM's and SGLang's pooling routes that are ignored or refused by name."""

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
    """The same for routes that return scores."""

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
    """Score pairs of texts, as vLLM does: one text with each of several, or two lists pairwise."""

    text_1: TextOrTexts = Field(description="A text, or several.", examples=["What is Ray?"])
    text_2: TextOrTexts = Field(
        description="The same number of texts, or any number if `text_1` is one text.", examples=[["A fish."]]
    )
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
    """Turn texts into vectors of length 1, as Cohere does."""

    texts: Texts = Field(description="The texts.", examples=[["a cat", "a dog"]])
    input_type: str | None = Field(
        None,
        max_length=128,
        description="The purpose of the texts. It chooses the model's prompt, if there is one: `search_query` chooses "
        "`query`, `search_document` chooses `document` or `passage`; another chooses the prompt of the same name.",
        examples=["search_query"],
    )
    embedding_types: list[CohereType] | None = Field(
        None, min_length=1, description="Types of numbers to return; default: float.", examples=[["float", "int8"]]
    )
    output_dimension: Annotated[int | None, Native("dimensions")] = Field(
        None, description="Number of leading dimensions to keep.", examples=[128]
    )
    truncate: Literal["NONE", "START", "END", "LEFT", "RIGHT"] | None = Field(
        None, description="Which end of a text that is too long is truncated; default: END.", examples=["END"]
    )
    images: NotFilled = None
    inputs: NotFilled = None
    max_tokens: NotSupported = None
    priority: Annotated[Any, Refused(0)] = None


Show = Callable[[EncodePlan, Json], object]

RANK_NAMES = {"input": "documents", "output": "model", "truncate": "truncation"}
SCORE_NAMES = {"input": "text_2", "output": "model"}
CLASSIFY_NAMES = {"output": "model"}


def judges_pairs(served: ServedModel) -> bool:
    """Whether a model is a cross-encoder: it has a classifier of whole texts."""
    head = served.config.classifier
    return head is not None and not head.per_token and not served.config.only_images


class Judgement:
    """Scores pairs of texts: `firsts` and `seconds` pairwise, or the only one of `firsts` with each of `seconds`."""

    def __init__(self, served: ServedModel, firsts: Sequence[str], seconds: Sequence[str]) -> None:
        self._pairs = judges_pairs(served)
        self._firsts = firsts
        self._seconds = seconds

    @property
    def uncounted(self) -> int:
        """The number of inputs that are queries, which do not count as documents."""
        return 0 if self._pairs else len(self._firsts)

    def first_names(self, places: Sequence[str]) -> dict[str, str]:
        """Return the native names of the inputs in `firsts`, with their paths in the client's body."""
        if self._pairs:
            return {}
        return {f"input[{len(self._seconds) + at}]": place for at, place in enumerate(places)}

    def body(self, fields: Json, output: str = "scores") -> EncodeBody:
        """Return the body of /encode; `input[i]` contains `seconds[i]`. `output` is that of a cross-encoder."""
        if self._pairs:
            firsts = self._firsts if len(self._firsts) > 1 else [*self._firsts] * len(self._seconds)
            pairs = [TextPair(text=one, text_pair=other) for one, other in zip(firsts, self._seconds, strict=True)]
            return native_encode(fields | {"output": output}, pairs)
        return native_encode(fields | {"normalize": True}, [*self._seconds, *self._firsts])

    def scores(self, reply: Json) -> list[float]:
        """Return a score for each of `seconds`."""
        if self._pairs:
            return [item["scores"][-1] for item in reply["data"]]
        vectors = np.array([item["embedding"] for item in reply["data"]])
        seconds, firsts = vectors[: len(self._seconds)], vectors[len(self._seconds) :]
        scores: list[float] = (seconds * firsts).sum(axis=-1).tolist()
        return scores


def documents(body: RankBody) -> list[str]:
    """Return the documents' texts."""
    return [one if isinstance(one, str) else one.text for one in body.documents]


class RankingPlan(NamedTuple):
    """A body of /encode, and how to convert its reply."""

    body: EncodeBody
    show: Show
    uncounted: int  # inputs that are queries
    names: Mapping[str, str]  # client's paths of native fields, for errors


def rank(body: RankBody, served: ServedModel, read: Sequence[str] | None = None, *, version: str = "1") -> RankingPlan:
    """Translate a body; the reply has the fields of Cohere, Jina and vLLM.

    `read` are the documents as the model reads them, which may be truncated; the reply repeats whole documents.
    `version` is that of Cohere's API.
    """
    texts = documents(body)
    judgement = Judgement(served, [body.query], texts if read is None else read)

    def show(plan: EncodePlan, reply: Json) -> object:
        found: list[Json] = []
        for index, score in enumerate(judgement.scores(reply)):
            document = {"document": {"text": texts[index]}} if body.return_documents else {}
            found.append({"index": index, "relevance_score": score, **document})
        found.sort(key=lambda one: -float(one["relevance_score"]))
        head = {"id": reply["id"], "model": reply["model"], "object": "list"}
        meta = {"api_version": {"version": version}, "tokens": {"input_tokens": reply["usage"]["prompt_tokens"]}}
        return head | {"results": found[: body.top_n], "meta": meta, "usage": _usage(reply)}

    side = None if body.truncation is False else "right"
    names = judgement.first_names(["query"]) | RANK_NAMES
    return RankingPlan(judgement.body(fields_of(body) | {"truncate": side}), show, judgement.uncounted, names)


def score(body: ScoreBody, served: ServedModel) -> RankingPlan:
    """Translate a body of pairs; raises a 400 if the numbers of texts do not match."""
    firsts, seconds = _list(body.text_1), _list(body.text_2)
    if len(firsts) not in (1, len(seconds)) or not seconds:
        message = f"text_2 has {len(seconds)} texts, expected {len(firsts)} as text_1, or text_1 to be one text"
        raise invalid(message, "text_2")
    judgement = Judgement(served, firsts, seconds)

    def show(plan: EncodePlan, reply: Json) -> object:
        scores = enumerate(judgement.scores(reply))
        return _listed(reply, [{"index": index, "object": "score", "score": one} for index, one in scores])

    places = ["text_1"] if isinstance(body.text_1, str) else [f"text_1[{at}]" for at in range(len(firsts))]
    names = judgement.first_names(places) | SCORE_NAMES
    return RankingPlan(judgement.body(fields_of(body)), show, judgement.uncounted, names)


def classify(body: ClassifyBody) -> EncodeBody:
    """Translate a body of texts to classify."""
    return native(EncodeBody, fields_of(body) | {"input": body.input, "output": "scores"})


def classify_reply(plan: EncodePlan, reply: Json) -> Json:
    """Return each text's most likely class, and the scores of all."""
    data = []
    for item in reply["data"]:
        probs = item["scores"]
        label = reply["labels"][max(range(len(probs)), key=probs.__getitem__)]
        data.append({"index": item["index"], "label": label, "probs": probs, "num_classes": len(probs)})
    return _listed(reply, data)


def _list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _listed(reply: Json, data: list[Json]) -> Json:
    head = {"id": reply["id"], "object": "list", "created": reply["created"], "model": reply["model"]}
    return head | {"data": data, "usage": _usage(reply)}


def _usage(reply: Json) -> Json:
    return {name: reply["usage"][name] for name in ("prompt_tokens", "total_tokens")}
