"""The example bodies of /openapi.json: each names a served model that can answer it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from triptych.service.http.route_table import FORM, JSON, Body, Example
from triptych.service.planning.capabilities import MEANINGS, SAMPLE, SOUND, Choice
from triptych.service.schemas.types import PIXEL

Json = dict[str, Any]
Choices = Mapping[str, Choice]

_NO_MODEL = "MODEL"  # the name in an example that no served model answers
_FILES = {SAMPLE: "audio/flac", PIXEL: "image/png"}  # media types of samples


def body_content(body: Body, schema: Json, chosen: Choices, path: str) -> Json:
    """Return the `content` of a body that has the JSON schema `schema`."""
    if len(body.media_types) == 1:
        examples = _examples(body, chosen, path)
        if body.media_types[0] == FORM:
            for one in examples.values():
                one["value"]["file"] = SOUND
        return {body.media_types[0]: {"schema": schema, "examples": examples}}
    found: Json = {}
    for media_type in body.media_types:
        is_json = media_type == JSON
        found[media_type] = {"schema": schema if is_json else {"type": "string", "format": "binary"}}
        if is_json:
            found[media_type]["examples"] = _examples(body, chosen, path)
    found[body.media_types[0]]["examples"] = {"sample": _sample(body, chosen)}
    return found


def _examples(body: Body, chosen: Choices, path: str) -> Json:
    given = body.examples or {"needed": Example(body.ability or "", _needed(body.models))}
    made = {name: _example(one, chosen, path) for name, one in given.items()}
    served = {name: one for name, one in made.items() if "x-needs" not in one}
    own = {name for name, one in given.items() if one.body is None}
    # An ability's own example has no body unless a model has the ability.
    return served or {name: one for name, one in made.items() if name not in own} or dict(list(made.items())[:1])


def _example(one: Example, chosen: Choices, path: str) -> Json:
    choice = chosen.get(one.ability)
    if choice is not None and (one.own or one.body is None):
        return {"value": json.loads(choice.body)} if choice.path == path else {"x-needs": MEANINGS[one.ability]}
    if not one.ability:
        return {"value": dict(one.body or {})}
    text, mask = (choice.text, choice.mask) if choice is not None else ("Hello", "[MASK]")
    name = choice.model if choice is not None else _NO_MODEL
    value = {"model": name} | _filled(one.body or {}, {"{text}": text, "{mask}": mask})
    return {"value": value} | ({} if choice is not None else {"x-needs": MEANINGS[one.ability]})


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    """Return a body with the places of texts filled."""
    if isinstance(value, Mapping):
        return {name: _filled(one, values) for name, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, values) for one in value]
    if isinstance(value, str):
        for place, text in values.items():
            value = value.replace(place, text)
    return value


def _needed(models: Sequence[type[BaseModel]]) -> Json:
    """Return the required fields of the first model with their examples, by the names that clients use."""
    schema = models[0].model_json_schema()
    return {name: schema["properties"][name].get("examples", [None])[0] for name in schema.get("required", [])}


def _sample(body: Body, chosen: Choices) -> Json:
    """Return the example of a body that is a file: where it comes from, and the model that reads it."""
    choice = chosen.get(body.ability or "")
    source = body.sample if body.sample == SAMPLE else f"data:{_FILES[body.sample]};base64,{body.sample}"
    found = {"externalValue": source, "x-media-type": _FILES[body.sample]}
    found["x-model"] = choice.model if choice is not None else _NO_MODEL
    return found | ({} if choice is not None else {"x-needs": MEANINGS[body.ability or ""]})
