"""Files as JSON has them: base64, with or without line breaks, or a data URL. An address is never followed."""

from __future__ import annotations

import base64

from triptych.service.core.errors import invalid, shorten

_SCHEME = 32  # characters in which an address has its scheme
_ESCAPED = {"%2B": "+", "%2F": "/", "%3D": "="}  # in URLs; decoding all escapes takes 0.1 s of a body of 2 MB
_SPACES = {ord(one): None for one in " \t\r\n"}  # programs break lines of base64
_PART = 1 << 20  # characters that are decoded at a time: other threads run in between


def file_bytes(value: str, param: str, code: str) -> bytes:
    """Return the bytes of a file in base64 or a data URL; raises a 400 with `code` that names `param`."""
    if value[:1].isspace():
        value = value.lstrip()
    head, separator, data = value.partition(",") if value[:5].lower() == "data:" else ("", ",", value)
    if head and not (separator and head.lower().endswith(";base64")):
        raise invalid(f"{param}: a data URL must have the form data:TYPE;base64,DATA", param, code)
    if head and "%" in data:
        for escape, one in _ESCAPED.items():
            data = data.replace(escape, one).replace(escape.lower(), one)
    if "://" in value[:_SCHEME]:
        found = shorten(value[:80])
        raise invalid(f"{param}: the service follows no addresses, found {found}; send the file in base64", param, code)
    try:
        return _decoded(data)
    except ValueError:
        raise invalid(f"{param} is not base64", param, code) from None


def _decoded(text: str) -> bytes:
    """Return the bytes of base64; raises `ValueError`."""
    pieces, rest, is_padded = list[bytes](), "", False
    for start in range(0, len(text), _PART):
        part = rest + text[start : start + _PART].translate(_SPACES)
        if is_padded and part:
            raise ValueError("base64 goes on after its padding")
        end = len(part) - len(part) % 4
        pieces.append(base64.b64decode(part[:end], validate=True))
        is_padded, rest = is_padded or part[:end].endswith("="), part[end:]
    if rest and (is_padded or rest not in ("=", "==")):  # padding that is not needed is taken, as by Python
        raise ValueError("base64 is cut off")
    return b"".join(pieces)
