"""Finds the model of a request, loads it if necessary, and makes the request hold it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from triptych.service.core.errors import deadline_passed
from triptych.service.core.models import ServedModel, Task
from triptych.service.http.bodies import cancel_on_disconnect, context_of_request
from triptych.service.lifecycle.state import service_of
from triptych.service.planning.admission import deadline_of

T = TypeVar("T")


async def hold_model(request: Request, name: str | None, task: Task, timeout_s: float | None = None) -> None:
    """Hold the model called `name`, or the only one for the task, until the reply has been sent.

    A model that is not loaded is waited for, at most for the request's own time (`timeout_s` of the body) and until the
    client disconnects. Raises `ApiError` as `ModelLoader.hold` does, and a 503 while the service is not ready.
    """
    service, context = service_of(request), context_of_request()
    if service.models.hold_loaded(name, task, context):
        return
    deadline = context.started + (timeout_s or service.limits.request_timeout_s)
    with service.handling():
        await cancel_on_disconnect(request, service.loader.hold(name, task, context, deadline))


async def chat_model(request: Request, name: str | None, timeout_s: float | None = None) -> ServedModel:
    """Hold and return the model called `name`, else the only one with a chat template, else the only generating one."""
    return await _likely_model(request, name, _chats, "has a chat template", timeout_s)


async def filling_model(request: Request, name: str | None, timeout_s: float | None = None) -> ServedModel:
    """Hold and return the model called `name`, else the only one that fills in the middle, else that generates."""
    return await _likely_model(request, name, _fills, "fills in the middle", timeout_s)


async def _likely_model(
    request: Request, name: str | None, able: Callable[[ServedModel], bool], what: str, timeout_s: float | None
) -> ServedModel:
    models = service_of(request).models
    if name is None and any(map(able, models.candidates)):
        name = models.only_one(able, what)
    await hold_model(request, name, Task.GENERATE, timeout_s)
    return models.resolve(name, Task.GENERATE)


def _fills(served: ServedModel) -> bool:
    """Return whether a model fills in the middle, or might once it is loaded."""
    return served.config.can_generate and served.reads_text and (not served.loaded or served.infilling is not None)


def _chats(served: ServedModel) -> bool:
    """Return whether a model has a chat template, or might have one once it is loaded."""
    return served.config.can_generate and (served.chat is not None or not served.loaded) and served.reads_text


async def choose_model(
    request: Request,
    name: str | None,
    able: Callable[[ServedModel], bool],
    what: str,
    timeout_s: float | None = None,
    *,
    task: Task = Task.ENCODE,
    lack: Callable[[ServedModel], str] | None = None,
) -> ServedModel:
    """Hold and return the model called `name`, or the only one that is `able`, of all that are loaded or may be.

    `what` completes the sentence "no model ..."; `lack` returns what a model's folder lacks. A model that is not able
    is refused before it is loaded. Raises `ApiError`: a 400 that names `model` unless exactly one is able; and as
    `hold_model` does.
    """
    models = service_of(request).models
    if name is None:
        name = models.only_one(able, what)
    models.require(name, able, what, lack)
    await hold_model(request, name, task, timeout_s)
    models.require(name, able, what, lack)  # again: a model that is new in the folder is known only now
    return models.resolve(name, task)


async def planned(request: Request, timeout_s: float | None, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` makes of a request for the engine: it decodes files, renders and tokenises texts.

    Raises a 499 when the client disconnects, and a 504 when the request's time is over.
    """
    deadline = deadline_of(context_of_request().started, timeout_s, service_of(request).limits)
    try:
        async with asyncio.timeout(deadline - time.monotonic()) as limit:
            return await cancel_on_disconnect(request, work)
    except TimeoutError:
        if not limit.expired():
            raise
        raise deadline_passed() from None
