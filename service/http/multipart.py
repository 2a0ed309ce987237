"""Forms with files (multipart/form-data, RFC 7578), read from a complete body of bounded size.

The boundary is searched for once from front to back, so the time is linear in the body's size. Unclear forms are
refused: a part needs a name, transfer encodings are not supported, and the last boundary is required.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from triptych.service.core.errors import ApiError, invalid, shorten

MAX_PARTS = 64
MAX_HEAD = 4096  # bytes of a part's headers
_AS_IT_IS = (b"7bit", b"8bit", b"binary")  # transfer encodings that change nothing
MAX_TEXT = 1 << 16  # bytes of a field that is not a file
_BOUNDARY = re.compile(r'(?:^|;)\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))\s*(?:;|$)', re.IGNORECASE)
_PARAMETER = re.compile(rb';\s*([a-zA-Z*]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))')


@dataclass(frozen=True, slots=True)
class FormFile:
    """A file of a form, without the name that the client gave it."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of a form in their order, including repeated ones."""

    texts: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, FormFile], ...]


def boundary_of(content_type: str) -> bytes:
    """Return the boundary that a Content-Type header declares; raises a 415 for any other type of body."""
    kind, _, parameters = content_type.partition(";")
    found = _BOUNDARY.search(parameters)
    if kind.strip().lower() != "multipart/form-data" or found is None:
        message = "send a form with the header Content-Type: multipart/form-data; boundary=..."
        raise ApiError(415, message, type="invalid_request_error", code="unsupported_media_type")
    return (found[1] or found[2]).encode("latin-1", "replace")


def read_form(body: bytes, boundary: bytes) -> Form:
    """Return the fields and files of a body; raises a 400 if it is not a valid form."""
    texts: list[tuple[str, str]] = []
    files: list[tuple[str, FormFile]] = []
    border = b"\r\n--" + boundary
    at = _opening(body, boundary)
    while not body.startswith(b"--", at):
        if len(texts) + len(files) == MAX_PARTS:
            raise broken(f"it has more than {MAX_PARTS} parts")
        start = _after_line(body, at)
        head_end = start if body.startswith(b"\r\n", start) else body.find(b"\r\n\r\n", start, start + MAX_HEAD)
        end = body.find(border, max(start, head_end))
        if head_end < 0 or end < 0:
            raise broken("a part does not end")
        name, file_name = read_head(body[start:head_end])
        data = body[head_end + 4 : end]
        if file_name is not None:
            files.append((name, FormFile(data)))
        else:
            texts.append((name, text_of(name, data)))
        at = end + len(border)
    return Form(tuple(texts), tuple(files))


def _opening(body: bytes, boundary: bytes) -> int:
    """Return the position after the first boundary, which may follow a preamble."""
    if body.startswith(b"--" + boundary):
        return len(boundary) + 2
    at = body.find(b"\r\n--" + boundary)
    if at < 0:
        raise broken("its boundary is not in it")
    return at + len(boundary) + 4


def _after_line(body: bytes, at: int) -> int:
    """Return the position after the rest of a boundary's line, which may have only white space."""
    end = body.find(b"\r\n", at, at + 256)
    if end < 0 or body[at:end].strip(b" \t"):
        raise broken("a boundary is followed by something else")
    return end + 2


def read_head(head: bytes) -> tuple[str, str | None]:
    """Return the name of a part, and of its file; None: it is no file."""
    disposition = b""
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == b"content-disposition":
            disposition = value.strip()
        if key.strip().lower() == b"content-transfer-encoding" and value.strip().lower() not in _AS_IT_IS:
            raise broken("a part has a transfer encoding")
    kind, _, _ = disposition.partition(b";")
    found = {one[1].lower(): one[2] or one[3] for one in _PARAMETER.finditer(disposition)}
    if kind.strip().lower() != b"form-data" or b"name" not in found:
        raise broken("a part has no name")
    file_name = _unquoted(found.get(b"filename", b"")) if found.keys() & {b"filename", b"filename*"} else None
    return _unquoted(found[b"name"]), file_name


def _unquoted(value: bytes) -> str:
    return re.sub(rb"\\(.)", rb"\1", value).decode(errors="replace")


def text_of(name: str, data: bytes) -> str:
    """Return the text of a field; raises a 400 if it is too long or not UTF-8."""
    if len(data) > MAX_TEXT:
        raise invalid(f"{shorten(name)} has more than {MAX_TEXT} bytes", name[:64])
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise invalid(f"{shorten(name)} is not UTF-8", name[:64]) from None


def broken(why: str) -> ApiError:
    """Return the 400 for a body that is no valid form."""
    return invalid(f"the body is no form: {why}", code="invalid_form")
