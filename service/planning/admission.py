"""What every planner asks first: whether the engine has the model and room, and what a request may want."""

from __future__ import annotations

from model.api.stats import ModelInfo
from model.errors import ModelNotLoadedError
from service.core.engine_client import EngineClient
from service.core.errors import REFUSALS, engine_refusal, invalid
from service.core.models import ServedModel
from service.core.request_context import current
from service.settings.service_settings import Limits


def check_room(client: EngineClient, served: ServedModel, sequences: int = 1) -> None:
    """Raise the error of a full or failed engine before a request is rendered, tokenised or compiled for it."""
    context = current()
    if context is not None:
        context.model = served.name
    try:
        client.check_room(served.name, sequences)
    except REFUSALS as error:
        raise engine_refusal(error) from None


def loaded_info(client: EngineClient, served: ServedModel) -> ModelInfo:
    """Return what the engine knows of a model; raises a 503 if it has been unloaded meanwhile."""
    info = client.models.get(served.name)
    if info is None:
        raise engine_refusal(ModelNotLoadedError(served.name))
    return info


def check_request(timeout_s: float | None, priority: int, limits: Limits) -> None:
    """Refuse a request that wants more time, or to come before more others, than it may."""
    check_timeout(timeout_s, limits)
    if priority < limits.min_priority:  # worded to be true for a dialect with negated priorities too
        message = f"priority asks to be served before others, more than min_priority ({limits.min_priority}) allows"
        raise invalid(message, "priority")


def check_timeout(timeout_s: float | None, limits: Limits) -> None:
    """Raise an `ApiError` for a timeout above the limit."""
    if timeout_s is not None and timeout_s > limits.request_timeout_s:
        raise invalid(f"timeout_s must be at most {limits.request_timeout_s:g}", "timeout_s")
