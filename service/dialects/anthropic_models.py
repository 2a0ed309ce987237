"""The served models as Anthropic's API lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triptych.service.core.errors import invalid, shorten
from triptych.service.dialects.ollama import timestamp
from triptych.service.http.json_replies import Json
from triptych.service.lifecycle.state import Service

VERSION_HEADER = "anthropic-version"  # which every request of this API has
MOST_OF_A_PAGE = 1_000  # models


def context_length(service: Service, name: str) -> int | None:
    """Return the tokens of a model's context; before it is loaded, those of its folder."""
    info, served = service.client.models.get(name), service.models.candidate(name)
    if info is not None:
        return info.max_model_len
    return None if served is None else served.config.max_positions


def anthropic_model(service: Service, name: str) -> Json:
    """Return the description of one model."""
    context = context_length(service, name)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": timestamp(service.created),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def anthropic_models(service: Service, query: Mapping[str, str], limit: int) -> Json:
    """Return a page of the models: `limit` of them after `after_id` or before `before_id`; raises a 400."""
    names = service.models.names
    begin, end = 0, len(names)
    if (after := query.get("after_id")) is not None:
        begin = _place(names, "after_id", after) + 1
    if (before := query.get("before_id")) is not None:
        end = _place(names, "before_id", before)
    shown = names[begin:end]
    page = shown[-limit:] if before is not None and after is None else shown[:limit]
    return {
        "data": [anthropic_model(service, name) for name in page],
        "has_more": len(shown) > len(page),
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
    }


def _place(names: Sequence[str], field: str, id: str) -> int:
    if id not in names:
        raise invalid(f"{field}: no model {shorten(id)} is served", field)
    return names.index(id)
