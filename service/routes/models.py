"""Routes for operators that load and unload models. They need an admin key, and are off without one configured."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.core.errors import forbidden, not_found, shorten
from service.http.bodies import context_of_request, json_response, read_body
from service.http.route_docs import BODY_ERRORS, error_responses, request_body
from service.lifecycle.fleet import LoadOrder
from service.lifecycle.state import Service, service_of
from service.schemas.models import LoadBody, ModelState, ModelStates, UnloadBody

router = APIRouter()

_ERRORS = error_responses(*BODY_ERRORS, 403, 404, 409, 499, 503)


@router.get(
    "/models",
    summary="Models that are loaded or can be",
    response_model=None,
    responses={200: {"model": ModelStates, "description": "All known models."}, **error_responses(403)},
)
async def models(request: Request) -> Response:
    """Lists each model with its state, its memory and where it comes from. Needs an admin key."""
    service = _service(request)
    reply = {
        "models": [asdict(entry) for entry in await service.fleet.entries()],
        "memory_bytes": service.loader.memory_used,
        "memory_limit": service.settings.models.memory,
    }
    return json_response(reply)


@router.post(
    "/models/load",
    summary="Load a model",
    response_model=None,
    responses={
        200: {"model": ModelState, "description": "It is loaded, on all replicas."},
        202: {"model": ModelState, "description": "It is being loaded; `GET /models` tells how it ended."},
        **_ERRORS,
    },
    openapi_extra=request_body(LoadBody),
)
async def load(request: Request) -> Response:
    """Loads a model beside those that are served. If that fails, nothing changes. Needs an admin key.

    Loading goes on when the client disconnects; /models/unload gives it up. A reply is sent after `request_timeout_s`
    at the latest.
    """
    service = _service(request)
    body = await read_body(request, LoadBody)
    service.check_not_draining()
    order = LoadOrder(body.name, body.path, body.settings, body.pinned)
    return await _answer(service, body.name, service.fleet.begin_load(order), wait=body.wait)


@router.post(
    "/models/unload",
    summary="Unload a model",
    response_model=None,
    responses={
        200: {"model": ModelState, "description": "It is unloaded, on all replicas, and its memory is free."},
        202: {"model": ModelState, "description": "It is being unloaded."},
        **_ERRORS,
    },
    openapi_extra=request_body(UnloadBody),
)
async def unload(request: Request) -> Response:
    """Refuses new requests for a model, waits for the running ones, and frees its memory. Needs an admin key.

    A model that is being loaded is given up. One of `--models-dir` is available again, and the next request for it
    loads it.
    """
    service = _service(request)
    body = await read_body(request, UnloadBody)
    before = next((entry for entry in await service.fleet.entries() if entry.name == body.name), None)
    if before is None:
        raise not_found(f"model {shorten(body.name)} is not known; GET /models lists the models", "model_not_found")
    work = service.fleet.begin_unload(body.name, body.drain_s)
    gone = asdict(before) | {"state": "unloaded", "reason": "unloaded by request", "memory_bytes": 0, "requests": 0}
    gone["replicas"] = {"unloaded": sum(before.replicas.values())}
    return await _answer(service, body.name, work, wait=body.wait, gone=gone)


def _service(request: Request) -> Service:
    """Return the service; raises a 403 while these routes are off. `Guard` has checked the key."""
    service = service_of(request)
    if not service.settings.has_admin:
        message = "models are loaded and unloaded by request only with an admin key: set --admin-key"
        raise forbidden(message, "admin_disabled")
    return service


async def _answer(
    service: Service, name: str, work: asyncio.Task[None], *, wait: bool, gone: object = None
) -> Response:
    """Reply with the model's state when `work` has ended, or at once; `gone` if the model is not known any more."""
    context_of_request().model = name
    if wait:
        await asyncio.wait({work}, timeout=service.limits.request_timeout_s)
    else:
        await asyncio.sleep(0)
    if work.done():
        work.result()
    entry = next((one for one in await service.fleet.entries() if one.name == name), None)
    return json_response(asdict(entry) if entry is not None else gone, 200 if work.done() else 202)
