"""Refuses a request by the full queue of its model before its body is validated and planned.

Under overload most requests are refused, and each takes time from those that are served. So a body that is wrong in
some other field gets the 429 too. Only a single sequence of a model that is named and loaded is refused here; whatever
else there may be to say of a request is found on the usual way.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from model.errors import EngineGoneError, ModelNotLoadedError, QueueFullError
from service.core.errors import engine_refusal
from service.core.model_registry import ServedModel, Task
from service.core.request_context import is_request_id
from service.http.bodies import context_of_request
from service.lifecycle.state import service_of

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


def refuse_if_full(request: Request, raw: bytes) -> None:
    """Raise `ApiError` 429 for a body, not yet validated, whose model has a full queue; 503 if the service drains too.

    A `request_id` in the body becomes the request's, as when it is read.
    """
    try:
        asked = _decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return
    service, context = service_of(request), context_of_request()
    served = service.registry.get(asked.model)
    if served is None or not served.serves(Task.GENERATE) or not asked.is_one_sequence(served):
        return
    if asked.request_id is not None and not is_request_id(asked.request_id):
        return
    try:
        service.client.check_room(served.name)
    except QueueFullError as error:
        refusal = engine_refusal(error)
    except (EngineGoneError, ModelNotLoadedError):
        return
    else:
        return
    service.check_ready()
    if not service.holder.hold_loaded(served.name, Task.GENERATE, context):
        return  # it is being unloaded, which is waited for
    context.request_id = asked.request_id or context.request_id
    context.model = served.name
    raise refusal
