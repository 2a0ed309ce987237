"""POST /v1/responses: OpenAI's responses, with the same planner, streams and parts as chat completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.chat.conversation import take_turn
from service.core.errors import invalid, shorten
from service.dialects import responses
from service.dialects.common import naming_errors
from service.dialects.responses_bodies import ResponsesBody
from service.http.bodies import context_of_request, read_body
from service.http.json_replies import Json
from service.http.model_use import chat_model
from service.lifecycle.state import Service, service_of
from service.routes import generate
from service.routes.docs import WORK_ERRORS, error_responses, ok_response, request_body
from service.schemas.conversation_replies import OpenAIResponse, OpenAIResponseEvent

router = APIRouter()


@router.post(
    "/v1/responses",
    summary="Responses, as OpenAI has them",
    response_model=None,
    responses={
        **ok_response("A `response`, or its events.", OpenAIResponse, events=(OpenAIResponseEvent,)),
        **error_responses(*WORK_ERRORS),
    },
    openapi_extra=request_body(ResponsesBody, openai={"model": "code", "input": "Hello", "max_output_tokens": 16}),
)
async def create(request: Request) -> Response:
    """Works with OpenAI's client. Conversations are kept for `previous_response_id` by this process alone.

    Fields that are not known are refused by name.
    """
    body = await read_body(request, ResponsesBody)
    service = service_of(request)
    served = await chat_model(request, body.model, body.timeout_s)
    body = body.model_copy(update={"model": served.name})
    with service.handling(), naming_errors(responses.NAMES):
        before = _previous(service, body)
        conversation = responses.conversation(body, served, before)
        turn = await take_turn(service, served, conversation, answer_is_held=responses.is_held(body))
        keep = _keeper(service, body, [*before, *responses.input_messages(body)])
        return await generate.answer_taken(
            request,
            responses.generate_body(body, served, turn.ids),
            lambda generation: responses.Responses(generation, body, turn.format, keep),
            responses.NAMES,
            turn.shape(service.limits),
        )


def _previous(service: Service, body: ResponsesBody) -> Sequence[Mapping[str, Any]]:
    """Return the messages up to the previous response; raises a 400 if they are not there."""
    if body.store and not service.responses.is_on:
        raise invalid("store: this service keeps no responses", "store", "not_supported")
    if body.previous_response_id is None:
        return ()
    name = "previous_response_id"
    if not service.responses.is_on:
        raise invalid(f"{name}: this service keeps no responses; send the whole conversation", name, "not_supported")
    found = service.responses.get(context_of_request().tenant, body.previous_response_id)
    if found is None:
        message = f"{name}: no response {shorten(body.previous_response_id)} is kept here; send the whole conversation"
        raise invalid(message, name, "previous_response_not_found")
    return found


def _keeper(
    service: Service, body: ResponsesBody, messages: Sequence[Mapping[str, Any]]
) -> Callable[[str, Json], None] | None:
    """Return what keeps the conversation with its answer; None if it is not to be kept."""
    if body.store is False or not service.responses.is_on:
        return None
    tenant = context_of_request().tenant
    return lambda id, answer: service.responses.put(tenant, id, [*messages, answer])
