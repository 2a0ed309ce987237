"""/docs and /openapi.json, made from the table of routes and the types of bodies and replies."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, RootModel, TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triptych.service.core.errors import ANTHROPIC_PATHS, OLLAMA_ROUTES
from triptych.service.http.route_prefix import prefix_of
from triptych.service.http.route_table import FORM, JSON, Body, Example, Parameter, Reply, Route, Routes, RouteTable
from triptych.service.http.static_pages import page
from triptych.service.lifecycle.state import service_of
from triptych.service.planning.capabilities import MEANINGS, SAMPLE, SOUND, Choice, choices
from triptych.service.schemas.replies import AnthropicError, ErrorReply, OllamaError
from triptych.service.schemas.types import PIXEL

routes = Routes()

Json = dict[str, Any]
_DESCRIPTION = (
    "One service for all three forms of the Transformer: decoder-only, encoder-decoder, encoder-only. Errors have "
    "one shape on every route. `X-Request-Id` (1-128 letters, digits and `._:-`) is accepted, or made if missing or "
    "invalid, and returned."
)
_REFS = "#/components/schemas/{model}"
_MEANING = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The route is off, needs an admin key, or the model may not be loaded from there.",
    404: "No such model, request or route.",
    405: "The route does not take this method.",
    408: "The body did not arrive in time.",
    409: "The request was cancelled, or the model's state does not allow it.",
    413: "The body, or what it asks for, is too large.",
    415: "The body is not declared as JSON.",
    416: "`Range` is beyond the end of the file.",
    429: "The queue is full; try again after `Retry-After` seconds.",
    431: "The headers are too large.",
    499: "The client closed the connection.",
    500: "The service failed.",
    501: "The service has no `--state-dir`.",
    503: "Loading, draining or failed; try again after `Retry-After` seconds.",
    504: "The deadline passed before the first token.",
}
_EVERYWHERE = (401, 413, 431, 500)
_PASSWORD = "For browsers: any user name, and the key as password."
_KEYS: Json = {
    "key": {"type": "http", "scheme": "bearer"},
    "password": {"type": "http", "scheme": "basic", "description": _PASSWORD},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


@routes.get("/docs", "The documentation", None)
async def docs(request: Request) -> Response:
    """Returns a page that shows /openapi.json and loads nothing from other hosts."""
    return page("docs")


@routes.get("/openapi.json", "The documentation for programs", None)
async def openapi(request: Request) -> Response:
    """Returns the description of all routes."""
    service, prefix = service_of(request), prefix_of(request.scope)
    chosen = tuple(choices(service.models.candidates).values())
    found = document(request.app.table, service.version, service.settings.asks_for_key, chosen)
    return JSONResponse({**found, "servers": [{"url": prefix}]} if prefix else found)


@lru_cache(maxsize=4)
def document(table: RouteTable, version: str, with_keys: bool, chosen: tuple[Choice, ...]) -> Json:
    """Return the OpenAPI document of a table of routes, with examples for the `chosen` models."""
    by_ability = {one.ability: one for one in chosen}
    described = [route for route in table.rows if route.replies is not None]
    schemas = _Schemas(described)
    paths: dict[str, Json] = {}
    for route in described:
        path = re.sub(r":path\}", "}", route.path)
        open_to_all: Json = {"security": []} if with_keys and route.access == "open" else {}
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, schemas, by_ability) | open_to_all
    found: Json = {
        "openapi": "3.1.0",
        "info": {"title": "triptych", "description": _DESCRIPTION, "version": version},
        "paths": paths,
        "components": {"schemas": schemas.definitions},
    }
    if with_keys:
        found["components"]["securitySchemes"] = _KEYS
        found["security"] = [{name: []} for name in _KEYS]
    return found


class _Schemas:
    """The JSON schemas of request bodies and replies; models are references to `definitions`."""

    def __init__(self, described: Sequence[Route]) -> None:
        wanted: dict[tuple[Any, Any], TypeAdapter[Any]] = {}
        for route in described:
            for model in route.body.models if route.body is not None else ():
                wanted[model, "validation"] = TypeAdapter(model)
            for reply in (route.replies or {}).values():
                for shape in (*reply.shapes, *reply.events, *reply.lines):
                    wanted[repr(shape), "serialization"] = TypeAdapter(shape)
        for error in (ErrorReply, AnthropicError, OllamaError):
            wanted[repr(error), "serialization"] = TypeAdapter(error)
        inputs = [(key, mode, adapter) for (key, mode), adapter in wanted.items()]
        self._found, definitions = TypeAdapter.json_schemas(inputs, ref_template=_REFS)
        self.definitions: Json = definitions["$defs"]

    def read(self, models: Sequence[type[BaseModel]]) -> Json:
        return _any_of([self._found[model, "validation"] for model in models])

    def sent(self, shapes: Sequence[Any]) -> Json:
        return _any_of([self._found[repr(shape), "serialization"] for shape in shapes])


def _any_of(schemas: list[Json]) -> Json:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _operation(route: Route, path: str, schemas: _Schemas, chosen: Choices) -> Json:
    name = re.sub(r"\W", "_", f"{route.handler.__name__}{path}")
    error = {JSON: {"schema": schemas.sent([_error_shape(route)])}}
    replies = {status: _reply(one, schemas) for status, one in (route.replies or {}).items()}
    for status in sorted({*route.errors, *_EVERYWHERE}):
        replies[status] = {"description": _MEANING[status], "content": error}
    found: Json = {
        "summary": route.summary,
        "description": inspect.getdoc(route.handler) or "",
        "operationId": f"{name}_{route.method.lower()}",
    }
    if route.access == "admin":
        found["x-needs"] = "an admin key"
    if route.parameters:
        found["parameters"] = [_parameter(one) for one in route.parameters]
    if route.body is not None:
        found["requestBody"] = {
            "required": True,
            "content": body_content(route.body, schemas.read(route.body.models), chosen, path),
        }
    return found | {"responses": {str(status): one for status, one in replies.items()}}


def _error_shape(route: Route) -> type[BaseModel]:
    if route.path in ANTHROPIC_PATHS:
        return AnthropicError
    return OllamaError if route.path.startswith(OLLAMA_ROUTES) else ErrorReply


def _parameter(one: Parameter) -> Json:
    required = {"required": True} if one.place == "path" else {}
    return {"name": one.name, "in": one.place, **required, "schema": one.schema, "description": one.description}


def _reply(reply: Reply, schemas: _Schemas) -> Json:
    content: Json = {JSON: {"schema": schemas.sent(reply.shapes)}} if reply.shapes else {}
    if reply.events:
        data = _any_of([*(schemas.sent([event]) for event in reply.events), schemas.sent([ErrorReply])])
        # Before OpenAPI 3.2, the schema of an event stream is the schema of each event.
        content["text/event-stream"] = {
            "schema": {
                "type": "object",
                "properties": {
                    "data": {
                        "type": "string",
                        "anyOf": [{"contentMediaType": JSON, "contentSchema": data}, {"const": "[DONE]"}],
                        "description": "JSON; where the API has one, `[DONE]` ends the stream.",
                    }
                },
                "required": ["data"],
            }
        }
    if reply.lines:  # before OpenAPI 3.2, the schema of a stream of lines is the schema of each
        content["application/x-ndjson"] = {"schema": schemas.sent([*reply.lines, OllamaError])}
    content |= {kind: {"schema": {"type": "string"}} for kind in reply.texts}
    return {"description": reply.description, **({"content": content} if content else {})}


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
        return {"value": {} if one.body is None else one.body}
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


def _needed(models: Sequence[type[BaseModel]]) -> Json | list[Any]:
    """Return the required fields of the first model with their examples, by the names that clients use.

    The example of a list is an empty one.
    """
    if issubclass(models[0], RootModel):
        return []
    schema = models[0].model_json_schema()
    return {name: schema["properties"][name].get("examples", [None])[0] for name in schema.get("required", [])}


def _sample(body: Body, chosen: Choices) -> Json:
    """Return the example of a body that is a file: where it comes from, and the model that reads it."""
    choice = chosen.get(body.ability or "")
    source = body.sample if body.sample == SAMPLE else f"data:{_FILES[body.sample]};base64,{body.sample}"
    found = {"externalValue": source, "x-media-type": _FILES[body.sample]}
    found["x-model"] = choice.model if choice is not None else _NO_MODEL
    return found | ({} if choice is not None else {"x-needs": MEANINGS[body.ability or ""]})
