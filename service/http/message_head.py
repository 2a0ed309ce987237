"""Checks of a request's head for what the parser accepts although the standards forbid it.

RFC 9112: the request target (3.2), the field Host (3.2), transfer codings (6.1, 7); RFC 9110: CONNECT (9.3.6).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from triptych.service.core.errors import ApiError, invalid

Headers = Iterable[tuple[bytes, bytes]]

_CODE: Final = "invalid_http"
_HOST = re.compile(rb"(?:\[[0-9A-Za-z:.%_~!$&'()*+,;=-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(?::[0-9]{0,5})?", re.ASCII)
_ABSOLUTE = re.compile(rb"https?://([^/?#]+)(/[^?#]*)?(\?[^#]*)?", re.IGNORECASE)


def check_head(method: bytes, version: str, headers: Headers) -> None:
    """Raise `ApiError` for an unsupported method or version, and for ambiguous or invalid framing and Host fields."""
    if method == b"CONNECT":
        raise not_implemented("CONNECT is not implemented: this server is no proxy")
    if version not in ("1.1", "1.0"):
        message = f"HTTP/{version} is not supported; send HTTP/1.1"
        raise ApiError(505, message, type="invalid_request_error", code=_CODE)
    hosts = 0
    coding = None
    for name, value in headers:
        if name == b"host":
            hosts += 1
            if _HOST.fullmatch(value) is None:
                raise invalid("the header Host is not valid; expected a name or an address, and a port", code=_CODE)
        elif name == b"transfer-encoding":
            coding = value if coding is None else coding + b"," + value
    if hosts != 1 and (hosts or version == "1.1"):
        raise invalid(f"expected one header Host, found {hosts}", code=_CODE)
    if coding is not None:
        _check_coding(coding, version)


def read_target(method: bytes, target: bytes) -> tuple[bytes, bytes | None]:
    """Return path with query of a request target, and its host if it has one; raises a 400 for an invalid target."""
    host = None
    if target.startswith(b"/") and b"#" not in target:
        found = target
    elif absolute := _ABSOLUTE.fullmatch(target):
        host, path, query = absolute.groups()
        if b"@" in host or _HOST.fullmatch(host) is None or host.startswith(b":"):
            raise invalid("the request target has no valid host", code=_CODE)
        found = (path or b"/") + (query or b"")
    elif target == b"*" and method == b"OPTIONS":
        found = target
    else:
        raise invalid("the request target is not valid; expected a path, which begins with /", code=_CODE)
    if not found.isascii():
        raise invalid("the request target has bytes beyond ASCII; expected %XX in their place", code=_CODE)
    return found, host


def not_implemented(message: str) -> ApiError:
    """Return the 501 for a feature of HTTP that this server does not have."""
    return ApiError(501, message, type="invalid_request_error", code="not_implemented")


def _check_coding(coding: bytes, version: str) -> None:
    if version == "1.0":
        raise invalid("HTTP/1.0 has no Transfer-Encoding; send Content-Length", code=_CODE)
    if coding.lower() == b"chunked":
        return
    names = [name.strip(b" \t").lower() for name in coding.split(b",")]
    if names[-1] == b"chunked" and names.count(b"chunked") == 1 and all(names):
        raise not_implemented("transfer codings other than chunked are not supported; send Transfer-Encoding: chunked")
    if b"chunked" not in names and all(re.fullmatch(rb"[a-z0-9!#$%&'*+.^_`|~;= -]+", name) for name in names):
        raise not_implemented("the transfer coding is not supported; send Transfer-Encoding: chunked")
    raise invalid("Transfer-Encoding is not valid; send Transfer-Encoding: chunked", code=_CODE)


# -- Headers of a request in ASGI's form: pairs of bytes, names in lower case.


def header_of(headers: Headers, name: bytes) -> str | None:
    """Return the first header of this name, given in lower case; None if there is none."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


def all_of(headers: Headers, name: bytes) -> str:
    """Return the values of all headers of this name, given in lower case, joined by commas; empty if there is none."""
    return ",".join(value.decode("latin-1") for key, value in headers if key == name)
