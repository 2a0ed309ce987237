"""Routes for operators: health, models, metrics, and cancellation of requests."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from triptych.model.checkpoint.folder import Checkpoint
from triptych.service.chat.abilities import chat_abilities
from triptych.service.core.errors import not_found, shorten
from triptych.service.core.models import ServedModel
from triptych.service.dialects.anthropic_models import (
    MOST_OF_A_PAGE,
    VERSION_HEADER,
    anthropic_model,
    anthropic_models,
    context_length,
)
from triptych.service.dialects.huggingface_info import huggingface_info
from triptych.service.http.bodies import json_response, page_limit
from triptych.service.http.json_replies import Json
from triptych.service.http.route_table import Routes, in_path, replies
from triptych.service.lifecycle.state import Service, service_of
from triptych.service.planning.capabilities import capabilities
from triptych.service.planning.outputs.registry import available
from triptych.service.schemas.replies import CancelReply, HealthReply, InfoReply, ModelCard, ModelsReply

routes = Routes()


@routes.get(
    "/livez", "Is it alive?", replies("The engines' step loop moves.", HealthReply), errors=(503,), access="open"
)
async def livez(request: Request) -> Response:
    """Reports whether the engines make progress. Needs no key."""
    service_of(request).check_live()
    return json_response({"status": "ok"})


_READY = replies("Models are loaded and work is taken.", HealthReply)


@routes.get("/readyz", "Does it take work?", _READY, errors=(503,), access="open")
async def readyz(request: Request) -> Response:
    """Reports whether new requests are accepted; the error's message is the reason if not. Needs no key."""
    service_of(request).check_ready()
    return json_response({"status": "ok"})


@routes.get("/health", "Does it take work, as other servers say it?", _READY, errors=(503,), access="open")
async def health(request: Request) -> Response:
    """Does what /readyz does, under the name that clients of other servers use. Needs no key."""
    return await readyz(request)


@routes.get("/info", "Models, limits, versions", replies("What is served and how.", InfoReply))
async def info(request: Request) -> Response:
    """Describes each model, its device and attention backend, and all limits on a request.

    A model whose `state` is `available` is loaded when a request names it. Until then it lacks the fields that the
    engine determines.
    """
    service = service_of(request)
    versions = {"python": platform.python_version()}
    for one in service.client.models.values():
        versions |= one.versions
    reply = {
        "name": "triptych",
        "version": service.version,
        "versions": versions,
        "models": [
            *(_model(service, served) for served in service.models.loaded),
            *(_from_checkpoint(one, "available") for one in service.models.available),
        ],
        "elsewhere": service.models.elsewhere,
        "asks_for_key": service.settings.asks_for_key,
        "embed_cache": _embed_cache(service),
        "resident_bytes": service.client.resident_memory(),
        "confinement": asdict(service.confinement),
        "limits": asdict(service.limits),
        "max_state_bytes": service.settings.max_state_bytes if service.state_folder is not None else None,
        **huggingface_info(service),
    }
    return json_response(reply)


@routes.get("/metrics", "Prometheus metrics", replies("Prometheus text format.", texts=("text/plain",)))
async def metrics(request: Request) -> Response:
    """Returns counters, gauges and histograms, whose names begin with `triptych_`, and `process_*` of this process.

    A request with `Accept: application/openmetrics-text` gets OpenMetrics, where latencies name the trace of a request.
    """
    service = service_of(request)
    text, content_type = await service.metrics.scrape(service.client, request.headers.get("accept", ""))
    return Response(text, headers={"Content-Type": content_type})


@routes.get(
    "/v1/models/{id:path}",
    "One model, as OpenAI shows it",
    replies("The model.", ModelCard, Any),
    in_path("id", "The model's name."),
    errors=(404,),
)
async def model(request: Request) -> Response:
    """Returns a model if it is loaded; with the header `anthropic-version` in the form of Anthropic's API."""
    service, name = service_of(request), request.path_params["id"]
    if name not in service.models.names:
        raise service.models.unknown(name)
    shown = anthropic_model if VERSION_HEADER in request.headers else card
    return json_response(shown(service, name))


def card(service: Service, name: str) -> Json:
    """Return a `ModelCard`."""
    found = service.models.candidate(name)
    base = found.adapter_of if found is not None else ""
    card = {"id": name, "object": "model", "created": service.created, "owned_by": "triptych"}
    return card | {"root": base or name, "parent": base or None, "max_model_len": context_length(service, name)}


@routes.get("/v1/models", "Models, as OpenAI lists them", replies("The models.", ModelsReply, Any), errors=(400,))
async def models(request: Request) -> Response:
    """Lists the names to use as `model`; with the header `anthropic-version` as pages of Anthropic's API."""
    service = service_of(request)
    if VERSION_HEADER in request.headers:
        limit = page_limit(request, 20, MOST_OF_A_PAGE)
        return json_response(anthropic_models(service, request.query_params, limit))
    return json_response({"object": "list", "data": [card(service, name) for name in service.models.names]})


@routes.delete(
    "/requests/{id}",
    "Cancel a request",
    replies("It was told to end.", CancelReply),
    in_path("id", "The request id, as sent or as `X-Request-Id` of the reply."),
    errors=(404, 503),
)
async def cancel(request: Request) -> Response:
    """Ends all running requests with this id; each replies with its output so far and finish_reason `cancelled`."""
    request_id = request.path_params["id"]
    ended = await service_of(request).cancel(request_id)
    if not ended:
        raise not_found(f"no request {shorten(request_id)} is running", "request_not_found", "id")
    return json_response({"id": request_id, "cancelled": ended})


def _embed_cache(service: Service) -> Json | None:
    """Return the size and use of the cache of results; None if there is no cache."""
    if service.embed_cache is None:
        return None
    store = service.embed_cache.store
    return {"max_bytes": store.max_bytes, "bytes": store.size, "entries": len(store)}


def _model(service: Service, served: ServedModel) -> Json:
    """Return the description of a loaded model from its engine, checkpoint and settings."""
    info = service.client.models.get(served.name)
    described = _from_checkpoint(served, "loaded")
    if info is not None:
        described |= asdict(info)
        del described["versions"]
    tokenizer, settings = served.tokenizer, service.settings
    return described | {
        "chat": chat_abilities(
            served.chat, served.chat_problem, tools=settings.tool_format, reasoning=settings.reasoning_format
        )
        if served.config.can_generate
        else None,
        "has_tokenizer": tokenizer is not None,
        "mask_token": tokenizer.mask_token if tokenizer is not None else None,
        "outputs": available(served),
        "examples": served.examples,
        "capabilities": [one.to_json() for one in capabilities(served)],
    }


def _speech(checkpoint: Checkpoint) -> Json | None:
    """Return the speech abilities of a model that reads audio; None for any other model."""
    tokens, log_mel = checkpoint.speech, checkpoint.log_mel
    if tokens is None or log_mel is None:
        return None
    return {
        "languages": sorted(tokens.languages) or ["en"],
        "tasks": sorted(tokens.tasks) or ["transcribe"],
        "words": bool(tokens.alignment_heads),
        "window_seconds": log_mel.chunk_length,
    }


def _from_checkpoint(served: ServedModel, state: str) -> Json:
    """Return the description of a model by its checkpoint alone."""
    checkpoint = served.checkpoint
    config, sentences = checkpoint.config, checkpoint.sentences
    return {
        "name": served.name,
        "state": state,
        "adapter_of": served.adapter_of,
        "form": config.form,
        "model_type": config.model_type,
        "can_generate": config.can_generate,
        "speech": _speech(checkpoint),
        "vocab_size": config.embedding.vocab_size,
        "pooling": "+".join(sentences.pooling),
        "normalize": sentences.normalize,
        "max_input_tokens": sentences.max_tokens,
        "prompts": sorted(sentences.prompts),
        "adapters": list(sentences.adapters),
        "default_prompt": sentences.default_prompt,
        "similarity": sentences.similarity,
        "sampling_defaults": checkpoint.sampling_defaults,
        "tasks": {name: asdict(task) for name, task in sorted(checkpoint.tasks.items())},
    }
