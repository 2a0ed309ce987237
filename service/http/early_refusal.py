"""Refuses a request by the full queue of its model before its body is validated and planned.

Under overload most requests are refused, and each takes time from those that are served. So a body that is wrong in
some other field gets the 429 too. Only a single sequence of a model that is named and loaded is refused here; whatever
else there may be to say of a request is found on the usual way.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
from starlette.requests import Request

from model.errors import EngineGoneError, ModelNotLoadedError, QueueFullError
from service.core.errors import ApiError, engine_refusal
from service.core.models import ServedModel, Task
from service.core.request_context import RequestContext, is_request_id
from service.http.bodies import context_of_request
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
