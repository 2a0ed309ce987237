"""/docs and /openapi.json, with what FastAPI does not know: errors of routes, and bodies that they read themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.dialects.audio_bodies import SpeechBody, TranscriptionForm, TranslationForm
from service.dialects.embedding_bodies import EmbeddingBody
from service.dialects.huggingface_bodies import EmbedBody, PredictBody, RerankBody, TextGenerationBody
from service.dialects.messages_bodies import CountBody, MessagesBody
from service.dialects.openai_bodies import ChatBody, CompletionBody
from service.dialects.pipeline_bodies import (
    ClassBody,
    EmbedAllBody,
    EmbedSparseBody,
    EntityBody,
    FillMaskBody,
    ImageBody,
    QuestionBody,
    SimilarityBody,
    ZeroShotBody,
)
from service.dialects.ranking_bodies import ClassifyBody, CohereEmbedBody, RankBody, ScoreBody
from service.dialects.responses_bodies import ResponsesBody
from service.dialects.text2text_bodies import Text2TextBody, TranslationBody
from service.http.route_prefix import prefix_of
from service.http.static_pages import page
from service.schemas.bodies import DetokenizeBody, GenerateBody, TokenizeBody
from service.schemas.conversation_replies import (
    AnthropicError,
    AnthropicEvent,
    AnthropicMessage,
    DeletedResponse,
    OpenAIResponse,
    OpenAIResponseEvent,
    ResponseItems,
)
from service.schemas.dialect_replies import (
    Classified,
    CohereVectors,
    HuggingFaceAnswer,
    HuggingFaceClass,
    HuggingFaceEntity,
    HuggingFaceEvent,
    HuggingFaceFill,
    HuggingFaceRank,
    HuggingFaceRewritten,
    HuggingFaceSparse,
    HuggingFaceSpeech,
    HuggingFaceSummary,
    HuggingFaceText,
    HuggingFaceTranslation,
    OpenAIChatChunk,
    OpenAIChatCompletion,
    OpenAICompletion,
    OpenAIEmbeddings,
    OpenAITranscript,
    OpenAITranscriptDelta,
    OpenAITranscriptDone,
    OpenAIVerboseTranscript,
    Ranked,
    Scored,
)
from service.schemas.encode_bodies import EncodeBody
from service.schemas.models import LoadBody, UnloadBody
from service.schemas.replies import EncodeReply, ErrorReply, GenerateEvent, GenerateReply
from service.schemas.speech_bodies import TranscribeBody, TranscribeEvent, TranscribeReply

Responses = dict[int | str, dict[str, Any]]

BODIES: tuple[type[BaseModel], ...] = (
    *(GenerateBody, EncodeBody, TokenizeBody, DetokenizeBody),
    *(CompletionBody, ChatBody, EmbeddingBody, ResponsesBody),
    *(MessagesBody, CountBody),
    *(TextGenerationBody, EmbedBody, RerankBody, PredictBody),
    *(LoadBody, UnloadBody),
    *(RankBody, ScoreBody, ClassifyBody, CohereEmbedBody),
    *(EmbedAllBody, EmbedSparseBody, SimilarityBody),
    *(FillMaskBody, QuestionBody, EntityBody, ZeroShotBody, ClassBody),
    *(Text2TextBody, TranslationBody, ImageBody),
    *(TranscribeBody, TranscriptionForm, TranslationForm, SpeechBody),
)
_REPLIES: tuple[type[BaseModel], ...] = (
    *(GenerateReply, GenerateEvent, EncodeReply),
    *(OpenAICompletion, OpenAIChatCompletion, OpenAIChatChunk, OpenAIEmbeddings),
    *(OpenAIResponse, OpenAIResponseEvent, DeletedResponse, ResponseItems, AnthropicMessage, AnthropicEvent),
    *(HuggingFaceText, HuggingFaceEvent, HuggingFaceRank, HuggingFaceClass),
    *(Ranked, Scored, Classified, CohereVectors),
    *(HuggingFaceSparse, HuggingFaceFill, HuggingFaceAnswer, HuggingFaceEntity),
    *(HuggingFaceTranslation, HuggingFaceSummary, HuggingFaceRewritten),
    *(TranscribeReply, TranscribeEvent, HuggingFaceSpeech),
    *(OpenAITranscript, OpenAIVerboseTranscript, OpenAITranscriptDelta, OpenAITranscriptDone),
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
    """Return the JSON schema of a type; models become references, and must be among `BODIES` or `_REPLIES`."""
    if isinstance(shape, type(BaseModel)):  # whose schema would be made in vain, a hundred times at each start
        return {"$ref": _REFS.format(model=shape.__name__)}
    found = TypeAdapter(shape).json_schema(ref_template=_REFS)
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


def install(app: FastAPI, *, with_keys: bool) -> None:
    """Add the routes /docs and /openapi.json, which describes bodies, streams and keys too."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app, with_keys)
        return app.openapi_schema

    async def serve_schema(request: Request) -> Response:
        prefix = prefix_of(request.scope)
        return JSONResponse({**app.openapi(), "servers": [{"url": prefix}]} if prefix else app.openapi())

    async def serve_page(request: Request) -> Response:
        return page("docs")  # FastAPI's own page loads its script from another host and ignores the prefix

    app.openapi = openapi  # type: ignore[method-assign]
    app.add_route("/openapi.json", serve_schema, include_in_schema=False)
    app.add_route("/docs", serve_page, include_in_schema=False)


def _build(app: FastAPI, with_keys: bool) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = schema.setdefault("components", {})
    models = [(model, "validation") for model in BODIES]
    models += [(model, "serialization") for model in _REPLIES]
    _, definitions = models_json_schema(models, ref_template=_REFS)  # type: ignore[arg-type]
    known = components.setdefault("schemas", {})
    known.update({name: one for name, one in definitions.get("$defs", {}).items() if name not in known})
    if with_keys:
        as_password = {
            "type": "http",
            "scheme": "basic",
            "description": "For browsers: any user name, and the key as password.",
        }
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "password": as_password,
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        schema["security"] = [{"key": []}, {"password": []}, {"header": []}]
    return schema
