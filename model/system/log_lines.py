"""Log lines of a process on stderr: plain, or JSON if the log of the process that started it is JSON."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

VARIABLE = "TRIPTYCH_LOG_FORMAT"  # the service's setting too


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object: ts, level, logger, message and the record's `fields`."""

    def __init__(self, **fields: object) -> None:
        """`fields` are those of every record."""
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        import msgspec  # only processes with a log need it

        line: dict[str, Any] = {
            "ts": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= self.fields() | getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()

    def fields(self) -> dict[str, object]:
        """Return the fields that are added to every line."""
        return self._fields


def is_json(log_format: object, stream: TextIO) -> bool:
    """Return whether lines to `stream` are JSON, by the setting: json, plain or auto (plain on a terminal)."""
    return log_format == "json" or (log_format == "auto" and not stream.isatty())


def is_asked_for(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether `serve` is told to log JSON; its other settings may be wrong."""
    if arguments[:1] != ["serve"]:
        return False
    given = dict(zip(arguments, [*arguments[1:], ""], strict=True)) | dict(
        one.partition("=")[::2] for one in arguments if "=" in one
    )
    format_ = given.get("--log-format", environment.get(VARIABLE))
    if format_ is not None:
        return format_ == "json"
    with suppress(OSError, UnicodeDecodeError):
        text = Path(given.get("--config") or environment.get("TRIPTYCH_CONFIG") or "/dev/null").read_text()
        return re.search(r"^log[-_]format:\s*[\"']?json\b", text, re.MULTILINE) is not None
    return False


def begin(log_format: object) -> None:
    """Write log lines to stderr in a format, so that a child that is started now does too, until all is configured."""
    handler = logging.StreamHandler()
    if is_json(log_format, sys.stderr):
        handler.setFormatter(JsonLines())
    logging.getLogger().handlers[:] = [handler]


def child_format() -> str:
    """Return the format of this process's log, for the environment of a child."""
    formatters = (handler.formatter for handler in logging.getLogger().handlers)
    return "json" if any(isinstance(one, JsonLines) for one in formatters) else "plain"


def log_as_parent(level: int = logging.INFO, **fields: int) -> None:
    """Write log lines to stderr in the format of the parent's log; `fields` are in each, such as a rank."""
    handler = logging.StreamHandler()
    if os.environ.get(VARIABLE) == "json":
        handler.setFormatter(JsonLines(**fields))
    else:
        note = "".join(f" ({name} {value})" for name, value in fields.items())
        handler.setFormatter(logging.Formatter(f"%(levelname)s %(name)s{note}: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(True)
    sys.excepthook = _log_end


def _log_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("the process ends by an error", exc_info=(kind, error, trace))
