"""Items with numbers: vectors, scores, and weights of vocabulary entries."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from model.config.model import ClassifierInput
from model.text.tokenizer import Encoded
from service.core.errors import invalid
from service.core.model_registry import ServedModel
from service.planning.outputs.base import Found, Json
from service.planning.outputs.inputs import EncodeInput
from service.schemas.encode_bodies import EncodeBody
from service.settings.service_settings import Limits


def embedding_item(found: Found) -> Json:
    return _numbers(found, "embedding")


def tokens_item(found: Found) -> Json:
    return _numbers(found, "tokens")


def scores_item(found: Found) -> Json:
    return _numbers(found, "scores")


def _numbers(found: Found, name: str) -> Json:
    """Return floats, or base64 with the shape of a matrix."""
    [part] = found.parts
    if found.body.encoding_format != "base64":
        return {name: part.values.tolist()}
    item: Json = {name: base64.b64encode(part.output.data).decode()}
    if len(part.output.shape) > 1:
        item["shape"] = list(part.output.shape)
    return item


def end_of_sequence(
    body: EncodeBody, served: ServedModel, sent: EncodeInput, encoded: Encoded, limits: Limits
) -> Mapping[str, Any]:
    """Refuse ids without the token that the model's classifier reads."""
    head, ends = served.config.classifier, served.config.eos_token_ids
    if head is not None and head.input is ClassifierInput.EOS and not set(ends) & set(encoded.ids):
        raise invalid(f"{sent.param} has no end-of-sequence token {' or '.join(map(str, ends))}", sent.param)
    return {}


def sparse_settings(
    body: EncodeBody, served: ServedModel, sent: EncodeInput, encoded: Encoded, limits: Limits
) -> Mapping[str, Any]:
    return {"top_k": body.top_k or 0}


def sparse_item(found: Found) -> Json:
    """Return the ids of vocabulary entries, ascending, and their weights."""
    [part] = found.parts
    return {"indices": part.indices.tolist(), "weights": part.values.tolist()}
