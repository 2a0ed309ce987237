"""Finds the model of a request, and makes the request hold it; it may have to be loaded first."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request

from service.core.models import ServedModel, Task
from service.http.bodies import cancel_on_disconnect, context_of_request
from service.lifecycle.state import service_of


async def hold_model(request: Request, name: str | None, task: Task, timeout_s: float | None = None) -> None:
    """Hold the model called `name`, or the only one for the task, until the reply has been sent.

    Waits for a model that is not loaded within the request's own time (`timeout_s`, of the body), and stops waiting
    when the client disconnects. Raises `ApiError` as `ModelLoader.hold` does, 503 while the service is not ready.
    """
    service, context = service_of(request), context_of_request()
    if service.models.hold_loaded(name, task, context):
        return
    deadline = context.started + (timeout_s or service.limits.request_timeout_s)
    with service.handling():
        await cancel_on_disconnect(request, service.loader.hold(name, task, context, deadline))


async def chat_model(request: Request, name: str | None, timeout_s: float | None = None) -> ServedModel:
    """Hold and return the model called `name`, or the only one that has a chat template, if any generating one has."""
    models = service_of(request).models
    if name is None and any(map(_chats, models.candidates)):
        name = models.only_one(_chats, "has a chat template")
    await hold_model(request, name, Task.GENERATE, timeout_s)
    return models.resolve(name, Task.GENERATE)


def _chats(served: ServedModel) -> bool:
    """Return whether a model has a chat template; one that is not loaded, whether it may."""
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
    """Hold and return the model called `name`, or the only one that is `able`, of those that are loaded or may be.

    `what` says what it must be able to: "no model ...", and `lack` what a model's folder lacks for it. A model that is
    not able is refused before it is loaded. Raises `ApiError`: a 400 that names `model` if there is none, or several;
    and as `hold_model` does.
    """
    models = service_of(request).models
    if name is None:
        name = models.only_one(able, what)
    models.require(name, able, what, lack)
    await hold_model(request, name, task, timeout_s)
    models.require(name, able, what, lack)  # known by now, if it has just been put into the folder of models
    return models.resolve(name, task)
