"""What routes tell /openapi.json: their errors, and the bodies and replies that they read and write themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter

from service.schemas.conversation_replies import AnthropicError
from service.schemas.replies import ErrorReply

Responses = dict[int | str, dict[str, Any]]
REFS = "#/components/schemas/{model}"
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
    429: "The queue is full; try again after `Retry-After` seconds.",
    431: "The headers are too large.",
    499: "The client closed the connection.",
    500: "The service failed.",
    503: "Loading, draining or failed; try again after `Retry-After` seconds.",
    504: "The deadline passed before the first token.",
}
_EVERYWHERE = (401, 413, 431, 500)
BODY_ERRORS = (400, 408, 415)
WORK_ERRORS = (*BODY_ERRORS, 404, 409, 429, 499, 503, 504)


def error_responses(*statuses: int) -> Responses:
    """Return `responses=` for these error statuses and those of every route."""
    return {
        status: {"model": ErrorReply, "description": _MEANING[status]} for status in sorted({*statuses, *_EVERYWHERE})
    }


def anthropic_errors(*statuses: int) -> Responses:
    """Return `error_responses` in the shape of Anthropic's API."""
    return {status: one | {"model": AnthropicError} for status, one in error_responses(*statuses).items()}


def request_body(*models: type[BaseModel], **examples: Any) -> dict[str, Any]:
    """Return `openapi_extra=` for a route that reads one of `models` itself; the `examples` are complete bodies."""
    content: dict[str, Any] = {"schema": _any_of([_schema(model) for model in models])}
    if examples:
        content["examples"] = {name: {"value": value} for name, value in examples.items()}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def form_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return `openapi_extra=` for a route that reads a form with a file."""
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _schema(model)}}}}


def file_body(model: type[BaseModel], media_type: str) -> dict[str, Any]:
    """Return `openapi_extra=` for a route whose body is a file, or `model` with the file in it."""
    file = {"schema": {"type": "string", "format": "binary"}}
    content = {media_type: file, "application/octet-stream": file, "application/json": {"schema": _schema(model)}}
    return {"requestBody": {"required": True, "content": content}}


def text_response(found: Responses) -> Responses:
    """Add to the responses of `ok_response` the formats that are plain text."""
    text = {"schema": {"type": "string"}}
    found[200]["content"] |= {"text/plain": text, "application/x-subrip": text, "text/vtt": text}
    return found


def ok_response(description: str, *shapes: Any, events: Sequence[type[BaseModel]] = ()) -> Responses:
    """Return `responses=` for a route that replies with one of `shapes` (types), or with a stream of `events`."""
    content = {"application/json": {"schema": _any_of([_schema(shape) for shape in shapes])}} if shapes else {}
    if events:
        data = _any_of([*(_schema(event) for event in events), _schema(ErrorReply)])
        # Before OpenAPI 3.2 the schema of an event stream is that of each event.
        content["text/event-stream"] = {
            "schema": {
                "type": "object",
                "properties": {
                    "data": {
                        "type": "string",
                        "contentMediaType": "application/json",
                        "contentSchema": data,
                        "description": "JSON; where the API has one, `[DONE]` ends the stream.",
                    }
                },
                "required": ["data"],
            }
        }
    return {200: {"description": description, "content": content}}


def _schema(shape: Any) -> dict[str, Any]:
    """Return the JSON schema of a type; models become references, and `service.routes.docs` must list them."""
    if isinstance(shape, type(BaseModel)):  # whose schema would be made in vain, a hundred times at each start
        return {"$ref": REFS.format(model=shape.__name__)}
    found = TypeAdapter(shape).json_schema(ref_template=REFS)
    found.pop("$defs", None)
    return found


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def query_model() -> dict[str, Any]:
    """Return `openapi_extra=` for routes whose clients can name the model only in the URL."""
    parameter = {
        "name": "model",
        "in": "query",
        "schema": {"type": "string"},
        "description": "The model to use, if the body names none.",
    }
    return {"parameters": [parameter]}


def query_parameter(name: str, description: str, **schema: Any) -> dict[str, Any]:
    """Return one of the `parameters` of a route that reads it itself."""
    return {"name": name, "in": "query", "schema": schema, "description": description}


def path_parameter(name: str, description: str) -> dict[str, Any]:
    """Return `openapi_extra=` for a route that reads a path parameter itself."""
    parameter = {
        "name": name,
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "description": description,
    }
    return {"parameters": [parameter]}
