"""Ollama's routes, with the same planners, streams and replies as /generate and /encode."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from triptych.model.api.request import FinishReason
from triptych.service.chat.conversation import Conversation, Turn, take_turn
from triptych.service.chat.reply_parser import ReplyFormat
from triptych.service.core.context_bound import ContextBound, context_exceeded
from triptych.service.core.errors import ApiError, forbidden, invalid
from triptych.service.core.models import ServedModel, Task
from triptych.service.dialects import ollama
from triptych.service.dialects.common import PromptValue, naming_errors
from triptych.service.dialects.ollama_bodies import (
    OllamaBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    ShowBody,
    WritingBody,
)
from triptych.service.dialects.ollama_info import API_VERSION, listed, moment, running, shown
from triptych.service.http.bodies import (
    context_of_request,
    json_response,
    named_model,
    raw_body,
    read_body,
    with_model,
)
from triptych.service.http.json_replies import Json
from triptych.service.http.model_use import chat_model, hold_model, planned
from triptych.service.http.parsing import parsed
from triptych.service.http.route_table import BODY_ERRORS, Example, Routes, json_body, replies
from triptych.service.lifecycle.state import Service, service_of
from triptych.service.planning.capabilities import CHAT, EMBED, GENERATE
from triptych.service.planning.checks import ReplyShape
from triptych.service.planning.requests import output_room
from triptych.service.routes import encode, generate

B = TypeVar("B", bound=OllamaBody)
W = TypeVar("W", bound=WritingBody)

routes = Routes()

_HELLO = {"messages": [{"role": "user", "content": "{text}"}], "options": {"num_predict": 64}}
_PROMPT = {"prompt": "{text}", "options": {"num_predict": 16}}


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request whose model is held."""

    service: Service
    served: ServedModel
    name: str  # of the model, as the client wrote it
    load_s: float  # seconds until the model was loaded


@routes.post(
    "/api/chat",
    "Chat, as Ollama does",
    json_body(OllamaChatBody, ollama=Example(CHAT, _HELLO)),
    replies("A message, or its lines.", Any, lines=(Any,)),
    task="generate",
)
async def chat(request: Request) -> Response:
    """Works with Ollama's clients. The reply is a stream of lines unless `stream` is false."""
    body, at = await _begun(request, OllamaChatBody, chat_model)
    if isinstance(at, Response):
        return at
    ollama.check(body)  # outside of `naming_errors`, like the conversation: their errors name fields of the body
    with at.service.handling():
        turn = await planned(request, body.timeout_s, _fitting_turn(at, body))
        ollama.check_thinking(body, at.served, turn.format)
        return await _written(request, at, body, turn.ids, ollama.CHAT_NAMES, turn.format, turn.shape())


@routes.post(
    "/api/generate",
    "Answer a prompt, as Ollama does",
    json_body(OllamaGenerateBody, ollama=Example(GENERATE, _PROMPT)),
    replies("A response, or its lines.", Any, lines=(Any,)),
    task="generate",
)
async def generate_text(request: Request) -> Response:
    """A model with a chat template answers the prompt as a message, unless `raw` is true; others continue it."""
    body, at = await _begun(request, OllamaGenerateBody, _writing_model)
    if isinstance(at, Response):
        return at
    ollama.check(body)
    names = ollama.GENERATE_NAMES
    with at.service.handling():
        if body.raw or body.suffix or at.served.chat is None:
            if body.images:
                message = f"images: model {at.served.name} has no chat template, which would give them their place"
                raise invalid(message, "images", "no_chat_template")
            if body.system:
                message = f"system: model {at.served.name} has no chat template, which would put it before the prompt"
                raise invalid(message, "system", "no_chat_template")
            ollama.check_thinking(body, at.served, ReplyFormat())
            prompt = await _plain_prompt(at, body)
            return await _written(request, at, body, prompt, names, ReplyFormat(), ReplyShape(cuts=bool(body.suffix)))
        said = ollama.prompt_conversation(body, at.served)
        turn = await planned(
            request, body.timeout_s, take_turn(at.service, at.served, said, answer_is_held=ollama.is_held(body))
        )
        ollama.check_thinking(body, at.served, turn.format)
        ids = [*(body.context or ()), *_without_start(at, turn.ids, body)]
        return await _written(request, at, body, ids, names, turn.format, turn.shape())


@routes.post(
    "/api/embed",
    "Embed, as Ollama does",
    json_body(OllamaEmbedBody, ollama=Example(EMBED, {"input": ["a cat on a mat", "a kitten on a rug"]})),
    replies("A vector for each text.", Any),
    task="encode",
)
async def embed(request: Request) -> Response:
    """Returns vectors of length 1, of a model that was trained to make them."""
    body, name = await _read(request, OllamaEmbedBody)
    at = await _embedder(request, body, name)
    if not body.input:
        return await _nothing(at, {"model": at.name, "embeddings": []})
    return await encode.answer(request, ollama.embed(body), ollama.embed_reply(at.name, at.load_s), of_embedder=True)


@routes.post(
    "/api/embeddings",
    "Embed one text, as older clients of Ollama do",
    json_body(OllamaEmbeddingsBody, ollama=Example(EMBED, {"prompt": "a cat on a mat"})),
    replies("A vector.", Any),
    task="encode",
)
async def embeddings(request: Request) -> Response:
    """Returns the vector of a text, normalised only if the model's folder says so."""
    body, name = await _read(request, OllamaEmbeddingsBody)
    at = await _embedder(request, body, name)
    if not body.prompt:
        return await _nothing(at, {"embedding": []})
    with naming_errors(ollama.EMBEDDINGS_NAMES):
        return await encode.answer(request, ollama.embeddings(body), ollama.embeddings_reply, of_embedder=True)


@routes.get("/api/tags", "Models, as Ollama lists them", replies("The models.", Any))
async def tags(request: Request) -> Response:
    """Lists the models that write or embed text, as `NAME:latest`. Sizes of models that are not loaded are 0."""
    return json_response({"models": listed(service_of(request))})


@routes.get("/api/ps", "Loaded models, as Ollama lists them", replies("The models.", Any))
async def ps(request: Request) -> Response:
    """Lists the loaded models, with their memory and the time at which they are unloaded."""
    return json_response({"models": running(service_of(request))})


@routes.post(
    "/api/show",
    "One model, as Ollama shows it",
    json_body(ShowBody, ollama=Example(GENERATE, {})),
    replies("The model.", Any),
    errors=(*BODY_ERRORS, 404),
)
async def show(request: Request) -> Response:
    """Describes a model: its abilities, context length and sampling defaults. Loads nothing."""
    body = await read_body(request, ShowBody)
    service, name = service_of(request), named_model(request, body.model or body.name)
    if name is None:
        raise invalid("model is required", "model", "missing_field")
    served = service.models.candidate(name)
    if served is None or name not in service.models.names:
        raise service.models.unknown(name)
    return json_response(shown(service, served))


@routes.get("/api/version", "The version, as Ollama tells it", replies("The version of Ollama's API.", Any))
async def version(request: Request) -> Response:
    """Returns the version of Ollama whose API this is; the service's own is in /info."""
    return json_response({"version": API_VERSION})


_INSTEAD = (
    "models are not pulled, made or removed by this API. Start the service with the model (triptych serve NAME), put "
    "its folder into --models-dir, or load it with an admin key (POST /models/load)"
)


@routes.hidden("POST", "/api/pull")
@routes.hidden("POST", "/api/push")
@routes.hidden("POST", "/api/create")
@routes.hidden("POST", "/api/copy")
@routes.hidden("DELETE", "/api/delete")
@routes.hidden("POST", "/api/blobs/{digest}")
async def refuse(request: Request) -> Response:
    """Refuses to change which models there are."""
    raise forbidden(_INSTEAD, "not_available")


async def _read(request: Request, model: type[B]) -> tuple[B, str | None]:
    """Return the body, with the name that the model has here, and the name that the client wrote."""
    body = await parsed(request, await raw_body(request), model)
    return with_model(request, body), body.model


async def _writing_model(request: Request, model: str | None, timeout_s: float | None) -> ServedModel:
    await hold_model(request, model, Task.GENERATE, timeout_s)
    return service_of(request).models.resolve(model, Task.GENERATE)


async def _begun(
    request: Request, model: type[W], hold: Callable[[Request, str | None, float | None], Awaitable[ServedModel]]
) -> tuple[W, _Prepared | Response]:
    """Read a body and hold its model; a body that asks nothing gets its reply, and loads or unloads the model."""
    body, name = await _read(request, model)
    if not body.asks and body.keep_alive == 0:
        return body, await _unload(request, body, name)
    at = _held(request, body, name, await hold(request, body.model, body.timeout_s))
    return body, at if body.asks else await _nothing(at, ollama.empty_reply(body, at.name, moment(), "load"))


def _held(request: Request, body: OllamaBody, name: str | None, served: ServedModel) -> _Prepared:
    """Return a request whose model is held, and let the model stay loaded as long as the request says."""
    service, context = service_of(request), context_of_request()
    context.model = served.name
    if body.keep_alive is not None:
        service.models[served.name].keep_alive_s = float(body.keep_alive)
    return _Prepared(service, served, name or served.name, time.monotonic() - context.started)


async def _embedder(request: Request, body: OllamaEmbedBody | OllamaEmbeddingsBody, name: str | None) -> _Prepared:
    await hold_model(request, body.model, Task.ENCODE, body.timeout_s)
    return _held(request, body, name, service_of(request).models.resolve(body.model, Task.ENCODE))


async def _unload(request: Request, body: WritingBody, name: str | None) -> Response:
    """Unload a model once no request uses it, and reply at once."""
    service = service_of(request)
    found = service.models.choose(body.model, Task.GENERATE)
    service.loader.release(found)
    served = service.models.candidate(found)
    assert served is not None
    at = _Prepared(service, served, name or found, 0.0)
    return await _nothing(at, ollama.empty_reply(body, at.name, moment(), "unload"))


async def _nothing(at: _Prepared, reply: Json) -> Response:
    """Reply to a request that generates nothing; it counts as a request without tokens."""
    context = context_of_request()
    context.model = at.served.name
    with at.service.handling():
        job = at.service.jobs.open(context, ())
        at.service.jobs.accept(job)
        job.end(FinishReason.STOP)
        await job.aclose()
    return json_response(reply)


async def _fitting_turn(at: _Prepared, body: OllamaChatBody) -> Turn:
    """Render a chat; unless `truncate` is false, the oldest messages are left out until it fits the context.

    System messages stay, and the conversation begins with a message of the user.
    """
    said = ollama.chat_conversation(body, at.served)
    starts = [place for place, one in enumerate(said.messages) if place and one["role"] == "user"]

    async def rendered(start: int) -> Turn:
        kept = [one for place, one in enumerate(said.messages) if place >= start or one["role"] == "system"]
        conversation: Conversation = replace(said, messages=kept)
        turn = await take_turn(at.service, at.served, conversation, answer_is_held=ollama.is_held(body))
        info = at.service.model_info(at.served.name)
        if output_room(at.served, info, len(turn.ids)) < 1:
            found = f"messages has {len(turn.ids)} prompt tokens, which leaves no room for an answer"
            raise context_exceeded(info.max_model_len, found, "messages")
        return turn

    try:
        return await rendered(0)
    except ApiError as error:
        if error.code != "context_length_exceeded" or body.truncate is False or not starts:
            raise
    low, high, found = 0, len(starts) - 1, await rendered(starts[-1])
    while low < high:
        middle = (low + high) // 2
        try:
            found, high = await rendered(starts[middle]), middle
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            low = middle + 1
    return found


async def _plain_prompt(at: _Prepared, body: OllamaGenerateBody) -> PromptValue:
    """Return the prompt without a template: tokens, after those of `context`; or the source of an encoder-decoder."""
    text, served, limits = body.prompt or "", at.served, at.service.limits
    if body.suffix:
        return text  # whose tokens depend on the suffix
    if served.is_encoder_decoder:
        if body.context:
            raise invalid(f"context: model {served.name} reads one text and continues none", "context", "wrong_task")
        return text
    tokenizer, length = served.require_tokenizer("prompt"), at.service.model_info(served.name).max_model_len
    ContextBound(length, limits.prompt_characters_per_token, limits.max_text_bytes).check(text, "prompt")

    def work() -> tuple[int, ...]:
        return tokenizer.encode(text, add_special_tokens=not body.context).ids

    return [*(body.context or ()), *await at.service.threads.run(served.name, len(text), work)]


def _without_start(at: _Prepared, ids: list[int], body: OllamaGenerateBody) -> list[int]:
    """Return the tokens of a prompt; after a `context` without the token that begins a text."""
    return ids[1:] if body.context and ids[0] == at.served.config.bos_token_id else ids


async def _written(
    request: Request,
    at: _Prepared,
    body: WritingBody,
    prompt: PromptValue,
    names: Mapping[str, str],
    format: ReplyFormat,
    shape: ReplyShape,
) -> Response:
    """Generate the reply to a prompt."""
    if isinstance(body, OllamaGenerateBody) and body.context:
        names = {**names, "prompt": "context"}  # whose tokens come first
    info = at.service.model_info(at.served.name)
    read = info.max_model_len // 2 if isinstance(prompt, str) else len(prompt)
    room = output_room(at.served, info, read)
    with naming_errors(names):
        found = ollama.generate_body(body, at.served, prompt, room, with_ids=ollama.gives_context(body))
        found = found.model_copy(update={"model": at.served.name})
        return await generate.answer_in_handling(
            request, found, lambda one: ollama.OllamaReply(one, body, format, at.name, at.load_s), names, shape
        )
