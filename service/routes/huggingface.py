"""The routes that clients of Hugging Face's servers know, over the same planners, streams and replies as /generate and
/encode. Those clients name no model: it may stand in the address (`?model=`).
"""

from __future__ import annotations

from typing import TypeVar

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from service.core.errors import invalid
from service.core.model_registry import Task
from service.dialects import huggingface
from service.dialects.common import speaking
from service.dialects.huggingface_bodies import EmbedBody, PredictBody, RerankBody, TextGenerationBody
from service.http.bodies import named, read_body
from service.lifecycle.state import Service, service_of
from service.routes import encode, generate
from service.routes.docs import WORK_ERRORS, body, errors, ok, query_model
from service.schemas.dialect_replies import (
    HuggingFaceClass,
    HuggingFaceEvent,
    HuggingFaceRank,
    HuggingFaceText,
    Vectors,
)

router = APIRouter()
C = TypeVar("C", RerankBody, PredictBody)

_GENERATE = {"model": "code", "inputs": "def add(a, b):\n    ", "parameters": {"max_new_tokens": 16}}
_EMBED = {"model": "embed", "inputs": ["a cat on a mat", "a kitten on a rug"]}
_EVENTS = (HuggingFaceEvent,)
_RERANK_NAMES = {"input": "texts"}


@router.post(
    "/",
    summary="Generate or embed, as Hugging Face's servers do",
    response_model=None,
    responses={
        **ok("One text in a list, or its events; or vectors.", list[HuggingFaceText], Vectors, events=_EVENTS),
        **errors(*WORK_ERRORS),
    },
    openapi_extra={**body(TextGenerationBody, EmbedBody, huggingface=_GENERATE), **query_model()},
)
async def root(request: Request) -> Response:
    """Text generation; embedding where the model that the address names, or every loaded one, only encodes."""
    kind: type[BaseModel] = TextGenerationBody if _can_generate(service_of(request), request) else EmbedBody
    asked = named(request, await read_body(request, kind))
    if isinstance(asked, EmbedBody):
        return await encode.huggingface_answer(request, asked)
    assert isinstance(asked, TextGenerationBody)
    return await generate.huggingface_answer(request, asked, as_list=True)


@router.post(
    "/generate_stream",
    summary="Generate a stream, as text-generation-inference does",
    response_model=None,
    responses={**ok("An event for each token.", events=_EVENTS), **errors(*WORK_ERRORS)},
    openapi_extra={**body(TextGenerationBody, huggingface=_GENERATE), **query_model()},
)
async def generate_stream(request: Request) -> Response:
    """The last event has `generated_text` and `details`; nothing follows it."""
    asked = named(request, await read_body(request, TextGenerationBody))
    return await generate.huggingface_answer(request, asked, stream=True)


@router.post(
    "/embed",
    summary="Embed, as text-embeddings-inference does",
    response_model=None,
    responses={**ok("A vector for each input.", Vectors), **errors(*WORK_ERRORS)},
    openapi_extra={**body(EmbedBody, huggingface=_EMBED), **query_model()},
)
async def embed(request: Request) -> Response:
    """Always a list of vectors, of length 1 unless `normalize` is false."""
    return await encode.huggingface_answer(request, named(request, await read_body(request, EmbedBody)))


@router.post(
    "/rerank",
    summary="Rerank, as text-embeddings-inference does",
    response_model=None,
    responses={**ok("`index` and `score` of each text, best first.", list[HuggingFaceRank]), **errors(*WORK_ERRORS)},
    openapi_extra={**body(RerankBody), **query_model()},
)
async def rerank(request: Request) -> Response:
    """Needs a model that classifies pairs of texts."""
    asked = _to_classifier(service_of(request), named(request, await read_body(request, RerankBody)))
    with speaking(_RERANK_NAMES):
        return await encode.answer(request, huggingface.rerank(asked), huggingface.rerank_reply(asked))


@router.post(
    "/predict",
    summary="Classify, as text-embeddings-inference does",
    response_model=None,
    responses={
        **ok("Each class, best first.", list[HuggingFaceClass], list[list[HuggingFaceClass]]),
        **errors(*WORK_ERRORS),
    },
    openapi_extra={**body(PredictBody), **query_model()},
)
async def predict(request: Request) -> Response:
    """Needs a model that classifies texts."""
    asked = _to_classifier(service_of(request), named(request, await read_body(request, PredictBody)))
    with speaking(huggingface.ENCODE_NAMES):
        return await encode.answer(request, huggingface.predict(asked), huggingface.predict_reply(asked))


def _to_classifier(service: Service, asked: C) -> C:
    """`asked` with the model that classifies whole texts: the one it names, or the only one."""
    able = [one.name for one in service.registry if one.config.classifier and not one.config.classifier.per_token]
    if asked.model is not None:
        name = service.registry.resolve(asked.model, Task.ENCODE).name
        if name not in able:
            message = f"model {name} does not classify texts; models that do: {', '.join(able) or 'none'}"
            raise invalid(message, "model", "wrong_task")
        return asked
    if not able:
        raise invalid("no loaded model classifies texts", "model", "wrong_task")
    if len(able) > 1:
        raise invalid(f"model is required: several classify texts: {', '.join(able)}", "model", "missing_field")
    return asked.model_copy(update={"model": able[0]})


def _can_generate(service: Service, request: Request) -> bool:
    """Whether the model that the address names does; where it names none, whether any does."""
    name = request.query_params.get("model")
    models = [model for model in service.registry if name in (None, model.name)]
    return any(model.serves(Task.GENERATE) for model in models) or not models
