"""OpenAI's routes over the same planners, streams and replies as /generate and /encode."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.core.errors import invalid
from service.core.model_registry import ServedModel, Task
from service.dialects import openai
from service.dialects.common import speaking
from service.dialects.openai_bodies import ChatBody, CompletionBody, EmbeddingBody
from service.dialects.openai_replies import ChatCompletions, Completions
from service.http.bodies import read_body
from service.lifecycle.state import Service, service_of
from service.planning.generate import check_room
from service.routes import encode, generate
from service.routes.docs import WORK_ERRORS, body, errors, ok
from service.schemas.dialect_replies import OpenAIChatChunk, OpenAIChatCompletion, OpenAICompletion, OpenAIEmbeddings

router = APIRouter()

_COMPLETION = {"model": "code", "prompt": "def add(a, b):\n    ", "max_tokens": 16}
_CHAT = {"model": "code", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
_EMBEDDING = {"model": "embed", "input": ["a cat on a mat", "a kitten on a rug"]}


@router.post(
    "/v1/completions",
    summary="Completions, as OpenAI has them",
    response_model=None,
    responses={
        **ok("A `text_completion`, or its events.", OpenAICompletion, events=(OpenAICompletion,)),
        **errors(*WORK_ERRORS),
    },
    openapi_extra=body(CompletionBody, openai=_COMPLETION),
)
async def completions(request: Request) -> Response:
    """Spoken by OpenAI's client. `max_tokens` is 16 unless told, `temperature` the checkpoint's or 1."""
    asked = await read_body(request, CompletionBody)
    served = service_of(request).registry.resolve(asked.model, Task.GENERATE)
    with speaking(names := openai.completion_names(asked)):
        found = openai.completion(asked, served)
        return await generate.answer(request, found, lambda generation: Completions(generation, asked), names)


@router.post(
    "/v1/chat/completions",
    summary="Chat completions, as OpenAI has them",
    response_model=None,
    responses={
        **ok("A `chat.completion`, or its events.", OpenAIChatCompletion, events=(OpenAIChatChunk,)),
        **errors(*WORK_ERRORS),
    },
    openapi_extra=body(ChatBody, openai=_CHAT),
)
async def chat_completions(request: Request) -> Response:
    """Spoken by OpenAI's client. The checkpoint's chat template makes the prompt; a model without one is a 400."""
    asked = await read_body(request, ChatBody)
    service = service_of(request)
    served = service.registry.resolve(asked.model, Task.GENERATE)
    with service.taking():
        prompt = await _prompt(service, served, asked)  # whose errors name what a chat has
        with speaking(names := openai.chat_names(asked)):
            found = openai.chat(asked, served, prompt)
            return await generate.answer_taken(
                request, found, lambda generation: ChatCompletions(generation, asked), names
            )


@router.post(
    "/v1/embeddings",
    summary="Embeddings, as OpenAI has them",
    response_model=None,
    responses={**ok("A list of `embedding`s.", OpenAIEmbeddings), **errors(*WORK_ERRORS)},
    openapi_extra=body(EmbeddingBody, openai=_EMBEDDING),
)
async def embeddings(request: Request) -> Response:
    """Spoken by OpenAI's client, which asks for base64 unless told otherwise."""
    asked = await read_body(request, EmbeddingBody)
    return await encode.answer(request, openai.embedding(asked), openai.embedding_reply)


async def _prompt(service: Service, served: ServedModel, asked: ChatBody) -> list[int]:
    """The ids of the conversation; the template writes its special tokens itself."""
    if served.chat is None:
        message = f"model {served.name} has no chat template; /v1/completions and /generate take plain prompts"
        raise invalid(message, "model", "no_chat_template")
    if len(asked.messages) > service.limits.max_chat_messages:
        bound = service.limits.max_chat_messages
        raise invalid(f"messages has {len(asked.messages)} entries, more than {bound}", "messages")
    tokenizer = served.require_tokenizer("messages")
    check_room(service.client, served)
    text = await _rendered(service, served, asked)
    ids = await service.threads.run(
        served.name, len(text), lambda: tokenizer.encode(text, add_special_tokens=False).ids
    )
    if not ids:
        raise invalid("messages make an empty prompt", "messages", "empty_prompt")
    return list(ids)


async def _rendered(service: Service, served: ServedModel, asked: ChatBody) -> str:
    assert served.chat is not None
    messages = [openai.message(one, f"messages[{at}]") for at, one in enumerate(asked.messages)]
    limit = service.limits.prompt_characters_per_token * service.model_info(served.name).max_model_len
    if asked.continue_final_message:
        if asked.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise invalid(message, "continue_final_message")
        return await served.chat.continued(service.renderers, messages, limit)
    to_speak = asked.add_generation_prompt is not False
    return await served.chat.render(service.renderers, messages, limit, add_generation_prompt=to_speak)
