"""The routes of Hugging Face's servers, with the same planners, streams and replies as /generate and /encode.

Their clients do not name a model in the body; the URL may name one (`?model=`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from triptych.service.core.models import ServedModel
from triptych.service.dialects import huggingface
from triptych.service.dialects.common import naming_errors
from triptych.service.dialects.huggingface import EmbedBody, PredictBody, RerankBody, TextGenerationBody
from triptych.service.dialects.pipelines import (
    ClassBody,
    EntityBody,
    FillMaskBody,
    ImageBody,
    ImageLabelBody,
    QuestionBody,
    SimilarityBody,
    ZeroShotBody,
)
from triptych.service.dialects.ranking import RankBody
from triptych.service.dialects.root_task import RootBody, RootTask, task_of_file
from triptych.service.dialects.text2text import TranslationBody
from triptych.service.http.bodies import named_model, raw_body, read_body, read_one_of, with_model
from triptych.service.http.parsing import parsed
from triptych.service.http.route_table import MODEL_IN_QUERY, Example, Routes, json_body, replies
from triptych.service.lifecycle.state import service_of
from triptych.service.planning.capabilities import COMPLETE, EMBED, JUDGE, RERANK
from triptych.service.routes import encode, generate, images, pipelines, ranking, text2text
from triptych.service.speech import routes as audio

routes = Routes("encode")

_GENERATE = Example(COMPLETE, {"inputs": "{text}", "parameters": {"max_new_tokens": 16}})
_RERANK = Example(RERANK, {"query": "What is Ray?", "texts": ["Ray is a framework.", "A ray of light."]})
_EMBED = Example(EMBED, {"inputs": ["a cat on a mat", "a kitten on a rug"]})


async def _generate(request: Request, body: TextGenerationBody) -> Response:
    return await generate.huggingface_answer(request, body, as_list=True)


# Body type and handler of each task at `/`.
_ROOT: dict[RootTask, tuple[type[BaseModel], Callable[[Request, Any], Awaitable[Response]]]] = {
    RootTask.TEXT_GENERATION: (TextGenerationBody, _generate),
    RootTask.TRANSLATION: (TranslationBody, text2text.any_task),
    RootTask.FEATURE_EXTRACTION: (EmbedBody, encode.huggingface_answer),
    RootTask.SENTENCE_SIMILARITY: (SimilarityBody, pipelines.compare),
    RootTask.QUESTION_ANSWERING: (QuestionBody, pipelines.answer_question),
    RootTask.ZERO_SHOT: (ZeroShotBody, pipelines.classify_by),
    RootTask.FILL_MASK: (FillMaskBody, pipelines.fill),
    RootTask.TOKEN_CLASSIFICATION: (EntityBody, pipelines.find_entities),
    RootTask.TEXT_CLASSIFICATION: (ClassBody, pipelines.classify),
    RootTask.IMAGE_CLASSIFICATION: (ImageBody, images.classify),
    RootTask.ZERO_SHOT_IMAGE: (ImageLabelBody, images.classify_by),
}
_FILES = {
    RootTask.IMAGE_CLASSIFICATION: images.image_classification,
    RootTask.SPEECH_RECOGNITION: audio.automatic_speech_recognition,
}
_RERANK_BODIES: dict[str, type[BaseModel]] = {"texts": RerankBody, "documents": RankBody}


@routes.post(
    "/",
    "Do any task, as Hugging Face's servers do",
    json_body(*(kind for kind, _ in _ROOT.values()), huggingface=_GENERATE),
    replies("A list, or the events of a text; what is in it depends on the task.", Any, events=(Any,)),
    MODEL_IN_QUERY,
    task="generate",
)
async def root(request: Request) -> Response:
    """Does the task that the body is made for, else the task of its model; /pipeline/TASK describes each task.

    An encoder-decoder's reply has its text as `generated_text`, `translation_text` and `summary_text`.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    task = task_of_file(media_type, _candidates(request, None))
    if task is not None:
        return await _FILES[task](request)
    raw = await raw_body(request)
    found = RootBody(raw)
    task = found.task(_candidates(request, found.model))
    if task is RootTask.SPEECH_RECOGNITION:
        return await audio.recognise(request, raw)
    kind, answer = _ROOT[task]
    return await answer(request, with_model(request, await parsed(request, raw, kind)))


def _candidates(request: Request, given: str | None) -> list[ServedModel]:
    """Return the model that the request names, or all models."""
    name = named_model(request, given)
    return [one for one in service_of(request).models.candidates if name in (None, one.name)]


@routes.post(
    "/generate_stream",
    "Generate a stream, as text-generation-inference does",
    json_body(TextGenerationBody, huggingface=_GENERATE),
    replies("An event for each token.", events=(Any,)),
    MODEL_IN_QUERY,
    task="generate",
)
async def generate_stream(request: Request) -> Response:
    """Streams tokens. The last event has `generated_text` and `details`; nothing follows it."""
    body = await read_body(request, TextGenerationBody)
    return await generate.huggingface_answer(request, body, stream=True)


@routes.post(
    "/embed",
    "Embed, as text-embeddings-inference does",
    json_body(EmbedBody, huggingface=_EMBED),
    replies("A vector for each input.", Any),
    MODEL_IN_QUERY,
)
async def embed(request: Request) -> Response:
    """Returns a list of vectors, of length 1 unless `normalize` is false."""
    return await encode.huggingface_answer(request, await read_body(request, EmbedBody))


@routes.post(
    "/rerank",
    "Rerank, as text-embeddings-inference does",
    json_body(RerankBody, RankBody, rerank=_RERANK),
    replies("`index` and `score` of each text, best first.", Any),
    MODEL_IN_QUERY,
)
async def rerank(request: Request) -> Response:
    """Scores are those of /v1/rerank. A body with `documents` is Cohere's."""
    read = await read_one_of(request, RerankBody, _RERANK_BODIES)
    if isinstance(read, RankBody):
        return await ranking.rank(request, read)
    assert isinstance(read, RerankBody)
    served = await ranking.judge_of(request, read)
    asked = huggingface.rerank(read.model_copy(update={"model": served.name}), served)
    with naming_errors(asked.names):
        return await encode.answer(request, asked.body, asked.show, uncounted=asked.uncounted, of_embedder=True)


@routes.post(
    "/predict",
    "Classify, as text-embeddings-inference does",
    json_body(PredictBody, ability=JUDGE),
    replies("Each class, best first.", Any),
    MODEL_IN_QUERY,
)
async def predict(request: Request) -> Response:
    """Requires a model that classifies texts."""
    read = await read_body(request, PredictBody)
    body = read.model_copy(update={"model": (await ranking.classifier_of(request, read)).name})
    with naming_errors(huggingface.ENCODE_NAMES):
        return await encode.answer(request, huggingface.predict(body), huggingface.predict_reply(body))
