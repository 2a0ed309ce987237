"""multi_vector: a vector for each token, for late interaction.

Queries and documents are read as pylate does: each has a token of its own behind the first one, queries are filled up
with mask tokens, and punctuation of documents gets no vector.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from model.checkpoint.sentence_transformers import LateInteraction
from model.config.layer import RotaryConfig
from model.text.tokenizer import Encoded
from service.core.errors import invalid
from service.core.models import ServedModel
from service.planning.outputs.base import Found, Json
from service.planning.outputs.inputs import EncodeInput
from service.schemas.encode_bodies import EncodeBody
from service.settings.service_settings import Limits


def settings_of(served: ServedModel) -> LateInteraction:
    late = served.checkpoint.sentences.late
    assert late is not None
    return late


def single_text(body: EncodeBody, served: ServedModel, sent: EncodeInput) -> list[EncodeInput]:
    """Refuse what is no single text, and queries whose expansion the network cannot compute."""
    if not sent.is_text:
        raise invalid(f"{sent.param} must be a text", sent.param)
    late = settings_of(served)
    if body.input_type == "query" and late.expands and not late.attends and not _can_leave_unread(served, late):
        message = f"input_type: queries of model {served.name} are not served: its layers have biases or narrow windows"
        raise invalid(message, "input_type")
    return [sent]


def room(body: EncodeBody, served: ServedModel) -> int | None:
    """Return the tokens of a text before its prefix is put in; None: any number."""
    late = settings_of(served)
    length = late.query_length if body.input_type == "query" else late.document_length
    return None if length is None else length - bool(_prefix(body, late))


def as_read(body: EncodeBody, served: ServedModel, sent: EncodeInput, encoded: Encoded) -> Encoded:
    """Return the tokens with the prefix behind the first one, and those of a query filled up."""
    late, tokenizer = settings_of(served), served.require_tokenizer(sent.param)
    ids, types = list(encoded.ids), list(encoded.type_ids)
    prefix = _prefix(body, late)
    if prefix:
        token = tokenizer.token_id(prefix)
        token = token if token is not None else tokenizer.unknown_id
        if token is None:
            raise invalid(f"output: model {served.name} has no token {prefix!r}", "output")
        ids.insert(1, token)
        types.insert(1, 0)
    if body.input_type == "query" and late.expands and tokenizer.mask_id is not None:
        missing = max(0, (late.query_length or 0) - len(ids))
        ids += [tokenizer.mask_id] * missing
        types += [0] * missing
    return Encoded(tuple(ids), tuple(types))


def vector_settings(
    body: EncodeBody, served: ServedModel, sent: EncodeInput, encoded: Encoded, limits: Limits
) -> Mapping[str, Any]:
    """Return which tokens get a vector, and how many are read by none."""
    late, tokenizer = settings_of(served), served.require_tokenizer(sent.param)
    if body.input_type == "query":
        filled = 0
        while late.expands and not late.attends and encoded.ids[-1 - filled] == tokenizer.mask_id:
            filled += 1
        return {"unread": filled, "positions": tuple(range(late.skips_first, len(encoded.ids)))}
    skipped = {tokenizer.token_id(word) for word in late.skipped_words}
    skipped = {tokenizer.unknown_id if token is None else token for token in skipped}
    places = range(late.skips_first, len(encoded.ids))
    counted = tuple(at for at in places if encoded.ids[at] not in skipped)
    if not counted:
        raise invalid(f"{sent.param} has no token that gets a vector", sent.param, "empty_prompt")
    return {"positions": counted}


def vectors_item(found: Found) -> Json:
    """Return the vectors `[tokens, dimensions]`, of length 1."""
    [part] = found.parts
    if found.body.encoding_format == "base64":
        return {"vectors": base64.b64encode(part.output.data).decode(), "shape": list(part.output.shape)}
    return {"vectors": part.values}


def _prefix(body: EncodeBody, late: LateInteraction) -> str:
    return late.query_prefix if body.input_type == "query" else late.document_prefix


def _can_leave_unread(served: ServedModel, late: LateInteraction) -> bool:
    """Return whether tokens that none reads change nothing but their own rows: no biases, no windows within a query."""
    encoder = served.config.encoder
    if encoder is None:
        return False
    mixers = [layer.attention for layer in encoder.layers]
    plain = all(mixer.position is None or isinstance(mixer.position, RotaryConfig) for mixer in mixers)
    return plain and all(mixer.window is None or mixer.window >= (late.query_length or 0) for mixer in mixers)
