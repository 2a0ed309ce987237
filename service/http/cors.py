"""Cross-origin requests: which web pages may call the API from a browser, and read its replies.

None may by default: without these headers a browser hides replies, and sends no JSON. Credentials of browsers (cookies,
saved passwords) are never allowed: a page sends the key itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.headers import header_of

_ALL = "*"
_METHODS = b"GET, HEAD, POST, DELETE"
_EXPOSED = b"x-request-id, request-id, retry-after"
_MAX_AGE_S = b"600"  # for which a browser need not ask again; Chromium takes up to two hours
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]*")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}

Headers = list[tuple[bytes, bytes]]


class CrossOrigins:
    """The origins whose pages may call the API: `scheme://host[:port]`, or `*` for all."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(map(_normal, origins))

    def __bool__(self) -> bool:
        return bool(self._origins)

    def allows(self, origin: str | None) -> bool:
        """Whether a request with this header `Origin` comes from a page that may read the reply."""
        return origin is not None and (_ALL in self._origins or origin in self._origins)

    def reply_headers(self, scope: Scope) -> Headers:
        """Return the headers of the reply to a request."""
        origin = header_of(scope["headers"], b"origin")
        varies = [] if _ALL in self._origins else [(b"vary", b"Origin")]
        if not self.allows(origin):
            return varies
        return [*self._allowed(origin), (b"access-control-expose-headers", _EXPOSED), *varies]

    def preflight_headers(self, scope: Scope) -> Headers | None:
        """Return the headers of the reply to a browser that asks before it sends; None if it may not, or does not."""
        headers = scope["headers"]
        origin, method = header_of(headers, b"origin"), header_of(headers, b"access-control-request-method")
        if scope["method"] != "OPTIONS" or method is None or not self.allows(origin):
            return None
        found = [
            *self._allowed(origin),
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", _MAX_AGE_S),
            (b"vary", b"Origin, Access-Control-Request-Method, Access-Control-Request-Headers"),
        ]
        names = header_of(headers, b"access-control-request-headers") or ""
        if names and _HEADER_NAMES.fullmatch(names):  # all of them: clients have many of their own
            found.append((b"access-control-allow-headers", names.encode("latin-1")))
        return found

    def _allowed(self, origin: str | None) -> Headers:
        shown = _ALL if _ALL in self._origins else origin or ""
        return [(b"access-control-allow-origin", shown.encode("latin-1"))]


class CorsMiddleware:
    """Answers browsers that ask before they send, without a key, and marks the replies to pages that may read them."""

    def __init__(self, app: ASGIApp, origins: CrossOrigins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        preflight = self._origins.preflight_headers(scope)
        if preflight is not None:
            await send({"type": "http.response.start", "status": 204, "headers": preflight})
            await send({"type": "http.response.body", "body": b""})
            return
        added = self._origins.reply_headers(scope)

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self._app(scope, receive, marked)


def _normal(origin: str) -> str:
    """Return an origin as browsers send it: in lower case, without the default port."""
    origin = origin.lower()
    return origin.removesuffix(_DEFAULT_PORTS.get(urlsplit(origin).scheme, "")) if origin != _ALL else origin
