"""Routes by which operators load and unload models; they need an admin key, and are off if none is configured."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from triptych.service.core.errors import deadline_passed, forbidden, invalid, not_found, shorten
from triptych.service.core.models import Models, State
from triptych.service.dialects.common import naming_errors
from triptych.service.http.bodies import context_of_request, json_response, read_body
from triptych.service.http.route_table import BODY_ERRORS, Reply, Routes, json_body, replies
from triptych.service.lifecycle.fleet import LoadOrder
from triptych.service.lifecycle.state import Service, service_of
from triptych.service.schemas.replies import LoadBody, LoraBody, ModelState, ModelStates, UnloadBody, UnloadLoraBody

routes = Routes(access="admin")

_ERRORS = (*BODY_ERRORS, 403, 404, 409, 499, 503)


@routes.get("/models", "Models that are loaded or can be", replies("All known models.", ModelStates), errors=(403,))
async def models(request: Request) -> Response:
    """Lists each model with its state, its memory and where it comes from. Needs an admin key."""
    service = require_admin(request)
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
    service = require_admin(request)
    body = await read_body(request, LoadBody)
    service.check_not_draining()
    order = LoadOrder(body.name, body.path, body.settings, body.pinned, body.adapter_of)
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
    service = require_admin(request)
    body = await read_body(request, UnloadBody)
    before = next((entry for entry in await service.fleet.entries() if entry.name == body.name), None)
    if before is None:
        raise not_found(f"model {shorten(body.name)} is not known; GET /models lists the models", "model_not_found")
    work = service.fleet.begin_unload(body.name, body.drain_s)
    gone = asdict(before) | {"state": "unloaded", "reason": "unloaded by request", "memory_bytes": 0, "requests": 0}
    gone["replicas"] = {"unloaded": sum(before.replicas.values())}
    return await _answer(service, body.name, work, wait=body.wait, gone=gone)


_VLLM_NAMES = {"name": "lora_name", "path": "lora_path", "adapter_of": "base_model_name"}
_VLLM_ERRORS = (*BODY_ERRORS, 403, 404, 409, 499, 503)


@routes.post(
    "/v1/load_lora_adapter",
    "Load a LoRA adapter, as vLLM does",
    json_body(LoraBody),
    replies("It is loaded, on all replicas.", texts=("text/plain",)),
    errors=_VLLM_ERRORS,
)
async def load_lora_adapter(request: Request) -> Response:
    """Loads an adapter as /models/load does, as a model under `lora_name`. Needs an admin key.

    Without `base_model_name` it is for the only model, or the only one that generates. An adapter that
    `load_inplace` replaces is unloaded once the new folder has been read.
    """
    service = require_admin(request)
    body = await read_body(request, LoraBody)
    service.check_not_draining()
    await _load_adapter(service, body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def _load_adapter(service: Service, body: LoraBody) -> None:
    order = LoadOrder(body.lora_name, body.lora_path, adapter_of=body.base_model_name or _only_base(service.models))
    known = service.models.get(body.lora_name)
    if known is not None and known.state is State.LOADED:
        if known.spec.adapter_of is None:
            raise invalid(f"lora_name: {body.lora_name} is a model", "lora_name", "InvalidUserInput")
        if not body.load_inplace:
            message = f"lora_name: the adapter {body.lora_name} is loaded already; load_inplace replaces it"
            raise invalid(message, "lora_name", "InvalidUserInput")
        with naming_errors(_VLLM_NAMES):
            await service.fleet.examine(replace(order, replaces=True))
        await _finished(service, service.fleet.begin_unload(body.lora_name, None))
    context_of_request().model = body.lora_name
    with naming_errors(_VLLM_NAMES):
        work = service.fleet.begin_load(order)
    await _finished(service, work)


def _only_base(models: Models) -> str:
    """Return the name of the only model, or the only one that generates; raises a 400."""
    whole = [one.name for one in models.candidates if not one.adapter_of]
    if len(whole) == 1:
        return whole[0]
    with naming_errors({"model": "base_model_name"}):
        return models.only_one(lambda one: one.config.can_generate, "generates")


@routes.post(
    "/v1/unload_lora_adapter",
    "Unload a LoRA adapter, as vLLM does",
    json_body(UnloadLoraBody),
    replies("It is unloaded, on all replicas.", texts=("text/plain",)),
    errors=_VLLM_ERRORS,
)
async def unload_lora_adapter(request: Request) -> Response:
    """Unloads an adapter as /models/unload does. Needs an admin key."""
    service = require_admin(request)
    body = await read_body(request, UnloadLoraBody)
    known = service.models.get(body.lora_name)
    if known is None or known.spec.adapter_of is None or known.served is None:
        raise not_found(f"lora_name: no adapter is named {shorten(body.lora_name)}", "NotFoundError", "lora_name")
    context_of_request().model = body.lora_name
    await _finished(service, service.fleet.begin_unload(body.lora_name, None))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _finished(service: Service, work: asyncio.Task[None]) -> None:
    """Wait for a load or an unload; raises the `ApiError` with which it ended, or a 504."""
    await asyncio.wait({work}, timeout=service.limits.request_timeout_s)
    if not work.done():
        raise deadline_passed()
    work.result()


def require_admin(request: Request) -> Service:
    """Return the service; raises a 403 if these routes are off. `Guard` has checked the key."""
    service = service_of(request)
    if not service.settings.has_admin:
        message = "this route is for operators and is off: start the service with --admin-key or --admin-key-file"
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
