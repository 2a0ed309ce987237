"""The logging configuration: plain lines on a terminal, JSON lines otherwise, each with the request's id.

`access` writes one line for each HTTP request. No line contains prompts, outputs or keys: of an exception only the type
and the frames are logged, because its text may quote a client's data.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from types import TracebackType
from typing import Any, TextIO

import msgspec

from service.core.request_context import RequestContext, current
from service.settings.service_settings import LogFormat

_access = logging.getLogger("triptych.access")
_QUIET = frozenset({"/livez", "/readyz", "/health", "/metrics"})  # polled: logged only at debug level
_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def setup(log_format: LogFormat = "auto", *, stream: TextIO | None = None, verbose: bool = False) -> None:
    """Send all logging to `stream` (stderr) in one format, and disable uvicorn's own access log."""
    stream = stream or sys.stderr
    as_json = log_format == "json" or (log_format == "auto" and not stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("uvicorn.access").disabled = True
    # What no line shows need not be looked up for each.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def access(context: RequestContext, method: str, path: str) -> None:
    """Log one request. The path comes from the client, so it is shortened, and quoted if it is not printable ASCII."""
    level = logging.DEBUG if path in _QUIET and context.status < 400 else logging.INFO
    if not _access.isEnabledFor(level):
        return
    shown = path if len(path) <= 100 else path[:97] + "..."
    if not (shown.isascii() and shown.isprintable()):
        shown = ascii(shown)
    method, milliseconds = method[:16], round((time.monotonic() - context.started) * 1000, 1)
    outcome = context.outcome or context.rejection
    text = f"{method} {shown} {context.status} {milliseconds} ms"
    if context.model:
        text += f" {context.model} {context.tokens_in} in {context.tokens_out} out {outcome}"
    record = logging.LogRecord(_access.name, level, __file__, 0, text, (), None)  # without a search for the caller
    record.fields = {
        "method": method,
        "path": shown,
        "status": context.status,
        "ms": milliseconds,
        "model": context.model,
        "tokens_in": context.tokens_in,
        "tokens_out": context.tokens_out,
        "outcome": outcome,
    }
    _access.handle(record)


class _SafeFormatter(logging.Formatter):
    """Formats an exception as its frames and type, without its text."""

    def formatException(self, ei: _ExcInfo) -> str:
        kind, _, tb = ei
        return "".join(traceback.format_tb(tb)) + (kind.__name__ if kind is not None else "")


class PlainFormatter(_SafeFormatter):
    """Formats lines such as `12:00:00 INFO triptych.access [id] POST /generate 200 12.3 ms`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(request)s%(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        context = current()
        record.request = f"[{context.request_id}] " if context is not None else ""
        return super().format(record)


class JsonFormatter(_SafeFormatter):
    """Formats a record as one JSON object: ts, level, logger, message, request_id and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        context = current()
        line: dict[str, Any] = {
            "ts": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if context is not None:
            line["request_id"] = context.request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()
