"""Cohere's embeddings. Its vectors have length 1."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from service.core.models import ServedModel
from service.dialects.common import fields_of, native
from service.dialects.ranking_bodies import CohereEmbedBody
from service.http.json_replies import Json
from service.planning.encode import EncodePlan
from service.planning.outputs.vectors import quantized
from service.schemas.encode_bodies import EncodeBody

NAMES = {"input": "texts", "prompt_name": "input_type"}
_PROMPTS: Mapping[str, tuple[str, ...]] = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}
_SIDES = {"NONE": None, "START": "left", "LEFT": "left", "END": "right", "RIGHT": "right"}


def embed(body: CohereEmbedBody, served: ServedModel) -> EncodeBody:
    """Translate a body; the model's prompt for its `input_type` is put in front of the texts, if there is one."""
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
    """Return how to show a reply; without `by_type` as a plain list of floats, as their first version does."""

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
