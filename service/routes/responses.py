"""OpenAI's responses, with the planner, streams and parts of chat completions, and the routes of stored responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from triptych.service.chat.conversation import count_tokens, take_turn
from triptych.service.core.errors import ApiError, invalid, not_found, shorten, too_large
from triptych.service.core.response_store import ResponseStore, StoredResponse
from triptych.service.dialects import response_items, responses
from triptych.service.dialects.common import naming_errors
from triptych.service.dialects.responses_bodies import AnyItem, InputReference, InputTokensBody, ResponsesBody
from triptych.service.http.bodies import context_of_request, json_response, page_limit, read_body
from triptych.service.http.json_replies import Json
from triptych.service.http.model_use import chat_model, planned
from triptych.service.http.route_table import Example, Routes, in_path, in_query, json_body, replies
from triptych.service.lifecycle.state import Service, service_of
from triptych.service.planning.capabilities import CHAT
from triptych.service.routes import generate

routes = Routes()

B = TypeVar("B", bound=InputTokensBody)

_item: TypeAdapter[Any] = TypeAdapter(AnyItem)
_ID = in_path("response_id", "The id of a response, such as `resp_5f0c1d`.")


@routes.post(
    "/v1/responses",
    "Responses, as OpenAI has them",
    json_body(ResponsesBody, openai=Example(CHAT, {"input": "{text}", "max_output_tokens": 64})),
    replies("A `response`, or its events.", Any, events=(Any,)),
    task="generate",
)
async def create(request: Request) -> Response:
    """Works with OpenAI's client. The replica that answers keeps the conversation for `previous_response_id`.

    Fields that are not known are refused by name.
    """
    body = await read_body(request, ResponsesBody)
    service = service_of(request)
    served = await chat_model(request, body.model, body.timeout_s)
    body = body.model_copy(update={"model": served.name})
    with service.handling(), naming_errors(responses.NAMES):
        if body.store and not service.responses.is_on:
            raise invalid("store: this service keeps no responses", "store", "not_supported")
        body = await _with_items(service, body)
        before = await _previous(service, body)
        conversation = responses.conversation(body, served, before)
        turn = await planned(
            request, body.timeout_s, take_turn(service, served, conversation, answer_is_held=responses.is_held(body))
        )
        keep = _keeper(service, body, [*before, *responses.input_messages(body)])
        return await generate.answer_in_handling(
            request,
            responses.generate_body(body, served, turn.ids),
            lambda generation: responses.Responses(generation, body, turn.format, keep),
            responses.NAMES,
            turn.shape(),
        )


@routes.post(
    "/v1/responses/input_tokens",
    "Tokens of a conversation, as OpenAI counts them",
    json_body(InputTokensBody, openai=Example(CHAT, {"input": "{text}"})),
    replies("The number of tokens.", Any),
)
async def input_tokens(request: Request) -> Response:
    """Returns the number of tokens of the prompt that the same body of /v1/responses has."""
    body = await read_body(request, InputTokensBody)
    service, context = service_of(request), context_of_request()
    served = await chat_model(request, body.model, body.timeout_s)
    with service.handling(), naming_errors(responses.NAMES):
        body = await _with_items(service, body.model_copy(update={"model": served.name}))
        said = responses.conversation(body, served, await _previous(service, body))
        count = await planned(request, body.timeout_s, count_tokens(service, served, said))
    context.model, context.tokens_in = served.name, count
    return json_response({"object": "response.input_tokens", "input_tokens": count})


@routes.get(
    "/v1/responses/{response_id}",
    "A stored response",
    replies("The `response`.", Any),
    _ID,
    in_query("stream", "Only `false` is served.", enum=["false"]),
    errors=(400, 404),
)
async def retrieve(request: Request) -> Response:
    """Returns a response that the service keeps. Its events are not kept."""
    if request.query_params.get("stream", "false").lower() != "false":
        raise invalid("stream: events of stored responses are not kept", "stream", "not_supported")
    found = (await _stored(request)).reply
    return Response(found, media_type="application/json")


@routes.delete(
    "/v1/responses/{response_id}",
    "Forget a stored response",
    replies("It is forgotten.", Any),
    _ID,
    errors=(404,),
)
async def delete(request: Request) -> Response:
    """Forgets a response and its conversation."""
    service, response_id = service_of(request), request.path_params["response_id"]
    if not await service.forget_response(context_of_request().tenant.id, response_id):
        raise _not_kept(service.responses, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@routes.get(
    "/v1/responses/{response_id}/input_items",
    "The input of a stored response",
    replies("A page of items.", Any),
    _ID,
    in_query("after", "The id of the item before the page.", type="string"),
    in_query("limit", "Items of a page; default: 20.", type="integer", minimum=1, maximum=100),
    in_query("order", "Default: `desc`, the last first.", enum=["asc", "desc"]),
    errors=(400, 404),
)
async def input_items(request: Request) -> Response:
    """Lists the items before a response, including those of the earlier responses that it continued."""
    query = request.query_params
    limit, order = page_limit(request, 20, 100), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order must be asc or desc", "order")
    messages = (await _stored(request)).messages()
    found = response_items.items(messages[:-1])
    page = response_items.page(found, after=query.get("after"), limit=limit, descends=order == "desc")
    return json_response(page)


async def _stored(request: Request) -> StoredResponse:
    """Return the stored response whose id is in the URL; raises a 404 if none is kept."""
    service, response_id = service_of(request), request.path_params["response_id"]
    found = await service.stored_response(context_of_request().tenant.id, response_id)
    if found is None:
        raise _not_kept(service.responses, response_id)
    return found


def _not_kept(store: ResponseStore, id: str) -> ApiError:
    if not store.is_on:
        return not_found("this service keeps no responses: --response-store is 0", "response_not_found")
    message = f"no response {shorten(id)} is kept: a replica forgets its oldest, and all when it ends"
    return not_found(message, "response_not_found")


async def _with_items(service: Service, body: B) -> B:
    """Return the body with the items to which it refers in their places; raises a 400 if one is not kept."""
    if isinstance(body.input, str) or not any(isinstance(one, InputReference) for one in body.input):
        return body
    tenant, kept, size = context_of_request().tenant.id, dict[str, Mapping[str, bytes]](), 0
    items = list[Any]()
    for at, one in enumerate(body.input):
        if not isinstance(one, InputReference):
            items.append(one)
            continue
        place, response_id = f"input[{at}].id", responses.response_of(one.id)
        if response_id not in kept:
            found = await service.stored_response(tenant, response_id)
            kept[response_id] = {} if found is None else found.items()
        if one.id not in kept[response_id]:
            message = f"{place}: no item {shorten(one.id)} is kept; send the item itself"
            raise invalid(message, place, "item_not_found")
        size += len(kept[response_id][one.id])
        if size > service.limits.max_body_bytes:
            message = f"input: its items have more than {service.limits.max_body_bytes} bytes (max_body_bytes)"
            raise too_large(message, "input")
        items.append(_item.validate_json(kept[response_id][one.id]))
    return body.model_copy(update={"input": items})


async def _previous(service: Service, body: InputTokensBody) -> Sequence[Mapping[str, Any]]:
    """Return the messages up to the previous response; raises a 400 if they are not kept."""
    if body.previous_response_id is None:
        return ()
    name = "previous_response_id"
    if not service.responses.is_on:
        raise invalid(f"{name}: this service keeps no responses; send the whole conversation", name, "not_supported")
    found = await service.stored_response(context_of_request().tenant.id, body.previous_response_id)
    if found is None:
        message = f"{name}: no response {shorten(body.previous_response_id)} is kept; send the whole conversation"
        raise invalid(message, name, "previous_response_not_found")
    return found.messages()


def _keeper(
    service: Service, body: ResponsesBody, messages: Sequence[Mapping[str, Any]]
) -> Callable[[str, Json, Json], None] | None:
    """Return the function that stores the conversation with its answer; None if nothing is to be stored."""
    if body.store is False or not service.responses.is_on:
        return None
    tenant = context_of_request().tenant.id
    return lambda id, answer, reply: service.responses.put(tenant, id, [*messages, answer], reply)
