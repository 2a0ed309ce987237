"""All errors that a client can see, in one shape: `{"error": {"message", "type", "param", "code"}}`.

Errors of Anthropic's and Ollama's routes have the shapes of those APIs (`anthropic_error`, `ollama_error`).

Routes raise an `ApiError` made by one of the functions below. The table of routes renders these errors; the middleware
renders all other exceptions. Messages name fields and limits. They contain no path, address, traceback or key. The only
values of a client in them are names, shortened.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec
from starlette.responses import Response

from triptych.model.errors import EngineGoneError, ModelNotLoadedError, QueueFullError
from triptych.model.errors import listed as first_names
from triptych.service.core.request_context import current

logger = logging.getLogger("triptych.errors")

REFUSALS = (QueueFullError, EngineGoneError, ModelNotLoadedError)  # raised by an engine before any work
NOT_BEGUN = "X-Not-Begun"  # header of refusals for which nothing was done: another replica may take the request
NOT_SUPPORTED = "not_supported"  # code for an unsupported field of a dialect that would change the result
FINAL = {"x-should-retry": "false"}  # else the packages of OpenAI and Anthropic send a request again after a 409 or 5xx
SERVER_FAULTS = ("internal", "engine_failed", "engine_dead", "not_ready")  # they consume the error budget (rules.yaml)

ANTHROPIC_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})  # routes whose errors have that API's shape
OLLAMA_ROUTES = "/api/"  # the beginning of the paths whose errors have the shape of Ollama's API
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_SHOWN_ERRORS = 5
_SHOWN_CHARACTERS = 560  # of their texts together
_SHOWN_NAMES = 20
_UNSAFE = re.compile(r"0x[0-9a-fA-F]{4,}|(?:/[\w.\-]+){2,}|[A-Za-z]:\\\S+")


class ApiError(Exception):
    """An HTTP error that ends a request; `reason` is its label in metrics (default: `code`)."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.reason = reason or code

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the reply."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def error_fields(error: ApiError) -> dict[str, Any]:
    """Return the arguments of `ApiError` by name, to send the error to another process."""
    names = ("status", "message", "type", "code", "param", "headers", "reason")
    return {name: getattr(error, name) for name in names}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, type="invalid_request_error", param=param, code=code)


def unauthorized(message: str, challenge: str = "Bearer") -> ApiError:
    headers = {"WWW-Authenticate": challenge}
    return ApiError(401, message, type="authentication_error", code="invalid_api_key", headers=headers)


def expired_key(tenant: str) -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    message = f"this API key of {tenant} has expired; ask the operator for a new one"
    return ApiError(401, message, type="authentication_error", code="expired_api_key", headers=headers)


def too_many_wrong_keys() -> ApiError:
    message = "too many wrong API keys are being sent, so this one was not checked; try again"
    headers = {"Retry-After": "1"}
    return ApiError(429, message, type="authentication_error", code="too_many_wrong_keys", headers=headers)


def model_not_allowed(model: str, tenant: str) -> ApiError:
    message = f"the API key of {tenant} may not use model {shorten(model)}; GET /v1/models lists those that it may use"
    return ApiError(403, message, type="permission_error", param="model", code="model_not_allowed")


def quota_exceeded(tenant: str, quota: str, limit: int, left: int, wanted: int, wait_s: float) -> ApiError:
    """Return the 429 for a quota of a key; a request that exceeds the whole quota is told not to be sent again."""
    kind = quota.partition("/")[0]
    if not math.isfinite(wait_s):
        message = f"the request needs {wanted} {kind}, and the key of {tenant} has {quota}={limit}; ask for fewer"
        headers = FINAL
    elif kind == "concurrent":
        message = f"the key of {tenant} has concurrent={limit}, and as many of its requests are running; wait for one"
        headers = {"Retry-After": str(math.ceil(wait_s))}
    else:
        seconds = math.ceil(wait_s)
        message = (
            f"rate limit reached: the key of {tenant} has {quota}={limit} with {left} left, and the request needs "
            f"{wanted}; try again in {seconds} s"
        )
        headers = {"Retry-After": str(seconds), "retry-after-ms": str(math.ceil(wait_s * 1000))}
    code, reason = "rate_limit_exceeded", f"quota_{kind}"
    return ApiError(429, message, type=kind, code=code, headers=headers, reason=reason)


def not_found(message: str, code: str = "not_found", param: str | None = None) -> ApiError:
    return ApiError(404, message, type="not_found_error", param=param, code=code)


def unknown_model(name: str, known: Iterable[str]) -> ApiError:
    message = f"model {shorten(name)} not found; served: {listed(known)}"
    return not_found(message, code="model_not_found", param="model")


def too_large(message: str, param: str | None = None, code: str = "body_too_large") -> ApiError:
    return ApiError(413, message, type="invalid_request_error", param=param, code=code)


def unsupported_coding(coding: str) -> ApiError:
    """Return the 415 for a compressed body."""
    message = f"Content-Encoding: {shorten(coding)} is not supported; send the body as it is, without compression"
    headers = {"Accept-Encoding": "identity"}
    return ApiError(*(415, message), type="invalid_request_error", code="unsupported_content_encoding", headers=headers)


def headers_too_large(message: str) -> ApiError:
    return ApiError(431, message, type="invalid_request_error", code="headers_too_large")


def request_too_slow(seconds: float) -> ApiError:
    message = f"the request did not arrive within {seconds:g} s"
    headers = {"Connection": "close"}
    return ApiError(408, message, type="timeout_error", code="request_too_slow", headers=headers)


def engine_refusal(error: QueueFullError | EngineGoneError | ModelNotLoadedError) -> ApiError:
    """Return the HTTP error for an engine's refusal of new work."""
    if isinstance(error, ModelNotLoadedError):
        return unavailable("the model was unloaded before the request reached it", "model_not_ready", 1)
    if isinstance(error, EngineGoneError):
        return not_begun("the engine has failed; a new one is starting", "engine_dead")
    seconds = math.ceil(error.retry_after_s) if math.isfinite(error.retry_after_s) else 60
    return try_again("the queue is full", error.reason, min(max(1, seconds), 3600))


def try_again(problem: str, reason: str, retry_after_s: int) -> ApiError:
    """Return the 429 for a full queue; `reason` labels it in the metrics."""
    return _queue_full(f"{problem}; try again after the time in Retry-After", reason, retry_after_s)


def no_room(what: str, reason: str) -> ApiError:
    """Return the error for an exhausted resource that all requests share."""
    return _queue_full(f"{what}, which is the most at a time; try again later", reason, 5)


def _queue_full(message: str, reason: str, retry_after_s: int) -> ApiError:
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, type="overloaded_error", code="queue_full", headers=headers, reason=reason)


def unavailable(message: str, code: str, retry_after_s: int = 5) -> ApiError:
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, type="unavailable_error", code=code, headers=headers)


def not_begun(message: str, code: str) -> ApiError:
    """Return the 503 for a request for which nothing was done, which another replica may take."""
    error = unavailable(message, code)
    error.headers[NOT_BEGUN] = "1"
    return error


def forbidden(message: str, code: str) -> ApiError:
    return ApiError(403, message, type="permission_error", code=code)


def conflict(message: str, code: str, param: str | None = None, *, passes: bool = False) -> ApiError:
    """Return the 409 for a request that the present state does not allow; `passes`: it may a little later."""
    headers = {} if passes else FINAL
    return ApiError(409, message, type="conflict_error", code=code, param=param, headers=headers)


def draining() -> ApiError:
    return not_begun("the service is draining and accepts no new requests", "draining")


def internal(message: str = "the service failed; its log has the request id", code: str = "internal") -> ApiError:
    return ApiError(500, message, type="server_error", code=code)


def engine_failed() -> ApiError:
    return internal("the engine failed while it processed the request", "engine_failed")


def deadline_passed() -> ApiError:
    return ApiError(
        504, "the deadline passed before the first token", type="timeout_error", param="timeout_s", code="deadline"
    )


def cancelled() -> ApiError:
    return ApiError(409, "the request was cancelled", type="cancelled_error", code="cancelled", headers=FINAL)


def client_gone() -> ApiError:
    """Return an error that no client receives; its status appears in the access log."""
    return ApiError(499, "the client closed the connection", type="cancelled_error", code="client_closed")


def shorten(name: str, size: int = 64) -> str:
    """Quote a name that a client sent, printable and of bounded length."""
    cut = name if len(name) <= size else name[: size - 3] + "..."
    return ascii(cut)


def listed(names: Iterable[str]) -> str:
    """Return names with commas between them, of many only the first, or "none"."""
    return first_names(names, most=_SHOWN_NAMES, longest=200) or "none"


def scrub(text: str, size: int = 200) -> str:
    """Make an internal message safe for clients: one short line without paths and addresses."""
    return _UNSAFE.sub("...", " ".join(text.split()))[:size]


def render(error: ApiError) -> Response:
    """Return the reply for `error`, and record its reason in the context of the current request."""
    context = current()
    if context is not None and not context.rejection:
        context.rejection, context.not_begun = error.reason, NOT_BEGUN in error.headers
    path = "" if context is None else context.path
    if context is not None and path in ANTHROPIC_PATHS:
        shown = anthropic_error(error, context.request_id)
    else:
        shown = ollama_error(error) if path.startswith(OLLAMA_ROUTES) else error.body()
    if context is not None and context.is_tgi and error.status >= 429:
        shown |= tgi_error_type(error)
    return Response(
        msgspec.json.encode(shown), status_code=error.status, headers=error.headers, media_type="application/json"
    )


def anthropic_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the body of an error in the shape of Anthropic's API; its clients choose the exception by HTTP status."""
    type_ = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    too_long = "prompt is too long: " if error.code == "context_length_exceeded" else ""  # agents search for it
    detail: dict[str, Any] = {"type": type_, "message": too_long + error.message}
    if (error.param, error.code) == ("thread", NOT_SUPPORTED):  # tells the client to send whole conversations
        detail["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": detail, "request_id": request_id}


def tgi_error_type(error: ApiError) -> dict[str, str]:
    """Return the field by which clients of text-generation-inference choose the class of an error."""
    return {"error_type": "overloaded" if error.status in (429, 503) else "generation"}


def ollama_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in the shape of Ollama's API."""
    return {"error": error.message}


def log_unexpected(error: BaseException) -> None:
    """Log the traceback and type of an exception without its text, which may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("unexpected %s\n%s", type(error).__name__, frames.rstrip())


def from_validation(
    errors: Sequence[Mapping[str, Any]], known: Callable[[Sequence[int | str]], Sequence[str]] = lambda place: ()
) -> ApiError:
    """Turn Pydantic's errors into one 400: the message has the first few, `param` names the first.

    `known` returns the valid field names at the location of an unknown field, to suggest similar names.
    """
    described = [_describe(error, known) for error in errors[:_SHOWN_ERRORS]]
    lengths = accumulate(len(text) + 2 for _, text, _ in described)
    shown = max(1, sum(length <= _SHOWN_CHARACTERS for length in lengths))
    more = len(errors) - shown
    message = "; ".join(text for _, text, _ in described[:shown]) + (f"; and {more} more" if more else "")
    param, _, code = described[0]
    return invalid(message, param, code)


def _describe(
    error: Mapping[str, Any], known: Callable[[Sequence[int | str]], Sequence[str]]
) -> tuple[str | None, str, str]:
    kind, location = error["type"], _without_tags(error["loc"])
    if kind == "json_invalid":
        return None, f"the body is not valid JSON ({error['ctx']['error']})", "invalid_json"
    if not location:
        return None, "the body must be a JSON object", "invalid_type"
    param = path_of(location)
    if kind == "extra_forbidden":
        return param, _unknown_field(location, known(error["loc"])), "unknown_field"
    if kind == "missing":
        return param, f"{param} is required", "missing_field"
    if kind == NOT_SUPPORTED:
        return param, f"{param} is not supported{error['msg']}", NOT_SUPPORTED
    message = error["msg"][:1].lower() + error["msg"][1:]
    wrong_type = kind.endswith("_type") or kind.endswith("_parsing") or kind == "int_from_float"
    return param, f"{param}: {message}", "invalid_type" if wrong_type else "invalid_value"


def _unknown_field(location: Sequence[int | str], known: Sequence[str]) -> str:
    """Return a message such as `unknown field 'temprature' in requests[0]; did you mean 'temperature'?`."""
    name, place = str(location[-1]), f" in {path_of(location[:-1])}" if len(location) > 1 else ""
    near = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.6)
    return f"unknown field {shorten(name)}{place}" + (f"; did you mean '{near[0]}'?" if near else "")


def _without_tags(location: Sequence[int | str]) -> list[int | str]:
    """Remove Pydantic's marks: `<name>` of union members in `triptych.service.schemas`, and `[key]` of dictionaries."""
    return [part for part in location if not (isinstance(part, str) and (part[:1] == "<" or part == "[key]"))]


def path_of(location: Sequence[int | str]) -> str:
    """Return a location as a client would write it, such as `prompt[1][5]` or `input[0].text`, with names shortened."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part[:64]}" if text else part[:64]
    return text
