"""OpenAI's routes, with the same planners, streams and replies as /generate and /encode."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from triptych.service.chat.conversation import take_turn
from triptych.service.core.models import Task
from triptych.service.dialects import embeddings as embedding_dialect
from triptych.service.dialects import openai
from triptych.service.dialects.common import naming_errors
from triptych.service.dialects.embeddings import EmbeddingBody
from triptych.service.dialects.openai_bodies import ChatBody, CompletionBody
from triptych.service.dialects.openai_replies import ChatCompletions, Completions
from triptych.service.http.bodies import read_body
from triptych.service.http.model_use import chat_model, hold_model, planned
from triptych.service.http.route_table import Example, Routes, json_body, replies
from triptych.service.lifecycle.state import service_of
from triptych.service.planning.capabilities import CHAT, COMPLETE, EMBED
from triptych.service.routes import encode, generate

routes = Routes("generate")

_COMPLETION = Example(COMPLETE, {"prompt": "{text}", "max_tokens": 16})
_CHAT = Example(CHAT, {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}, own=True)
_EMBEDDING = Example(EMBED, {"input": ["a cat on a mat", "a kitten on a rug"]})


@routes.post(
    "/v1/completions",
    "Completions, as OpenAI has them",
    json_body(CompletionBody, openai=_COMPLETION),
    replies("A `text_completion`, or its events.", Any, events=(Any,)),
)
async def completions(request: Request) -> Response:
    """Works with OpenAI's client. `max_tokens` is 16 by default, `temperature` the checkpoint's or 1."""
    body = await read_body(request, CompletionBody)
    service = service_of(request)
    await hold_model(request, body.model, Task.GENERATE)
    served = service.models.resolve(body.model, Task.GENERATE)
    openai.check_completion(body)  # outside of `naming_errors`: its errors name fields of a completion
    with naming_errors(names := openai.completion_names(body)):
        found = openai.completion(body, served)
        return await generate.answer(request, found, lambda generation: Completions(generation, body), names)


@routes.post(
    "/v1/chat/completions",
    "Chat completions, as OpenAI has them",
    json_body(ChatBody, openai=_CHAT),
    replies("A `chat.completion`, or its events.", Any, events=(Any,)),
)
async def chat_completions(request: Request) -> Response:
    """Works with OpenAI's client. The checkpoint's chat template makes the prompt; a model without one gets a 400."""
    body = await read_body(request, ChatBody)
    service = service_of(request)
    served = await chat_model(request, body.model, body.timeout_s)
    body = body.model_copy(update={"model": served.name})
    with service.handling():
        openai.check_chat(body)  # outside of `naming_errors`, like the next lines: their errors name fields of a chat
        conversation = openai.conversation(body, served)
        turn = await planned(
            request, body.timeout_s, take_turn(service, served, conversation, answer_is_held=openai.is_held(body))
        )
        with naming_errors(names := openai.chat_names(body)):
            found = openai.chat(body, served, turn.ids, with_ids=turn.format.reasoning is not None)
            shape = turn.shape()
            return await generate.answer_in_handling(
                request, found, lambda generation: ChatCompletions(generation, body, turn.format), names, shape
            )


@routes.post(
    "/v1/embeddings",
    "Embeddings, as OpenAI, Jina and vLLM have them",
    json_body(EmbeddingBody, openai=_EMBEDDING),
    replies("A list of `embedding`s.", Any),
    task="encode",
)
async def embeddings(request: Request) -> Response:
    """Works with OpenAI's client, which requests base64 by default, and takes Jina's and vLLM's fields.

    Fields that are not known are refused by name.
    """
    body = await read_body(request, EmbeddingBody)
    with naming_errors(embedding_dialect.names(body)):
        asked = embedding_dialect.embedding(body)
        return await encode.answer(request, asked, embedding_dialect.embedding_reply(body), of_embedder=True)
