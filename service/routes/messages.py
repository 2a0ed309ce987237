"""Anthropic's routes: messages, with the planner, streams and parts of chat completions, and counts of tokens."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from triptych.service.chat import conversation
from triptych.service.dialects import messages
from triptych.service.dialects.common import naming_errors
from triptych.service.dialects.messages_bodies import CountBody, MessagesBody
from triptych.service.http.bodies import context_of_request, json_response, read_body
from triptych.service.http.model_use import chat_model, planned
from triptych.service.http.route_table import Example, Routes, json_body, replies
from triptych.service.lifecycle.state import service_of
from triptych.service.planning.capabilities import CHAT
from triptych.service.planning.requests import output_room
from triptych.service.routes import generate

routes = Routes()

_HELLO = {"messages": [{"role": "user", "content": "{text}"}]}


@routes.post(
    "/v1/messages",
    "Messages, as Anthropic has them",
    json_body(MessagesBody, anthropic=Example(CHAT, _HELLO | {"max_tokens": 64})),
    replies("A `message`, or its events.", Any, events=(Any,)),
    task="generate",
)
async def create(request: Request) -> Response:
    """Works with Anthropic's client, whose key may come as `x-api-key`. Errors have that API's shape.

    Fields that are not known are refused by name.
    """
    body = await read_body(request, MessagesBody)
    service = service_of(request)
    served = await chat_model(request, body.model, body.timeout_s)
    body = body.model_copy(update={"model": served.name})
    names = messages.names(body)
    with service.handling(), naming_errors(names):
        said = messages.conversation(body, served)
        turn = await planned(
            request,
            body.timeout_s,
            conversation.take_turn(service, served, said, answer_is_held=messages.is_held(body)),
        )
        messages.check_thinking(body, turn.format)
        room = output_room(served, service.model_info(served.name), len(turn.ids))
        return await generate.answer_in_handling(
            request,
            messages.generate_body(body, served, turn.ids, room),
            lambda generation: messages.Messages(generation, body, turn.format),
            names,
            turn.shape(),
        )


@routes.post(
    "/v1/messages/count_tokens",
    "Tokens of a conversation, as Anthropic counts them",
    json_body(CountBody, anthropic=Example(CHAT, _HELLO)),
    replies("The number of tokens.", Any),
)
async def count_tokens(request: Request) -> Response:
    """Returns the number of tokens of the prompt that the same body of /v1/messages has."""
    body = await read_body(request, CountBody)
    service, context = service_of(request), context_of_request()
    served = await chat_model(request, body.model, body.timeout_s)
    body = body.model_copy(update={"model": served.name})
    with service.handling(), naming_errors(messages.names(body)):
        said = messages.conversation(body, served)
        count = await planned(request, body.timeout_s, conversation.count_tokens(service, served, said))
    context.model, context.tokens_in = served.name, count
    return json_response({"input_tokens": count})
