"""Routes of Cohere, Jina and vLLM: reranking, scores of pairs, classification, and Cohere's embeddings."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from triptych.service.core.errors import invalid
from triptych.service.core.models import ServedModel, Task
from triptych.service.dialects import embeddings, ranking
from triptych.service.dialects.common import Extended, names_of, naming_errors
from triptych.service.dialects.ranking import ClassifyBody, CohereEmbedBody, RankBody, ScoreBody
from triptych.service.http.bodies import read_body
from triptych.service.http.model_use import choose_model, hold_model
from triptych.service.http.route_table import Example, Routes, json_body, replies
from triptych.service.lifecycle.state import service_of
from triptych.service.planning.capabilities import EMBED, JUDGE, RERANK
from triptych.service.routes import encode

routes = Routes("encode")

_RANK = Example(RERANK, {"query": "What is Ray?", "documents": ["Ray is a framework.", "A ray of light."]})
_SCORE = Example(RERANK, {"text_1": "What is Ray?", "text_2": ["Ray is a framework.", "A ray of light."]})
_EMBED = Example(EMBED, {"texts": ["a cat on a mat", "a kitten on a rug"], "input_type": "search_document"})


async def rank(request: Request, body: RankBody) -> Response:
    """Rank documents with a classifier of pairs, or by the cosine of vectors."""
    served = await judge_of(request, body)
    read = await _first_tokens(request, body, served)
    with naming_errors(ranking.RANK_NAMES):
        version = "2" if request.scope["path"].startswith("/v2/") else "1"
        asked = ranking.rank(body.model_copy(update={"model": served.name}), served, read, version=version)
    with naming_errors(asked.names):
        return await encode.answer(request, asked.body, asked.show, uncounted=asked.uncounted, of_embedder=True)


@routes.post(
    "/v1/rerank",
    "Rerank, as Cohere, Jina and vLLM do",
    json_body(RankBody, rank=_RANK),
    replies("The documents, best first.", Any),
)
async def rerank_v1(request: Request) -> Response:
    """Scores are probabilities of a model that classifies pairs of texts, or else the cosine of its vectors."""
    return await rank(request, await read_body(request, RankBody))


@routes.post(
    "/v2/rerank",
    "Rerank, as Cohere does",
    json_body(RankBody, rank=_RANK),
    replies("The documents, best first.", Any),
)
async def rerank_v2(request: Request) -> Response:
    """The same as /v1/rerank."""
    return await rank(request, await read_body(request, RankBody))


@routes.post(
    "/v1/score",
    "Score pairs of texts, as vLLM does",
    json_body(ScoreBody, score=_SCORE),
    replies("A score for each pair.", Any),
)
async def score_v1(request: Request) -> Response:
    """Scores are those of /v1/rerank."""
    return await _score(request)


@routes.post(
    "/score",
    "Score pairs of texts, as vLLM does",
    json_body(ScoreBody, score=_SCORE),
    replies("A score for each pair.", Any),
)
async def score(request: Request) -> Response:
    """The same as /v1/score."""
    return await _score(request)


@routes.post(
    "/v1/classify",
    "Classify texts, as vLLM does",
    json_body(ClassifyBody, ability=JUDGE),
    replies("The class of each text.", Any),
)
async def classify_v1(request: Request) -> Response:
    """Requires a model that classifies texts."""
    return await _classify(request)


@routes.post(
    "/classify",
    "Classify texts, as vLLM does",
    json_body(ClassifyBody, ability=JUDGE),
    replies("The class of each text.", Any),
)
async def classify(request: Request) -> Response:
    """The same as /v1/classify."""
    return await _classify(request)


@routes.post(
    "/v1/embed",
    "Embed, as Cohere's first version does",
    json_body(CohereEmbedBody, cohere=_EMBED),
    replies("A vector for each text.", Any),
)
async def embed_v1(request: Request) -> Response:
    """Works with Cohere's client. Vectors have length 1."""
    return await _embed(request, by_type=False)


@routes.post(
    "/v2/embed",
    "Embed, as Cohere does",
    json_body(CohereEmbedBody, cohere=_EMBED),
    replies("Vectors by their type.", Any),
)
async def embed_v2(request: Request) -> Response:
    """Works with Cohere's client. Vectors have length 1."""
    return await _embed(request, by_type=True)


async def _score(request: Request) -> Response:
    body = await read_body(request, ScoreBody)
    served = await judge_of(request, body)
    with naming_errors(ranking.SCORE_NAMES):
        asked = ranking.score(body.model_copy(update={"model": served.name}), served)
    with naming_errors(asked.names):
        return await encode.answer(request, asked.body, asked.show, uncounted=asked.uncounted, of_embedder=True)


async def _classify(request: Request) -> Response:
    body = await read_body(request, ClassifyBody)
    served = await classifier_of(request, body)
    with naming_errors(ranking.CLASSIFY_NAMES):
        asked = ranking.classify(body.model_copy(update={"model": served.name}))
        return await encode.answer(request, asked, ranking.classify_reply)


async def _embed(request: Request, *, by_type: bool) -> Response:
    body = await read_body(request, CohereEmbedBody)
    await hold_model(request, body.model, Task.ENCODE, body.timeout_s)
    served = service_of(request).models.resolve(body.model, Task.ENCODE)
    with naming_errors(embeddings.NAMES | names_of(body)):
        show = embeddings.embed_reply(body, by_type=by_type)
        return await encode.answer(request, embeddings.embed(body, served), show, of_embedder=True)


async def _first_tokens(request: Request, body: RankBody, served: ServedModel) -> list[str] | None:
    """Return `max_tokens_per_doc` tokens of each document, as text; None if the limit is not below the model's own."""
    service, most = service_of(request), body.max_tokens_per_doc
    refused = len(body.documents) > service.limits.max_encode_inputs  # the planner refuses it before any work
    if most is None or refused or most >= service.model_info(served.name).max_model_len:
        return None
    texts, tokenizer = ranking.documents(body), served.require_tokenizer("documents")
    if not tokenizer.has_offsets:
        message = f"max_tokens_per_doc: model {served.name} has no tokenizer that tells where tokens are in a text"
        raise invalid(message, "max_tokens_per_doc")

    def work() -> list[str]:
        return [tokenizer.first_tokens(text, most) for text in texts]

    return await service.threads.run(served.name, sum(map(len, texts)), work)


async def judge_of(request: Request, body: Extended) -> ServedModel:
    """Return the model that scores pairs: the named one, the only classifier of texts, or the only embedder."""
    models = service_of(request).models
    if body.model is None and any(map(ranking.judges_pairs, models.candidates)):
        return await classifier_of(request, body)
    await hold_model(request, body.model, Task.ENCODE, body.timeout_s)
    return models.resolve(body.model, Task.ENCODE)


async def classifier_of(request: Request, body: Extended) -> ServedModel:
    """Return the model that classifies texts: the named one, or the only one."""
    return await choose_model(request, body.model, ranking.judges_pairs, "classifies texts", body.timeout_s)
