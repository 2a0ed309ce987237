"""What /openapi.json says beyond the code: the errors of a route, and bodies that are read without FastAPI."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service.dialects.huggingface_bodies import EmbedBody, PredictBody, RerankBody, TextGenerationBody
from service.dialects.openai_bodies import ChatBody, CompletionBody, EmbeddingBody
from service.dialects.sglang import SglangEncodeBody, SglangGenerateBody
from service.schemas.bodies import DetokenizeBody, EncodeBody, GenerateBody, TokenizeBody
from service.schemas.replies import ErrorReply, GenerateEvent

Responses = dict[int | str, dict[str, Any]]

_BODIES: tuple[type[BaseModel], ...] = (
    *(GenerateBody, EncodeBody, TokenizeBody, DetokenizeBody),
    *(CompletionBody, ChatBody, EmbeddingBody),
    *(TextGenerationBody, EmbedBody, RerankBody, PredictBody),
    *(SglangGenerateBody, SglangEncodeBody),
)
_REFS = "#/components/schemas/{model}"
_MEANING = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "No such model, request or route.",
    405: "The route does not take this method.",
    409: "The request was cancelled.",
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
BODY_ERRORS = (400, 415)
WORK_ERRORS = (*BODY_ERRORS, 404, 409, 429, 499, 503, 504)


def errors(*statuses: int) -> Responses:
    """`responses=` for these error statuses and those that every route has."""
    return {
        status: {"model": ErrorReply, "description": _MEANING[status]} for status in sorted({*statuses, *_EVERYWHERE})
    }


def body(*models: type[BaseModel], **examples: Any) -> dict[str, Any]:
    """`openapi_extra=` for a route that reads one of `models` itself; `examples` work as they are."""
    references = [{"$ref": _REFS.format(model=model.__name__)} for model in models]
    content: dict[str, Any] = {"schema": references[0] if len(references) == 1 else {"anyOf": references}}
    if examples:
        content["examples"] = {name: {"value": value} for name, value in examples.items()}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def dialect_reply(description: str, *, kind: str = "object", streams: bool = False) -> Responses:
    """`responses=` for a reply that another project's documentation describes: an `object` or an `array`."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": kind}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {200: {"description": description, "content": content}}


def query_model() -> dict[str, Any]:
    """`openapi_extra=` for routes whose clients can say the model in the address only."""
    parameter = {
        "name": "model",
        "in": "query",
        "schema": {"type": "string"},
        "description": "Which model answers, where the body does not say.",
    }
    return {"parameters": [parameter]}


def path_parameter(name: str, description: str) -> dict[str, Any]:
    """`openapi_extra=` for a route that reads a path parameter itself."""
    parameter = {
        "name": name,
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "description": description,
    }
    return {"parameters": [parameter]}


def install(app: FastAPI, *, with_keys: bool) -> None:
    """Make `app.openapi` describe bodies, streams and keys."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app, with_keys)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _build(app: FastAPI, with_keys: bool) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = schema.setdefault("components", {})
    models = [(model, "validation") for model in _BODIES]
    models.append((GenerateEvent, "serialization"))
    _, definitions = models_json_schema(models, ref_template=_REFS)  # type: ignore[arg-type]
    known = components.setdefault("schemas", {})
    known.update({name: one for name, one in definitions.get("$defs", {}).items() if name not in known})
    if with_keys:
        as_password = {"type": "http", "scheme": "basic", "description": "For browsers: any user, the key as password."}
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}, "password": as_password}
        schema["security"] = [{"key": []}, {"password": []}]
    return schema
