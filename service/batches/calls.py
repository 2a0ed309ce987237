"""The request of a line, and what its reply means: a result, or that it must be sent again."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from triptych.service.batches.lines import Line, reply_line
from triptych.service.batches.records import Result, Usage
from triptych.service.core.coded_files import file_bytes
from triptych.service.core.errors import ApiError, invalid
from triptych.service.http.in_process import InnerReply
from triptych.service.http.route_table import JSON

AUDIO_ROUTES = ("/v1/audio/transcriptions", "/v1/audio/translations")
MAX_FAILURES = 3  # of the engine on one line, which may be what breaks it
ENGINE_PAUSE_SECONDS = 1.0
_OF_ENGINE = ("engine_failed", "engine_dead")
_MAX_WAIT = 60.0  # seconds until a refused line is sent again
_CODE = msgspec.json.Decoder(dict[str, Any])


class _ReplyWithUsage(msgspec.Struct):
    usage: dict[str, Any] | None = None


_usage = msgspec.json.Decoder(_ReplyWithUsage)


def request_of(line: Line) -> tuple[bytes, str]:
    """Return the body of a line's request and its media type.

    Audio is base64 in a line: `file` becomes a form. Raises a 400.
    """
    raw = bytes(line.body)
    return (raw, JSON) if line.url not in AUDIO_ROUTES else _form(msgspec.json.decode(raw, type=dict[str, Any]))


def _form(fields: dict[str, Any]) -> tuple[bytes, str]:
    """Return the form of an audio route for a body with the file as base64, or as a data URL."""
    boundary = secrets.token_hex(16)
    parts = []
    for name, value in fields.items():
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{_quoted(name)}"'
        if name in ("file", "file_url"):
            parts.append(f'{head.replace("file_url", "file")}; filename="audio"\r\n\r\n'.encode() + _file(value, name))
        elif isinstance(value, list):
            label = f'{head[:-1]}{"" if name.endswith("[]") else "[]"}"'
            parts += [f"{label}\r\n\r\n{_text(one)}".encode() for one in value]
        elif value is not None:
            parts.append(f"{head}\r\n\r\n{_text(value)}".encode())
    body = b"".join(part + b"\r\n" for part in parts) + f"--{boundary}--\r\n".encode()
    return body, f"multipart/form-data; boundary={boundary}"


def _quoted(name: str) -> str:
    return name.replace("\r", "").replace("\n", "").replace('"', '\\"')


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _file(value: Any, name: str) -> bytes:
    if not isinstance(value, str):
        raise invalid(f"{name} must be an audio file as base64, or a data: URL", name)
    return file_bytes(value, name, "invalid_audio")


def seconds_to_wait(reply: InnerReply, failures: int) -> float | None:
    """Return after how many seconds a refused line is sent again; None: the reply is final.

    Busy or restarting services are waited for. A line that has broken the engine several times is not sent again.
    """
    if reply.status in (429, 503):
        header = reply.header(b"retry-after")
        return min(max(float(header) if header.isdecimal() else 1.0, 0.1), _MAX_WAIT)
    if broke_engine(reply) and failures < MAX_FAILURES:
        return ENGINE_PAUSE_SECONDS
    return None


def broke_engine(reply: InnerReply) -> bool:
    """Return whether the engine failed while it computed the request."""
    if reply.status != 500:
        return False
    try:
        error = _CODE.decode(reply.body).get("error")
    except msgspec.DecodeError:
        return False
    return isinstance(error, dict) and error.get("code") in _OF_ENGINE


def refused(batch_id: str, number: int, custom_id: str, error: ApiError) -> Result:
    """Return the result of a line that is not sent."""
    shown = {"status_code": error.status, "request_id": "", "body": error.body()}
    return Result(number, False, reply_line(batch_id, number, custom_id, shown))


def result_of(batch_id: str, number: int, custom_id: str, reply: InnerReply) -> Result:
    """Return the result of a line with a final reply."""
    ok = 200 <= reply.status < 300
    shown = {"status_code": reply.status, "request_id": reply.header(b"x-request-id"), "body": _body(reply)}
    usage = _usage_of(reply.body) if ok and reply.is_json else Usage()
    return Result(number, ok, reply_line(batch_id, number, custom_id, shown), usage)


def _body(reply: InnerReply) -> Any:
    if not reply.is_json:
        return reply.body.decode(errors="replace")
    return msgspec.json.decode(reply.body) if b"\n" in reply.body else msgspec.Raw(reply.body)


def _usage_of(body: bytes) -> Usage:
    try:
        found = _usage.decode(body).usage or {}
    except msgspec.DecodeError:  # a list
        return Usage()

    def count(*names: str, of: dict[str, Any] = found) -> int:
        return next((int(of[name]) for name in names if isinstance(of.get(name), int)), 0)

    details = [found.get(name) for name in ("prompt_tokens_details", "input_tokens_details")]
    cached = next((one for one in details if isinstance(one, dict)), found)
    details = [found.get(name) for name in ("completion_tokens_details", "output_tokens_details")]
    reasoned = next((one for one in details if isinstance(one, dict)), found)
    return Usage(
        count("prompt_tokens", "input_tokens", "total_tokens"),
        count("cached_tokens", of=cached),
        count("completion_tokens", "output_tokens"),
        count("reasoning_tokens", of=reasoned),
    )
