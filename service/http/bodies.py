"""Helpers of the routes: reading a body, replying with JSON, and cancelling work when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from triptych.service.core.errors import OLLAMA_ROUTES, ApiError, client_gone, invalid
from triptych.service.core.request_context import RequestContext, current
from triptych.service.http.connections import LOSS, ConnectionLoss
from triptych.service.http.parsing import one_of, parsed
from triptych.service.http.route_table import JSON
from triptych.service.lifecycle.state import service_of
from triptych.service.schemas.types import NamesAdapter

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON reply; NumPy arrays of float32 become lists."""
    return Response(_json.encode(value), status, dict(headers or {}), media_type=JSON)


def _list_of_array(value: object) -> object:
    """Return a NumPy array as JSON by orjson, with the fewest digits that identify each float32."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a reply has a {type(value).__name__}, which JSON cannot represent")
    return msgspec.Raw(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


# Model names that clients send if they know none: InferenceClient, and the documentation of TGI, TEI and SGLang.
PLACEHOLDERS: Final = frozenset({"", "dummy", "tgi", "tei", "text-embeddings-inference", "default"})
LATEST: Final = ":latest"  # the tag of names in Ollama's API; no model has one here
_json = msgspec.json.Encoder(enc_hook=_list_of_array)


def context_of_request() -> RequestContext:
    """Return the current request's context, which always exists inside a route."""
    context = current()
    assert context is not None
    return context


async def read_body(request: Request, model: type[B]) -> B:
    """Parse the body as `model`; raises a 400 that names the field. A `request_id` in it becomes the request's."""
    return with_model(request, await parsed(request, await raw_body(request), model))


async def read_one_of(request: Request, default: type[B], by_key: Mapping[str, type[B]]) -> B:
    """Parse the body as the model that `one_of` chooses for its keys."""
    return with_model(request, await parsed(request, await raw_body(request), one_of(default, by_key)))


def with_model(request: Request, body: B) -> B:
    """Return the body with the model or adapter that it names or the URL does, if its type has a field for it."""
    if "model" not in type(body).model_fields:
        return body
    given: str | None = getattr(body, "model", None)
    found = named_model(request, given)
    if isinstance(body, NamesAdapter) and (named := body.adapter_named()) is not None:
        found = service_of(request).models.adapter(*named, found)
    return body if found == given else body.model_copy(update={"model": found})


def named_model(request: Request, given: str | None) -> str | None:
    """Return the model that a request names in its body (`given`), else in its URL (`?model=`); None if it names none.

    A placeholder counts only if a model has that name. `NAME:latest` is `NAME`, as programs write it that read names
    from Ollama's `/api/tags`.
    """
    in_url = request.query_params.get("model") if request.scope["query_string"] else None
    names = [name.removesuffix(LATEST) for name in (given, in_url) if name is not None]
    return next((one for one in names if one not in PLACEHOLDERS or service_of(request).models.knows(one)), None)


def page_limit(request: Request, default: int, most: int) -> int:
    """Return how many entries of a list a request asks for (`?limit=`), at most `most`; raises a 400."""
    text = request.query_params.get("limit", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
        raise invalid(f"limit must be from 1 to {most}", "limit")
    return int(text)


async def raw_body(request: Request, counted: Callable[[int], None] | None = None) -> bytes:
    """Return a JSON body as `whole_body` does; raises a 415 for another content type, a 400 for an empty body.

    Ollama's routes take any type, as the commands of its documentation name none; `Sites` refuses pages of other sites.
    """
    if not request.scope["path"].startswith(OLLAMA_ROUTES):
        _check_content_type(request)
    raw = await whole_body(request.receive, counted)
    if not raw or raw.isspace():
        raise invalid("the body is empty; expected a JSON object", code="invalid_json")
    return raw


async def whole_body(receive: Receive, counted: Callable[[int], None] | None = None) -> bytes:
    """Return all bytes of a body; raises `ApiError` 499 if the client disconnects.

    `counted` is called with the number of bytes so far, and may raise.
    """
    body: bytes | bytearray = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise client_gone()
        piece = message.get("body", b"")
        if not body:
            body = piece
        else:  # not a list of pieces: a client may send one byte at a time
            body = body if isinstance(body, bytearray) else bytearray(body)
            body += piece
        if counted is not None:
            counted(len(body))
        if not message.get("more_body", False):
            return bytes(body)


def _check_content_type(request: Request) -> None:
    """Require a JSON content type: browsers send other types across sites without a CORS check."""
    declared = request.headers.get("content-type", "")
    if declared == JSON:
        return
    declared = declared.partition(";")[0].strip().lower()
    if declared != JSON and not (declared.startswith("application/") and declared.endswith("+json")):
        message = "send JSON with the header Content-Type: application/json"
        raise ApiError(415, message, type="invalid_request_error", code="unsupported_media_type")


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects; its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel all tasks and wait for them, ignoring what they raise."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancels it and raises `ApiError` 499 when the client disconnects."""
    loss: ConnectionLoss | None = request.scope.get(LOSS)
    if loss is not None:
        return await loss.cancels(work)
    task = asyncio.create_task(work)
    watch = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise client_gone()
        return task.result()
    finally:
        await cancel_all((task, watch))
