"""What is known of the HTTP request being served, for its log lines, its reply's headers and its accounting.

`service.http.middleware` opens one `RequestContext` for each request; routes fill it in. It never holds a prompt, an
output or a key.
"""

from __future__ import annotations

import re
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

REQUEST_ID_PATTERN = r"^[A-Za-z0-9._:\-]{1,128}$"
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN[:-1] + r"\Z")


@dataclass(slots=True)
class RequestContext:
    """One HTTP request; `request_id` is what the reply and every log line show."""

    request_id: str
    task: str | None = None  # "generate" or "encode" on a route that runs a model
    model: str = ""  # a loaded model's name, once known
    path: str = ""  # the route's
    traceparent: str = ""  # as the client sent it
    tenant: str = ""  # whose key it is, as a word that tells nothing about the key; empty without keys
    tokens_in: int = 0
    tokens_out: int = 0
    accepted: bool = False  # the engine took it; until then it can only be rejected
    rejection: str = ""  # why it was refused
    outcome: str = ""  # how it ended, once accepted
    status: int = 0  # of the reply; 0: none was begun
    started: float = field(default_factory=time.monotonic)


_current: ContextVar[RequestContext | None] = ContextVar("triptych_request", default=None)


def current() -> RequestContext | None:
    """The request this code runs for; None outside of one."""
    return _current.get()


def enter(context: RequestContext) -> None:
    """Make `context` the current one for the rest of this task and the tasks it starts."""
    _current.set(context)


def request_id_from(header: str | None) -> str:
    """The client's id where it is one (1-128 of letters, digits and `._:-`); otherwise a fresh one instead."""
    if header is not None and _REQUEST_ID.match(header):
        return header
    return secrets.token_hex(12)
