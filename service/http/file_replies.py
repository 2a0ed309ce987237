"""Replies that send a file, or the part of it that a request asks for."""

from __future__ import annotations

import re
from os import stat_result
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import FileResponse

from triptych.service.core.errors import ApiError

_ONE_PART: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)  # FIRST-LAST, FIRST- or -COUNT


def file_reply(
    request: Request, path: Path, found: stat_result, media_type: str, filename: str | None = None
) -> FileResponse:
    """Return the file, or the part that the header `Range` names; raises a 416 if the file has no such part.

    A `Range` that is invalid, of another unit or of several parts is ignored, as RFC 9110 (14.2) allows.
    """
    size, match = found.st_size, _ONE_PART.fullmatch(request.headers.get("range", ""))
    first, last = match.groups() if match is not None else ("", "")
    is_part = bool(first or last) and not (first and last and int(first) > int(last))
    if is_part and (int(first) >= size if first else 0 in (int(last), size)):
        if "if-range" not in request.headers:
            message, headers = f"Range: the file has {size} bytes", {"Content-Range": f"bytes */{size}"}
            raise ApiError(416, message, type="invalid_request_error", code="range_not_satisfiable", headers=headers)
        is_part = False
    if not is_part:
        request.scope["headers"] = [header for header in request.scope["headers"] if header[0] != b"range"]
    return FileResponse(path, media_type=media_type, filename=filename, stat_result=found)
