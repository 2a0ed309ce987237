"""Embeddings of the APIs of OpenAI, Jina, vLLM and Cohere."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from triptych.service.core.errors import invalid
from triptych.service.core.models import ServedModel
from triptych.service.dialects.common import (
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
    native_field,
)
from triptych.service.dialects.other_fields import LoraPath
from triptych.service.dialects.ranking import CohereEmbedBody
from triptych.service.http.json_replies import Json
from triptych.service.planning.encode import EncodePlan
from triptych.service.planning.outputs.vectors import quantized
from triptych.service.schemas.encode_bodies import EncodeBody, Ranges
from triptych.service.schemas.types import EncodeInput, ImageFile, TextPair

# -- Cohere's embeddings. Its vectors have length 1.

NAMES = {"input": "texts", "prompt_name": "input_type"}
_PROMPTS: Mapping[str, tuple[str, ...]] = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}
_SIDES = {"NONE": None, "START": "left", "LEFT": "left", "END": "right", "RIGHT": "right"}


def embed(body: CohereEmbedBody, served: ServedModel) -> EncodeBody:
    """Translate a body; the model's prompt for its `input_type`, if there is one, is put before the texts."""
    fields = fields_of(body)
    wanted = body.input_type or ""
    known = served.checkpoint.sentences.prompts
    prompt = next((name for name in _PROMPTS.get(wanted, (wanted,)) if name in known), None)
    return native(
        EncodeBody,
        fields
        | {
            "input": body.texts,
            "normalize": True,
            "prompt_name": prompt,
            "truncate": _SIDES[body.truncate or "END"],
        },
    )


def embed_reply(body: CohereEmbedBody, *, by_type: bool) -> Any:
    """Return a function that converts a reply; without `by_type` to a plain list of floats, as in Cohere's v1."""

    def show(plan: EncodePlan, reply: Json) -> object:
        vectors = [item["embedding"] for item in reply["data"]]
        kinds = body.embedding_types or ["float"]
        version, billed = {"version": "2" if by_type else "1"}, {"input_tokens": reply["usage"]["prompt_tokens"]}
        meta = {"api_version": version, "billed_units": billed}
        found = {"id": reply["id"], "texts": body.texts, "meta": meta}
        if not by_type and body.embedding_types is None:
            return found | {"response_type": "embeddings_floats", "embeddings": vectors}
        shown = {kind: [_as_type(vector, kind) for vector in vectors] for kind in kinds}
        return found | {"response_type": "embeddings_by_type", "embeddings": shown}

    return show


def _as_type(vector: list[float], kind: str) -> object:
    if kind == "float":
        return vector
    numbers = np.asarray(vector, "<f4")
    if kind == "base64":
        return base64.b64encode(numbers.tobytes()).decode()
    return quantized(numbers, kind).tolist()


# -- The body of /v1/embeddings: OpenAI's, with the additional fields of Jina and vLLM.

EmbeddingType = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]


class EmbeddingBody(Extended, LoraPath):
    """Turn inputs into vectors, as OpenAI, Jina and vLLM do."""

    input: EncodeInput = Field(
        description="Text, token ids, several of either, or a list of texts, `{text}` and `{image}`.",
        examples=["a cat", ["a cat", "a dog"]],
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None,
        description="Numbers, or base64 of little-endian float32, which the official client requests. Integers of "
        "`embedding_type` are numbers in either.",
        examples=["float"],
    )
    dimensions: Annotated[int | None, Native()] = Field(
        None, description="Number of leading dimensions to keep.", examples=[128]
    )
    user: Annotated[Any, Ignored("no vector depends on the end user")] = None
    rid: Annotated[Any, Ignored("`request_id` names the request; SGLang's")] = None
    service_tier: Annotated[Any, Ignored("there is one tier")] = None
    embedding_type: EmbeddingType | None = Field(
        None, description="As in /encode, or `base64` for base64 of floats. Jina's.", examples=["float", "int8"]
    )
    encoding_type: EmbeddingType | None = Field(
        None, description="The same, by its name in older clients of Jina.", examples=["float"]
    )
    ranges: Ranges | None = native_field("", [[-0.2], [0.2]], more=" Not OpenAI's.")
    task: str | None = native_field("", "retrieval.query", "text-matching", more=" Jina's.", max_length=128)
    prompt_name: str | None = native_field("", "query", more=" Not OpenAI's.")
    late_chunking: bool | None = Field(
        None,
        description="Join the texts and read them as one, so that the vector of each depends on the others. A space is "
        "put between two texts that have no white space there. Jina's.",
        examples=[True],
    )
    truncate: bool | None = Field(
        None, description="Truncate an input that is too long; default: refuse it. Jina's.", examples=[True]
    )
    truncate_prompt_tokens: Annotated[Any, Refused(-1)] = Field(
        None, description="-1: the same as `truncate`. No other length is supported. vLLM's.", examples=[-1]
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Which end is truncated; default: right. vLLM's.", examples=["right"]
    )
    normalize: bool | None = Field(None, description="As in /encode. Not OpenAI's.", examples=[True])
    normalized: bool | None = Field(None, description="The same. Jina's.", examples=[True])
    use_activation: bool | None = Field(None, description="The same. vLLM's.", examples=[True])
    add_special_tokens: Annotated[Any, Refused(True)] = None
    modality: Literal["text", "image"] | None = Field(
        None,
        description="`image`: texts of `input` are image files in base64, or data URLs. infinity's.",
        examples=["image"],
    )
    priority: Annotated[Any, Refused(0)] = None
    embed_dtype: Annotated[Any, Refused("float32")] = None
    endianness: Annotated[Any, Refused("native", "little")] = None
    return_multivector: NotTrue = None
    input_type: NotSupported = None
    messages: NotSupported = None
    add_generation_prompt: NotTrue = None
    continue_final_message: NotTrue = None
    chat_template: NotSupported = None
    chat_template_kwargs: NotFilled = None
    mm_processor_kwargs: NotFilled = None
    media_io_kwargs: NotFilled = None
    padding: NotTrue = None
    embed_override_token_id: NotSupported = None
    embed_overrides: NotSupported = None
    additional_data: NotSupported = None
    cache_salt: NotSupported = None


# -- The embeddings of OpenAI, Jina and vLLM.

_KINDS = ("embedding_type", "encoding_type")
_NORMALIZE = ("normalize", "normalized", "use_activation")


def names(body: EmbeddingBody) -> Mapping[str, str]:
    """Return the body's own field names, by native name."""
    given = [name for name in _NORMALIZE if getattr(body, name) is not None]
    found = {"normalize": given[0]} if given else {}
    if body.truncate is None and body.truncate_prompt_tokens is not None:
        found["truncate"] = "truncate_prompt_tokens"
    if body.embedding_type is None:
        found["embedding_type"] = "encoding_type"
    return found | ({"chunks": "input"} if body.late_chunking else {})


def embedding(body: EmbeddingBody) -> EncodeBody:
    """Translate an embedding body; raises `ApiError` with native field names."""
    fields = fields_of(body)
    fields |= {"normalize": _normalize(body), "truncate": _side(body), **_numbers(body)}
    if body.late_chunking:
        if fields["truncate"] is not None:
            raise invalid("late_chunking and truncate exclude each other", "late_chunking")
        if body.modality == "image":
            raise invalid("late_chunking needs texts, found modality 'image'", "late_chunking")
        return native(EncodeBody, fields | _parts_of_one_text(body))
    return native_encode(fields, body.input if body.modality is None else _of_modality(body.input, body.modality))


def _of_modality(given: Any, modality: str) -> Any:
    """Return inputs that are all texts, or whose strings are image files; raises a 400 for others."""
    inputs, wrong = (given if isinstance(given, list) else [given]), TextPair if modality == "image" else ImageFile
    for at, one in enumerate(inputs):
        if isinstance(one, wrong):
            found = "a text" if modality == "image" else "an image"
            raise invalid(f"input[{at}]: modality is {modality!r}, found {found}", f"input[{at}]")
    if modality == "text":
        return given
    if not all(isinstance(one, str | ImageFile) for one in inputs):
        raise invalid("input: with modality 'image' it must be image files, found token ids", "input")
    return [ImageFile(image=one) if isinstance(one, str) else one for one in inputs]


def embedding_reply(body: EmbeddingBody) -> Callable[[EncodePlan, Json], Json]:
    """Return a function that converts a reply of /encode: a vector for each input, or for each part of a text."""

    def show(plan: EncodePlan, reply: Json) -> Json:
        if body.late_chunking:
            vectors = reply["data"][0]["embeddings"]
        else:
            vectors = [item["embedding"] for item in reply["data"]]
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": at, "embedding": one} for at, one in enumerate(vectors)],
            "model": reply["model"],
            "usage": {name: reply["usage"][name] for name in ("prompt_tokens", "total_tokens")},
        }

    return show


def _normalize(body: EmbeddingBody) -> bool | None:
    given = {name: value for name in _NORMALIZE if (value := getattr(body, name)) is not None}
    if len(set(given.values())) > 1:
        raise invalid(f"{' and '.join(given)} contradict each other", list(given)[-1])
    return next(iter(given.values()), None)


def _side(body: EmbeddingBody) -> str | None:
    cut = body.truncate if body.truncate is not None else body.truncate_prompt_tokens is not None
    if not cut and body.truncate_prompt_tokens is not None:
        raise invalid("truncate and truncate_prompt_tokens contradict each other", "truncate_prompt_tokens")
    if body.truncation_side is not None and not cut:
        raise invalid("truncation_side needs truncate: true", "truncation_side")
    return (body.truncation_side or "right") if cut else None


def _numbers(body: EmbeddingBody) -> Json:
    """Return what the numbers are. OpenAI's client decodes every base64 as float32, so integers never are base64."""
    kinds = {name: value for name in _KINDS if (value := getattr(body, name)) is not None}
    if len(set(kinds.values())) > 1:
        raise invalid(f"{' and '.join(kinds)} contradict each other", "encoding_type")
    kind = next(iter(kinds.values()), None)
    if kind == "base64":
        if body.encoding_format == "float":
            raise invalid(f"{next(iter(kinds))} and encoding_format contradict each other", "encoding_format")
        return {"encoding_format": "base64"}
    if kind in (None, "float"):
        return {"encoding_format": body.encoding_format}
    return {"embedding_type": kind}


def _parts_of_one_text(body: EmbeddingBody) -> Json:
    """Join the inputs to one text, and return it with their places in it."""
    inputs = body.input if isinstance(body.input, list) else [body.input]
    text, chunks = "", []
    for at, one in enumerate(inputs):
        part = one.text if isinstance(one, TextPair) and one.text_pair is None else one
        if not isinstance(part, str):
            raise invalid(f"input[{at}]: late_chunking needs texts", f"input[{at}]")
        if text and not (text[-1].isspace() or part[0].isspace()):
            text += " "
        chunks.append([len(text), len(text) + len(part)])
        text += part
    return {"input": text, "chunks": chunks}
