"""Embeddings as OpenAI, Jina and vLLM have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from service.core.errors import invalid
from service.dialects.common import fields_of, native, native_encode
from service.dialects.embedding_bodies import EmbeddingBody
from service.http.json_replies import Json
from service.planning.encode import EncodePlan
from service.schemas.encode_bodies import EncodeBody
from service.schemas.types import TextPair

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
        return native(EncodeBody, fields | _parts_of_one_text(body))
    return native_encode(fields, body.input)


def embedding_reply(body: EmbeddingBody) -> Callable[[EncodePlan, Json], Json]:
    """Return how to show a reply of /encode: one vector for each input, or for each part of a text."""

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
    """Return the text that consists of the inputs, and their places in it."""
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
