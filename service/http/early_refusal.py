"""Refuses a request by the full queue of its model before its body is validated and planned.

Under overload most requests are refused, and each takes time from those that are served. So a body that is wrong in
some other field gets the 429 too. Only a single sequence of a model that is named and loaded is refused here; whatever
else there may be to say of a request is found on the usual way.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import copy_context
from typing import Final, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.types import Scope

from model.errors import EngineGoneError, ModelNotLoadedError, QueueFullError
from service.core.errors import ApiError, engine_refusal, render
from service.core.models import ServedModel, Task
from service.core.request_context import RequestContext, is_request_id
from service.http.bodies import JSON, context_of_request
from service.http.guard import Guard
from service.http.message_head import header_of
from service.http.middleware import Accounts, request_id_headers
from service.http.sites import CrossOrigins
from service.lifecycle.state import Service, service_of

# The routes that ask `refuse_if_full` before anything else than the content type.
REFUSING: Final = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
_ABSENT = msgspec.Raw(b" ")


class _Asked(msgspec.Struct):
    """The fields that tell which queue a body needs room in, and how much; others are skipped."""

    model: str
    request_id: str | None = None
    prompt: msgspec.Raw = _ABSENT  # of /generate and /v1/completions
    messages: msgspec.Raw = _ABSENT  # of a conversation
    n: int | None = None
    num_beams: int | None = None

    def is_one_sequence(self, served: ServedModel) -> bool:
        """Whether it has one text, or a conversation for a model that has a template, and wants one output."""
        text, conversation = (bytes(memoryview(raw)[:1]) for raw in (self.prompt, self.messages))
        one = text == b'"' or (conversation == b"[" and served.chat is not None)
        beams = self.num_beams or served.checkpoint.sampling_defaults.get("num_beams", 1)
        return one and self.n in (None, 1) and beams == 1


_decoder = msgspec.json.Decoder(_Asked)


class FullQueue(NamedTuple):
    """A body, not yet validated, whose model has no room for it."""

    model: str
    request_id: str | None
    refusal: ApiError

    def takes(self, service: Service, context: RequestContext) -> bool:
        """Enter the request into `context`, and return whether it is to be refused for this.

        Raises a 503 instead while the service drains. A model that is being unloaded is waited for.
        """
        service.check_ready()
        if not service.models.hold_loaded(self.model, Task.GENERATE, context):
            return False
        context.request_id = self.request_id or context.request_id
        context.model = self.model
        return True


def full_queue(service: Service, raw: bytes | bytearray) -> FullQueue | None:
    """Return what a body asks for if that model's queue has no room; changes nothing."""
    try:
        asked = _decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    served = service.models.served(asked.model)
    if served is None or not served.serves(Task.GENERATE) or not asked.is_one_sequence(served):
        return None
    if asked.request_id is not None and not is_request_id(asked.request_id):
        return None
    try:
        service.client.check_room(served.name)
    except QueueFullError as error:
        return FullQueue(served.name, asked.request_id, engine_refusal(error))
    except (EngineGoneError, ModelNotLoadedError):
        pass
    return None


def refuse_if_full(request: Request, raw: bytes) -> None:
    """Raise `ApiError` 429 for a body, not yet validated, whose model has a full queue; 503 if the service drains too.

    A `request_id` in the body becomes the request's, as when it is read.
    """
    service = service_of(request)
    full = full_queue(service, raw)
    if full is not None and full.takes(service, context_of_request()):
        raise full.refusal


# -- Answers the requests that a full queue refuses where the server has read them: no task, no layers, one write. Under
# overload most requests are refused, and each takes time from those that are served. The reply, its headers, what is
# counted and what is logged are those of the application, made by the same functions; whatever is not plainly such a
# request is left to the application, with nothing of it counted or logged.

_Headers = Iterable[tuple[bytes, bytes]]


class ImmediateRefusals:
    """Refuses requests whose body has come whole with their headers."""

    def __init__(self, service: Service, accounts: Accounts, guard: Guard, origins: CrossOrigins) -> None:
        self._service = service
        self._accounts = accounts
        self._guard = guard
        self._origins = origins

    def of(self, scope: Scope, body: bytearray) -> tuple[int, _Headers, bytes] | None:
        """Return status, headers and body of the refusal of an HTTP request; None if the application must answer it.

        The request is counted and logged with that, so the reply must be sent.
        """
        if scope["path"] not in REFUSING or scope["method"] != "POST":
            return None
        if header_of(scope["headers"], b"content-type") != JSON or len(body) > self._service.limits.max_body_bytes:
            return None
        full = full_queue(self._service, body)
        return None if full is None else copy_context().run(self._refusal, scope, full)

    def _refusal(self, scope: Scope, full: FullQueue) -> tuple[int, _Headers, bytes] | None:
        context = self._accounts.context(scope)
        try:
            self._guard.check(scope)
            if not full.takes(self._service, context):
                return None
        except ApiError:
            return None
        self._accounts.begin(context)
        try:
            reply = render(full.refusal)
            context.status = reply.status_code
            headers = [*reply.raw_headers, *request_id_headers(context)]
            headers += self._origins.reply_headers(scope) if self._origins else []
            return reply.status_code, headers, bytes(reply.body)
        finally:
            self._accounts.end(context, scope)
