"""The routes of Hugging Face's servers, with the same planners, streams and replies as /generate and /encode.

Their clients name no model in the body; it may be given in the URL (`?model=`).
"""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from service.dialects import huggingface
from service.dialects.common import naming_errors
from service.dialects.huggingface_bodies import EmbedBody, PredictBody, RerankBody, TextGenerationBody
from service.dialects.ranking_bodies import RankBody
from service.http.bodies import read_body, read_one_of
from service.lifecycle.state import Service, service_of
from service.routes import encode, generate, ranking
from service.routes.docs import WORK_ERRORS, error_responses, ok_response, query_model, request_body
from service.schemas.dialect_replies import (
    HuggingFaceClass,
    HuggingFaceEvent,
    HuggingFaceRank,
    HuggingFaceText,
    Ranked,
    Vectors,
)

router = APIRouter()

_GENERATE = {"model": "code", "inputs": "def add(a, b):\n    ", "parameters": {"max_new_tokens": 16}}
_EMBED = {"model": "embed", "inputs": ["a cat on a mat", "a kitten on a rug"]}
_EVENTS = (HuggingFaceEvent,)
_RERANK_NAMES = {"input": "texts"}
_RERANK_BODIES: dict[str, type[BaseModel]] = {"texts": RerankBody, "documents": RankBody}


@router.post(
    "/",
    summary="Generate or embed, as Hugging Face's servers do",
    response_model=None,
    responses={
        **ok_response("One text in a list, or its events; or vectors.", list[HuggingFaceText], Vectors, events=_EVENTS),
        **error_responses(*WORK_ERRORS),
    },
    openapi_extra={**request_body(TextGenerationBody, EmbedBody, huggingface=_GENERATE), **query_model()},
)
async def root(request: Request) -> Response:
    """Generates text, or embeds it if the model of the URL, or every model, can only encode."""
    kind: type[BaseModel] = TextGenerationBody if _can_generate(service_of(request), request) else EmbedBody
    body = await read_body(request, kind)
    if isinstance(body, EmbedBody):
        return await encode.huggingface_answer(request, body)
    assert isinstance(body, TextGenerationBody)
    return await generate.huggingface_answer(request, body, as_list=True)


@router.post(
    "/generate_stream",
    summary="Generate a stream, as text-generation-inference does",
    response_model=None,
    responses={**ok_response("An event for each token.", events=_EVENTS), **error_responses(*WORK_ERRORS)},
    openapi_extra={**request_body(TextGenerationBody, huggingface=_GENERATE), **query_model()},
)
async def generate_stream(request: Request) -> Response:
    """Streams tokens. The last event has `generated_text` and `details`; nothing follows it."""
    body = await read_body(request, TextGenerationBody)
    return await generate.huggingface_answer(request, body, stream=True)


@router.post(
    "/embed",
    summary="Embed, as text-embeddings-inference does",
    response_model=None,
    responses={**ok_response("A vector for each input.", Vectors), **error_responses(*WORK_ERRORS)},
    openapi_extra={**request_body(EmbedBody, huggingface=_EMBED), **query_model()},
)
async def embed(request: Request) -> Response:
    """Returns a list of vectors, of length 1 unless `normalize` is false."""
    return await encode.huggingface_answer(request, await read_body(request, EmbedBody))


@router.post(
    "/rerank",
    summary="Rerank, as text-embeddings-inference does",
    response_model=None,
    responses={
        **ok_response("`index` and `score` of each text, best first.", list[HuggingFaceRank], Ranked),
        **error_responses(*WORK_ERRORS),
    },
    openapi_extra={**request_body(RerankBody, RankBody), **query_model()},
)
async def rerank(request: Request) -> Response:
    """Requires a model that classifies pairs of texts. A body with `documents` is Cohere's: see /v1/rerank."""
    read = await read_one_of(request, RerankBody, _RERANK_BODIES)
    if isinstance(read, RankBody):
        return await ranking.rank(request, read)
    assert isinstance(read, RerankBody)
    body = read.model_copy(update={"model": (await ranking.classifier_of(request, read)).name})
    with naming_errors(_RERANK_NAMES):
        return await encode.answer(request, huggingface.rerank(body), huggingface.rerank_reply(body))


@router.post(
    "/predict",
    summary="Classify, as text-embeddings-inference does",
    response_model=None,
    responses={
        **ok_response("Each class, best first.", list[HuggingFaceClass], list[list[HuggingFaceClass]]),
        **error_responses(*WORK_ERRORS),
    },
    openapi_extra={**request_body(PredictBody), **query_model()},
)
async def predict(request: Request) -> Response:
    """Requires a model that classifies texts."""
    read = await read_body(request, PredictBody)
    body = read.model_copy(update={"model": (await ranking.classifier_of(request, read)).name})
    with naming_errors(huggingface.ENCODE_NAMES):
        return await encode.answer(request, huggingface.predict(body), huggingface.predict_reply(body))


def _can_generate(service: Service, request: Request) -> bool:
    """Return whether the model of the URL, or any model if it names none, can generate."""
    name = request.query_params.get("model")
    models = [one for one in service.registry.candidates if name in (None, one.name)]
    return any(one.config.can_generate for one in models) or not models
