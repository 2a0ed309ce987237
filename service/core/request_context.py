"""The context of an HTTP request, for log lines, reply headers and metrics.

`triptych.service.http.middleware` creates a `RequestContext` for each request, and routes fill it in. It never holds a
prompt, an output or a key.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from triptych.service.settings.tenant import NO_TENANT, Tenant

SENDS_ON: Final = "triptych.sends_on"  # key of an ASGI scope: the status of a refusal that is sent to another replica
IN_PROXY: Final = "triptych.in_proxy"  # key of an ASGI scope: the seconds that the request was in HAProxy before
REQUEST_ID_PATTERN = r"^[A-Za-z0-9._:\-]{1,128}$"
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN[:-1] + r"\Z")  # as Pydantic reads the pattern: no line break after it


@dataclass(slots=True)
class RequestContext:
    """The context of one HTTP request; `request_id` appears in the reply and in every log line."""

    request_id: str
    task: str | None = None  # "generate" or "encode" on a route that runs a model
    model: str = ""  # a loaded model's name, once known
    path: str = ""  # the route's
    proxy_s: float | None = None  # from its head at HAProxy until it came here; None: not known
    scheme: str = "http"  # of the connection to this service
    traceparent: str = ""  # W3C Trace Context, as the client sent it
    tracestate: str = ""
    tenant: Tenant = NO_TENANT  # the holder of the API key
    is_background: bool = False  # of a batch: it runs in the time that other requests leave
    is_tgi: bool = False  # its body is one of text-generation-inference
    tokens_in: int = 0
    tokens_out: int = 0
    cached_tokens: int = 0  # of the input, found in the prefix cache
    audio_seconds: float = 0.0  # of the files that it sent
    images: int = 0
    running: int = 0  # sequences of the model that ran when the first output came
    phases_ms: tuple[float, float, float] | None = None  # in the queue, prefill and decode; None: no output came
    accepted: bool = False  # by the engine; until then the request can be rejected
    rejection: str = ""  # why it was refused
    not_begun: bool = False  # nothing was done for a refused request, so another replica may take it
    outcome: str = ""  # how it ended, if it was accepted
    status: int = 0  # of the reply; 0: not started
    on_reply: list[Callable[[], None]] = field(default_factory=list)  # called when the reply begins or cannot begin
    on_end: list[Callable[[], None]] = field(default_factory=list)  # called when the reply was sent or abandoned
    headers: list[Callable[[], list[tuple[bytes, bytes]]]] = field(default_factory=list)  # more ones of the reply
    is_over: bool = False  # `on_end` has been called
    started: float = field(default_factory=time.monotonic)

    def at_end(self, call: Callable[[], None]) -> None:
        """Call `call` when the reply was sent or abandoned; at once if it already was."""
        if self.is_over:
            call()
        else:
            self.on_end.append(call)

    def end(self) -> None:
        """Call the callbacks of `on_end`."""
        self.is_over = True
        for call in self.on_end:
            call()

    def begin_reply(self) -> None:
        """Call the callbacks of `on_reply`."""
        for call in self.on_reply:
            call()
        self.on_reply.clear()


_current: ContextVar[RequestContext | None] = ContextVar("triptych_request", default=None)


def current() -> RequestContext | None:
    """Return the context of the request that this code runs for; None outside of a request."""
    return _current.get()


def tenant_id() -> str:
    """Return the id of the current request's tenant; empty without keys."""
    context = current()
    return context.tenant.id if context is not None else ""


def set_current(context: RequestContext) -> None:
    """Make `context` the current one for the rest of this task and the tasks it starts."""
    _current.set(context)


def is_request_id(text: str) -> bool:
    """Return whether a text is a valid request id: 1-128 letters, digits and `._:-`."""
    return _REQUEST_ID.match(text) is not None


def request_id_from(header: str | None) -> str:
    """Return the client's request id if it is valid, else a new one."""
    return header if header is not None and is_request_id(header) else secrets.token_hex(12)
