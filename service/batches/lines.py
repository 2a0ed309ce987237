"""The lines of a batch's input file, read one at a time: checked all before any is run."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

MAX_LINES = 50_000
MAX_EMBEDDED = 50_000  # inputs of all lines of /v1/embeddings
_MAX_ERRORS = 50  # that are listed
_MAX_ID = 512  # characters
_ENVELOPE = 4_096  # bytes of a line without its body


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line: a request. Its body is JSON that is not parsed yet."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_line = msgspec.json.Decoder(Line)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_id = msgspec.json.Decoder(dict[str, Any])


class InputLostError(Exception):
    """The input file of a batch is gone, or is another one."""


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a batch is refused, with the number of the line."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


def read_lines(path: Path, most_bytes: int) -> Generator[tuple[int, bytes], None, None]:
    """Yield the lines that are not blank, with their numbers from 1; a longer line is cut to `most_bytes` + 1.

    A mark of the order of bytes before the first is left out. Raises `InputLostError`.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise InputLostError("the input file is not there any more; upload it again") from None
    with file:
        number = 0
        while line := file.readline(most_bytes + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.endswith(b"\n") and len(line) > most_bytes:
                _skip_line(file)
            if not line.isspace():
                yield number, line.rstrip(b"\r\n")


def _skip_line(file: Any) -> None:
    while (more := file.readline(1 << 16)) and not more.endswith(b"\n"):
        pass


def parse(line: bytes) -> Line:
    """Return a line that has been checked."""
    return _line.decode(line)


def checked(line: bytes) -> Line:
    """Return a line that was checked before; raises `InputLostError` if the file, or the limit of a line, changed."""
    try:
        return parse(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InputLostError(
            "the input file, or the limit of a body, has changed since its lines were checked"
        ) from None


class Checker:
    """Checks the lines of one file."""

    def __init__(self, endpoint: str, most_body_bytes: int) -> None:
        self.errors: list[LineError] = []
        self.total = 0
        self.models: set[str] = set()  # that lines name, two at most
        self.most_line_bytes = most_body_bytes + _ENVELOPE
        self._endpoint = endpoint
        self._most_body_bytes = most_body_bytes
        self._ids: set[bytes] = set()
        self._embedded = 0

    @property
    def is_full(self) -> bool:
        """Whether enough errors are known."""
        return len(self.errors) >= _MAX_ERRORS

    def add(self, number: int, line: bytes) -> None:
        """Check the next line."""
        self.total += 1
        if self.total > MAX_LINES:
            if self.total == MAX_LINES + 1:
                self._refuse(number, "too_many_requests", f"the file has more than {MAX_LINES} requests")
            return
        if len(line) > self.most_line_bytes:
            self._refuse(number, "line_too_long", f"the line has more than {self.most_line_bytes} bytes")
            return
        try:
            found = _line.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._refuse(number, *_fault(line, error))
            return
        self._check(number, found)

    def finish(self) -> list[LineError]:
        """Return the errors of all lines."""
        if not self.total:
            self.errors.append(LineError("empty_file", "the file has no requests; write one a line"))
        return self.errors

    def _check(self, number: int, line: Line) -> None:
        if not 0 < len(line.custom_id) <= _MAX_ID:
            self._refuse(number, "invalid_custom_id", f"custom_id must have 1 to {_MAX_ID} characters", "custom_id")
        digest = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._ids:
            self._refuse(number, "duplicate_custom_id", "an earlier line has the same custom_id", "custom_id")
        self._ids.add(digest)
        if line.method != "POST":
            self._refuse(number, "invalid_method", "method must be POST", "method")
        if line.url != self._endpoint:
            self._refuse(number, "invalid_url", f"url must be {self._endpoint}, the batch's endpoint", "url")
        self._check_body(number, bytes(line.body))

    def _check_body(self, number: int, body: bytes) -> None:
        if len(body) > self._most_body_bytes:
            self._refuse(number, "body_too_large", f"body has more than {self._most_body_bytes} bytes", "body")
            return
        try:
            found = _fields.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._refuse(number, "invalid_body", "body must be a JSON object", "body")
            return
        if bytes(found.get("stream", b"false")) not in (b"false", b"null"):
            self._refuse(number, "stream_not_supported", "a line of a batch cannot be streamed", "body.stream")
        if "model" in found and len(self.models) < 2:
            self.models.add(_text(found["model"]))
        if self._endpoint == "/v1/embeddings" and "input" in found:
            before, self._embedded = self._embedded, self._embedded + _inputs(bytes(found["input"]))
            if before <= MAX_EMBEDDED < self._embedded:
                message = f"the file has more than {MAX_EMBEDDED} inputs to embed"
                self._refuse(number, "too_many_inputs", message, "body.input")

    def _refuse(self, number: int, code: str, message: str, param: str | None = None) -> None:
        if not self.is_full:
            self.errors.append(LineError(code, message, number, param))


def _fault(line: bytes, error: Exception) -> tuple[str, str, str | None]:
    """Return the code, message and field of a line that is no request."""
    try:
        found = _id.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "invalid_json_line", "the line is no JSON object", None
    for name in ("custom_id", "method", "url", "body"):
        if name not in found:
            return "missing_field", f"{name} is required", name
        if name != "body" and not isinstance(found[name], str):
            return "invalid_type", f"{name} must be a text", name
    other = next(name for name in found if name not in ("custom_id", "method", "url", "body"))
    return "unknown_field", f"unknown field {other[:64]!a}; a line has custom_id, method, url and body", other[:64]


def _text(raw: msgspec.Raw) -> str:
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def _inputs(raw: bytes) -> int:
    """Return the number of inputs: of a list of texts or of lists of token ids, its entries; else one."""
    try:
        found = msgspec.json.decode(raw, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 1
    return len(found) if found and bytes(found[0])[:1] in (b'"', b"[", b"{") else 1


def reply_line(batch_id: str, number: int, custom_id: str, response: Mapping[str, Any]) -> bytes:
    """Return a line of an output file for a reply: its status, request id and body."""
    return _encode(batch_id, number, custom_id, response, None)


def unrun_line(batch_id: str, number: int, custom_id: str, code: str, message: str) -> bytes:
    """Return a line of an error file for a request that was not run."""
    return _encode(batch_id, number, custom_id, None, {"code": code, "message": message})


def _encode(
    batch_id: str, number: int, custom_id: str, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None
) -> bytes:
    id_ = f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
    return msgspec.json.encode({"id": id_, "custom_id": custom_id, "response": response, "error": error})
