"""Hugging Face's tasks other than generation: /pipeline/TASK for `InferenceClient`, and similar routes of TEI.

Their clients do not name a model in the body; the URL may name one (`?model=`). Otherwise the only model that can do
the task answers.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from triptych.service.dialects import pipelines
from triptych.service.dialects.common import names_of, naming_errors
from triptych.service.dialects.huggingface import EmbedBody
from triptych.service.dialects.pipelines import (
    ClassBody,
    EmbedAllBody,
    EmbedSparseBody,
    EntityBody,
    FillMaskBody,
    QuestionBody,
    SimilarityBody,
    ZeroShotBody,
)
from triptych.service.http.bodies import read_body
from triptych.service.http.route_table import MODEL_IN_QUERY, Example, Routes, json_body, replies
from triptych.service.planning.capabilities import ANSWER, EMBED, FILL, JUDGE, SPARSE, TAG, ZERO_SHOT
from triptych.service.routes import encode
from triptych.service.routes.ranking import classifier_of

routes = Routes("encode")

_SENTENCES = Example(
    EMBED, {"inputs": {"source_sentence": "a cat on a mat", "sentences": ["a kitten on a rug", "a ship at sea"]}}
)


@routes.post(
    "/embed_all",
    "Embed each token, as text-embeddings-inference does",
    json_body(EmbedAllBody, ability=EMBED),
    replies("Vectors of each input's tokens.", Any),
    MODEL_IN_QUERY,
)
async def embed_all(request: Request) -> Response:
    """Returns hidden states, without pooling and projections."""
    body = await read_body(request, EmbedAllBody)
    with naming_errors(names_of(body)):
        return await encode.answer(request, pipelines.embed_all(body, "tokens"), pipelines.embed_all_reply)


@routes.post(
    "/embed_sparse",
    "Embed sparsely, as text-embeddings-inference does",
    json_body(EmbedSparseBody, ability=SPARSE),
    replies("Weights of vocabulary entries.", Any),
    MODEL_IN_QUERY,
)
async def embed_sparse(request: Request) -> Response:
    """Requires a model with the output `sparse`."""
    body = await read_body(request, EmbedSparseBody)
    with naming_errors(names_of(body)):
        return await encode.answer(request, pipelines.embed_all(body, "sparse"), pipelines.embed_sparse_reply)


async def compare(request: Request, body: SimilarityBody) -> Response:
    """Return the cosines between a source sentence and others."""
    with naming_errors(pipelines.similarity_names(body)):
        asked = pipelines.similarity(body)
        return await encode.answer(request, asked, pipelines.similarity_reply, uncounted=1, of_embedder=True)


@routes.post(
    "/similarity",
    "Compare sentences, as text-embeddings-inference does",
    json_body(SimilarityBody, huggingface=_SENTENCES),
    replies("A cosine for each sentence.", list[float]),
    MODEL_IN_QUERY,
)
async def similarity(request: Request) -> Response:
    """Returns the cosine between the vector of the source sentence and that of each other sentence."""
    return await compare(request, await read_body(request, SimilarityBody))


@routes.post(
    "/pipeline/sentence-similarity",
    "Compare sentences, as InferenceClient asks for it",
    json_body(SimilarityBody, huggingface=_SENTENCES),
    replies("A cosine for each sentence.", list[float]),
    MODEL_IN_QUERY,
)
async def sentence_similarity(request: Request) -> Response:
    """The same as /similarity."""
    return await compare(request, await read_body(request, SimilarityBody))


@routes.post(
    "/pipeline/feature-extraction",
    "Embed, as InferenceClient asks for it",
    json_body(EmbedBody, ability=EMBED),
    replies("A vector for each input.", Any),
    MODEL_IN_QUERY,
)
async def feature_extraction(request: Request) -> Response:
    """The same as /embed."""
    return await encode.huggingface_answer(request, await read_body(request, EmbedBody))


@routes.post(
    "/pipeline/fill-mask",
    "Fill masks, as InferenceClient asks for it",
    json_body(FillMaskBody, huggingface=Example(FILL, {"inputs": "Paris is the {mask} of France."})),
    replies("Candidates, the best first.", Any),
    MODEL_IN_QUERY,
)
async def fill_mask(request: Request) -> Response:
    """Requires a model with the output `fill_mask`."""
    return await fill(request, await read_body(request, FillMaskBody))


@routes.post(
    "/pipeline/question-answering",
    "Answer a question, as InferenceClient asks for it",
    json_body(QuestionBody, ability=ANSWER),
    replies("The best answer, or several.", Any),
    MODEL_IN_QUERY,
)
async def question_answering(request: Request) -> Response:
    """Requires a model with the output `question_answering`."""
    return await answer_question(request, await read_body(request, QuestionBody))


@routes.post(
    "/pipeline/token-classification",
    "Find entities, as InferenceClient asks for it",
    json_body(EntityBody, ability=TAG),
    replies("Entities.", Any),
    MODEL_IN_QUERY,
)
async def token_classification(request: Request) -> Response:
    """Requires a model with the output `token_classification`. Neighbours of one label are joined by default."""
    return await find_entities(request, await read_body(request, EntityBody))


@routes.post(
    "/pipeline/zero-shot-classification",
    "Classify by any labels, as InferenceClient asks for it",
    json_body(ZeroShotBody, ability=ZERO_SHOT),
    replies("The labels, the best first.", Any),
    MODEL_IN_QUERY,
)
async def zero_shot_classification(request: Request) -> Response:
    """Requires a model with the output `zero_shot`."""
    return await classify_by(request, await read_body(request, ZeroShotBody))


@routes.post(
    "/pipeline/text-classification",
    "Classify, as InferenceClient asks for it",
    json_body(ClassBody, ability=JUDGE),
    replies("Each text's classes, the best first.", Any),
    MODEL_IN_QUERY,
)
async def text_classification(request: Request) -> Response:
    """Requires a model that classifies texts."""
    return await classify(request, await read_body(request, ClassBody))


async def fill(request: Request, body: FillMaskBody) -> Response:
    """Return candidates for the masks."""
    with naming_errors(names_of(body)):
        return await encode.answer(request, pipelines.fill_mask(body), pipelines.fill_mask_reply(body))


async def answer_question(request: Request, body: QuestionBody) -> Response:
    """Return answers with their positions."""
    with naming_errors(names_of(body)):
        return await encode.answer(request, pipelines.question(body), pipelines.question_reply(body))


async def find_entities(request: Request, body: EntityBody) -> Response:
    """Return entities with their positions."""
    with naming_errors(names_of(body)):
        return await encode.answer(request, pipelines.entities(body), pipelines.entities_reply(body))


async def classify_by(request: Request, body: ZeroShotBody) -> Response:
    """Return scores of the body's labels."""
    with naming_errors(names_of(body)):
        return await encode.answer(request, pipelines.zero_shot(body), pipelines.zero_shot_reply)


async def classify(request: Request, body: ClassBody) -> Response:
    """Return the classes of texts."""
    served = await classifier_of(request, body)
    body = body.model_copy(update={"model": served.name})
    with naming_errors(names_of(body)):
        return await encode.answer(request, pipelines.classes(body), pipelines.classes_reply(body))
