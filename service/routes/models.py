"""Routes by which operators load and unload models; they need an admin key, and are off if none is configured."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from triptych.service.core.errors import forbidden, not_found, shorten
from triptych.service.http.bodies import context_of_request, json_response, read_body
from triptych.service.http.route_table import BODY_ERRORS, Reply, Routes, json_body, replies
from triptych.service.lifecycle.fleet import LoadOrder
from triptych.service.lifecycle.state import Service, service_of
from triptych.service.schemas.replies import LoadBody, ModelState, ModelStates, UnloadBody

routes = Routes(access="admin")

_ERRORS = (*BODY_ERRORS, 403, 404, 409, 499, 503)


@routes.get("/models", "Models that are loaded or can be", replies("All known models.", ModelStates), errors=(403,))
async def models(request: Request) -> Response:
    """Lists each model with its state, its memory and where it comes from. Needs an admin key."""
    service = _service(request)
    reply = {
        "models": [asdict(entry) for entry in await service.fleet.entries()],
        "memory_bytes": service.loader.memory_used,
        "memory_limit": service.settings.models.memory,
    }
    return json_response(reply)


@routes.post(
    "/models/load",
    "Load a model",
    json_body(LoadBody),
    {
        200: Reply("It is loaded, on all replicas.", (ModelState,)),
        202: Reply("It is being loaded; `GET /models` tells how it ended.", (ModelState,)),
    },
    errors=_ERRORS,
)
async def load(request: Request) -> Response:
    """Loads a model in addition to those that are served. If that fails, nothing changes. Needs an admin key.

    Loading continues when the client disconnects; /models/unload stops it. A reply is sent after `request_timeout_s`
    at the latest.
    """
    service = _service(request)
    body = await read_body(request, LoadBody)
    service.check_not_draining()
    order = LoadOrder(body.name, body.path, body.settings, body.pinned)
    return await _answer(service, body.name, service.fleet.begin_load(order), wait=body.wait)


@routes.post(
    "/models/unload",
    "Unload a model",
    json_body(UnloadBody),
    {
        200: Reply("It is unloaded, on all replicas, and its memory is free.", (ModelState,)),
        202: Reply("It is being unloaded.", (ModelState,)),
    },
    errors=_ERRORS,
)
async def unload(request: Request) -> Response:
    """Refuses new requests for a model, waits for the running ones, and frees its memory. Needs an admin key.

    Unloading a model that is being loaded stops the loading. A model of `--models-dir` becomes available again: the
    next request for it loads it.
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
    """Return the service; raises a 403 if these routes are off. `Guard` has checked the key."""
    service = service_of(request)
    if not service.settings.has_admin:
        message = "models are loaded and unloaded by request only with an admin key: set --admin-key"
        raise forbidden(message, "admin_disabled")
    return service


async def _answer(
    service: Service, name: str, work: asyncio.Task[None], *, wait: bool, gone: object = None
) -> Response:
    """Reply with the model's state when `work` has ended, or at once; with `gone` if the model is no longer known."""
    context_of_request().model = name
    if wait:
        await asyncio.wait({work}, timeout=service.limits.request_timeout_s)
    else:
        await asyncio.sleep(0)
    if work.done():
        work.result()
    entry = next((one for one in await service.fleet.entries() if one.name == name), None)
    return json_response(asdict(entry) if entry is not None else gone, 200 if work.done() else 202)
