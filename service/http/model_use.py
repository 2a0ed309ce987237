"""Makes a request hold the model that it will use, which may have to be loaded first."""

from __future__ import annotations

from starlette.requests import Request

from service.core.model_registry import Task
from service.http.bodies import cancel_on_disconnect, context_of_request
from service.lifecycle.state import service_of


async def hold_model(request: Request, name: str | None, task: Task, timeout_s: float | None = None) -> None:
    """Hold the model called `name`, or the only one for the task, until the reply has been sent.

    Waits for a model that is not loaded within the request's own time (`timeout_s`, of the body), and stops waiting
    when the client disconnects. Raises `ApiError` as `ModelManager.hold` does, 503 while the service is not ready.
    """
    service, context = service_of(request), context_of_request()
    if service.models.hold_loaded(name, task, context):
        return
    deadline = context.started + (timeout_s or service.limits.request_timeout_s)
    with service.handling():
        await cancel_on_disconnect(request, service.models.hold(name, task, context, deadline))
