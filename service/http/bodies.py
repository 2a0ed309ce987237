"""Small pieces that the routes share: reading a body, answering JSON, stopping work when the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from service.core.errors import ApiError, client_gone, from_validation, invalid
from service.core.request_context import RequestContext, current
from service.schemas.types import TextPair

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, dict(headers or {}), media_type="application/json")


def context_of_request() -> RequestContext:
    """The current request's context; there is always one inside a route."""
    context = current()
    assert context is not None
    return context


async def read_body(request: Request, model: type[B]) -> B:
    """The body as `model`, or a 400 that names the field. A `request_id` in it names the request from now on."""
    return _parse(await _raw_body(request), model)


async def read_one_of(request: Request, default: type[B], keys: Mapping[str, type[B]]) -> B:
    """The body as the model of that key of `keys` which it has, or as `default` if it has none; it is a 400 that names
    both to have the keys of two models.
    """
    raw = await _raw_body(request)
    known = [key for key in _keys(raw) if key in keys]
    for key in known[1:]:
        if keys[key] is not keys[known[0]]:
            message = f"{known[0]} and {key} are fields of different APIs; send one of them"
            raise invalid(message, key, "ambiguous_body")
    return _parse(raw, keys[known[0]] if known else default)


def named(request: Request, body: B) -> B:
    """`body` with the model that the address names (`?model=`), where it names none itself."""
    name = request.query_params.get("model")
    if name is None or getattr(body, "model", None) is not None:
        return body
    return body.model_copy(update={"model": name})


async def _raw_body(request: Request) -> bytes:
    _check_content_type(request)
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise client_gone() from None
    if not raw.strip():
        raise invalid("the body is empty; expected a JSON object", code="invalid_json")
    return raw


def _keys(raw: bytes) -> list[str]:
    """The names at the top of a JSON object; none where it is something else."""
    try:
        return list(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        pass
    try:  # as the models do: with NaN, which they then refuse by name
        found = pydantic_core.from_json(raw)
    except ValueError:
        return []
    return list(found) if isinstance(found, dict) else []


def _parse(raw: bytes, model: type[B]) -> B:
    try:
        body = model.model_validate_json(raw)
    except ValidationError as error:
        names = {1: list(model.model_fields), 3: list(TextPair.model_fields)}
        raise from_validation(error.errors(include_url=False, include_input=False), names) from None
    request_id = getattr(body, "request_id", None)
    if request_id is not None:
        context_of_request().request_id = request_id
    return body


def _check_content_type(request: Request) -> None:
    """JSON must be declared: a browser sends anything else across sites without asking."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != "application/json" and not (declared.startswith("application/") and declared.endswith("+json")):
        message = "send JSON with the header Content-Type: application/json"
        raise ApiError(415, message, type="invalid_request_error", code="unsupported_media_type")


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has gone; its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel and wait for every task, whatever they raise."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and waited for, as soon as the client is gone (`ApiError` 499)."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(until_disconnect(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise client_gone()
        return task.result()
    finally:
        await cancel_all((task, watch))
