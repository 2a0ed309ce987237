"""The middleware in front of Ray Serve, tested without Ray around an application that behaves like Serve."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from triptych.model.api.messages import ModelSpec
from triptych.service.http.reply_writing import StreamWriter, direct_send
from triptych.service.runtimes.ray_serve import edge, environment
from triptych.service.runtimes.ray_serve.edge import EdgeMiddleware, middlewares
from triptych.service.settings.serve_config import ServeConfig
from triptych.service.settings.service_settings import Limits, ServiceSettings


class Serve:
    """Adds the request id it was given to every reply, as Serve does, and remembers the headers it saw."""

    def __init__(self, reply: Response) -> None:
        self.reply = reply
        self.seen = Headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen = Headers(scope=scope)

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("X-Request-ID", self.seen.get("x-request-id", "made-by-serve"))
            await send(message)

        await self.reply(scope, receive, with_id)


def ask(serve: Serve, path: str = "/info", **headers: str) -> httpx.Response:
    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app=EdgeMiddleware(serve))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(get())


def test_a_valid_request_id_goes_through_and_comes_back_once() -> None:
    serve = Serve(JSONResponse({}, headers={"x-request-id": "mine"}))
    reply = ask(serve, **{"x-request-id": "mine"})
    assert serve.seen["x-request-id"] == "mine"
    assert reply.headers.get_list("x-request-id") == ["mine"]


def test_an_id_that_the_application_chose_wins() -> None:
    reply = ask(Serve(JSONResponse({}, headers={"x-request-id": "of-the-body"})), **{"x-request-id": "of-the-header"})
    assert reply.headers.get_list("x-request-id") == ["of-the-body"]


@pytest.mark.parametrize("request_id", ["not valid", "a" * 200, ""])
def test_an_invalid_request_id_is_replaced(request_id: str) -> None:
    serve = Serve(JSONResponse({}))
    (echoed,) = ask(serve, **{"x-request-id": request_id}).headers.get_list("x-request-id")
    assert echoed == serve.seen["x-request-id"] != request_id


@pytest.mark.parametrize(
    "name",
    [
        *("x-request-timeout-seconds", "x-request-disconnect-disabled", "x-session-id", "x_session_id"),
        *("serve_multiplexed_model_id", "serve-multiplexed-model-id"),
    ],
)
def test_headers_that_steer_serve_are_dropped(name: str) -> None:
    serve = Serve(JSONResponse({}))
    ask(serve, **{name: "1", "other": "kept"})
    assert name not in serve.seen
    assert serve.seen["other"] == "kept"


@pytest.mark.parametrize(
    ("status", "shown", "code"),
    [
        (404, 404, "not_found"),
        (408, 504, "deadline"),
        (429, 429, "queue_full"),
        (500, 500, "internal"),
        (503, 503, "not_ready"),
    ],
)
def test_errors_of_serve_take_the_contracts_shape(status: int, shown: int, code: str) -> None:
    reply = ask(Serve(PlainTextResponse("Path '/secret' not found", status)))
    assert reply.status_code == shown
    error = reply.json()["error"]
    assert error["code"] == code
    assert "secret" not in reply.text
    assert ("retry-after" in reply.headers) == (shown in (429, 503))
    assert len(reply.headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize("reply", [JSONResponse({"error": {}}, 404), PlainTextResponse("triptych_up 1", 200)])
def test_replies_of_the_application_stay_as_they_are(reply: Response) -> None:
    seen = ask(Serve(reply))
    assert (seen.status_code, seen.content) == (reply.status_code, reply.body)


def test_routes_of_serve_itself_are_left_alone() -> None:
    reply = ask(Serve(PlainTextResponse("draining", 503)), path="/-/healthz")
    assert (reply.status_code, reply.text) == (503, "draining")


def test_other_protocols_pass() -> None:
    passed: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        passed.append(scope["type"])

    async def never() -> Message:
        raise AssertionError

    async def ignore(message: Message) -> None: ...

    asyncio.run(EdgeMiddleware(app)({"type": "lifespan"}, never, ignore))
    assert passed == ["lifespan"]
    assert [one.cls for one in middlewares()] == [EdgeMiddleware]


def test_the_application_gets_the_servers_own_send_in_its_event_loop_only() -> None:
    found: list[Send] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(direct_send(send))
        context = contextvars.copy_context()

        def elsewhere() -> None:
            async def look() -> None:
                found.append(direct_send(send))

            asyncio.run(look())

        await asyncio.to_thread(context.run, elsewhere)

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:  # as Serve does
        async def counted(message: Message) -> None:
            await send(message)

        found.append(counted)
        await application(scope, receive, counted)

    async def servers_own(message: Message) -> None:
        raise AssertionError("nothing is sent")

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    scope = {"type": "http", "path": "/generate", "headers": []}
    asyncio.run(EdgeMiddleware(wrapped)(scope, receive, servers_own))
    serves, here, in_another_loop = found
    assert here is servers_own and in_another_loop is serves
    assert StreamWriter.of(servers_own) is None  # which is not uvicorn's


@pytest.mark.parametrize(("proxied", "expected"), [("1", sys.maxsize), ("0", 7)])
def test_idle_connections_are_bounded_unless_haproxy_keeps_them(
    no_ray_settings: pytest.MonkeyPatch, proxied: str, expected: int
) -> None:
    config = ServeConfig((ModelSpec("m", "m"),), ServiceSettings(limits=Limits(max_idle_connections=7)))
    for name, value in environment.variables(config, Path("/tmp/t")).items():
        no_ray_settings.setenv(name, value)
    no_ray_settings.setenv(environment.HA_PROXY, proxied)
    assert edge._limits().max_idle_connections == expected
