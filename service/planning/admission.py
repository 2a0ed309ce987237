"""The first checks of every planner: model and room in the engine, timeout and priority of the request."""

from __future__ import annotations

from triptych.model.api.stats import ModelInfo
from triptych.model.errors import ModelNotLoadedError
from triptych.service.core.engine_client import EngineClient
from triptych.service.core.errors import REFUSALS, engine_refusal, invalid
from triptych.service.core.models import ServedModel
from triptych.service.core.request_context import current, tenant_id
from triptych.service.settings.service_settings import Limits

_BACKGROUND_SECONDS = 86_400.0


def check_room(client: EngineClient, served: ServedModel, sequences: int = 1) -> None:
    """Raise the error of a full or failed engine before any work is done for the request."""
    context = current()
    if context is not None:
        context.model = served.name
    try:
        client.check_room(served.name, sequences, tenant_id())
    except REFUSALS as error:
        raise engine_refusal(error) from None


def loaded_info(client: EngineClient, served: ServedModel) -> ModelInfo:
    """Return the engine's description of a model; raises a 503 if the model has just been unloaded."""
    info = client.models.get(served.name)
    if info is None:
        raise engine_refusal(ModelNotLoadedError(served.name))
    return info


def check_request(timeout_s: float | None, priority: int, limits: Limits) -> None:
    """Raise an `ApiError` for a timeout above the limit, or a priority below it (lower is served first)."""
    check_timeout(timeout_s, limits)
    if priority < limits.min_priority:  # the message must also be true for a dialect with negated priorities
        message = f"priority asks to be served before others, more than min_priority ({limits.min_priority}) allows"
        raise invalid(message, "priority")


def deadline_of(arrival: float, timeout_s: float | None, limits: Limits) -> float:
    """Return the deadline of a request; background work without a `timeout_s` may be paused for long."""
    context = current()
    background = context is not None and context.is_background
    return arrival + (timeout_s or (_BACKGROUND_SECONDS if background else limits.request_timeout_s))


def check_timeout(timeout_s: float | None, limits: Limits) -> None:
    """Raise an `ApiError` for a timeout above the limit."""
    if timeout_s is not None and timeout_s > limits.request_timeout_s:
        raise invalid(f"timeout_s must be at most {limits.request_timeout_s:g}", "timeout_s")
