"""/docs and /openapi.json, with what FastAPI does not know: errors of routes, and bodies that they read themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

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
from service.http.route_docs import REFS
from service.http.route_prefix import prefix_of
from service.http.static_pages import page
from service.schemas.bodies import DetokenizeBody, GenerateBody, TokenizeBody
from service.schemas.conversation_replies import (
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
    HuggingFaceSummary,
    HuggingFaceText,
    HuggingFaceTranslation,
    OpenAIChatChunk,
    OpenAIChatCompletion,
    OpenAICompletion,
    OpenAIEmbeddings,
    Ranked,
    Scored,
)
from service.schemas.encode_bodies import EncodeBody
from service.schemas.models import LoadBody, UnloadBody
from service.schemas.replies import EncodeReply, GenerateEvent, GenerateReply
from service.speech.bodies import TranscribeBody, TranscribeEvent, TranscribeReply
from service.speech.dialect_bodies import SpeechBody, TranscriptionForm, TranslationForm
from service.speech.replies import (
    HuggingFaceSpeech,
    OpenAITranscript,
    OpenAITranscriptDelta,
    OpenAITranscriptDone,
    OpenAIVerboseTranscript,
)

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
    _, definitions = models_json_schema(models, ref_template=REFS)  # type: ignore[arg-type]
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
