"""fill_mask: the most likely tokens in the places of mask tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.text.tokenizer import Encoded, Tokenizer
from service.core.errors import invalid
from service.core.models import ServedModel
from service.planning.outputs.base import Found, Json, at_most
from service.planning.outputs.inputs import EncodeInput
from service.schemas.encode_bodies import EncodeBody
from service.settings.service_settings import Limits

_DEFAULT_TOP_K = 5


def mask_settings(
    body: EncodeBody, served: ServedModel, sent: EncodeInput, encoded: Encoded, limits: Limits
) -> Mapping[str, Any]:
    """Return where the masks are, and what may stand there; raises a 400 for an input without a mask."""
    tokenizer = served.require_tokenizer(sent.param)
    at_most("top_k", body.top_k, limits.max_top_k)
    positions = tuple(at for at, token in enumerate(encoded.ids) if token == tokenizer.mask_id)
    if not positions:
        raise invalid(f"{sent.param} has no mask token {tokenizer.mask_token}", sent.param, "no_mask")
    top_k = body.top_k or _DEFAULT_TOP_K
    if len(positions) * top_k > limits.max_candidates:
        message = f"{sent.param} has {len(positions)} masks x {top_k} top_k, more than {limits.max_candidates}"
        raise invalid(message, sent.param)
    return {"positions": positions, "top_k": top_k, "candidates": _candidates(body, tokenizer, limits)}


def _candidates(body: EncodeBody, tokenizer: Tokenizer, limits: Limits) -> tuple[int, ...]:
    targets = body.targets or []
    if len(targets) > limits.max_candidates:
        raise invalid(f"targets has {len(targets)} entries, more than {limits.max_candidates}", "targets")
    found: dict[int, None] = {}
    for index, text in enumerate(targets):
        token = tokenizer.token_id(text)
        ids = (token,) if token is not None else tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            message = f"targets[{index}] is {len(ids)} tokens, expected a single one of the vocabulary"
            raise invalid(message, f"targets[{index}]")
        found[ids[0]] = None
    return tuple(found)


def mask_item(found: Found) -> Json:
    """Return for each mask its candidates, the best first, each with the text that it makes.

    With several masks the others stand in that text.
    """
    [part] = found.parts
    tokenizer, ids = found.tokenizer, list(part.encoded.ids)
    positions = [at for at, token in enumerate(ids) if token == tokenizer.mask_id]
    masks = []
    for position, scores, tokens in zip(positions, part.values.tolist(), part.indices.tolist(), strict=True):
        candidates = []
        for score, token in zip(scores, tokens, strict=True):
            filled = [*ids[:position], token, *ids[position + 1 :]]
            candidates.append(
                {
                    "token": token,
                    "text": tokenizer.token_text(token),
                    "score": score,
                    "sequence": tokenizer.decode(filled, skip_special_tokens=len(positions) == 1),
                }
            )
        masks.append({"position": position, "candidates": candidates})
    return {"masks": masks}
