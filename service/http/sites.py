"""The rules for browsers: the sites whose pages may call the service (CORS), and the service's host names."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import SplitResult, urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.service.core.errors import ApiError, forbidden
from triptych.service.http.message_head import header_of

# -- Cross-origin requests: the web pages that may call the API from a browser and read its replies. By default there
# are none: without these headers a browser hides replies and sends no JSON. Credentials of browsers (cookies, saved
# passwords) are never allowed: a page sends the key itself.

_ALL = "*"
_METHODS = b"GET, HEAD, POST, DELETE"
_EXPOSED = (
    b"x-request-id, request-id, x-should-retry, retry-after, retry-after-ms, x-ratelimit-limit-requests, "
    b"x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, "
    b"x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_MAX_AGE_S = b"600"  # lifetime of a preflight reply; Chromium allows up to two hours
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
        """Return whether a request with this header `Origin` comes from a page that may read the reply."""
        return origin is not None and (_ALL in self._origins or origin in self._origins)

    def reply_headers(self, scope: Scope) -> Headers:
        """Return the headers of the reply to a request."""
        origin = header_of(scope["headers"], b"origin")
        varies = [] if _ALL in self._origins else [(b"vary", b"Origin")]
        if not self.allows(origin):
            return varies
        return [*self._allowed(origin), (b"access-control-expose-headers", _EXPOSED), *varies]

    def preflight_headers(self, scope: Scope) -> Headers | None:
        """Return the reply headers of an allowed preflight request; None for any other request."""
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
        if names and _HEADER_NAMES.fullmatch(names):  # all are allowed: clients have many of their own
            found.append((b"access-control-allow-headers", names.encode("latin-1")))
        return found

    def _allowed(self, origin: str | None) -> Headers:
        shown = _ALL if _ALL in self._origins else origin or ""
        return [(b"access-control-allow-origin", shown.encode("latin-1"))]


class CorsMiddleware:
    """The layer that answers preflight requests, without a key, and adds CORS headers to replies."""

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


# -- The web pages that may make a browser send requests here: those of this service and of allowed origins. This stops
# two attacks. First, a page of another site can send forms and files without a preflight request, and a browser adds a
# saved password. `Sec-Fetch-Site` reveals such a page; without it (plain http), the comparison of `Origin` with `Host`
# does. Second, DNS rebinding: an attacker lets a name point at 127.0.0.1, so that its page has the same origin for a
# browser. `Host` reveals the name. Programs other than browsers send neither header, and the rules do not affect them.

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_OURS = frozenset({"same-origin", "none"})  # none: a person typed the address
_PORTS = {"http": 80, "https": 443}
_SEVERAL_PARTS = re.compile("[.:%]")  # characters of a name with several parts; %2E is a dot


class Sites:
    """The checks against requests by pages of other sites, and under host names of others."""

    def __init__(self, origins: CrossOrigins, hosts: Iterable[str] | None) -> None:
        """Allow `origins`, and the names `hosts` in addition to the usual ones; None or `*` allows any name."""
        names = None if hosts is None else frozenset(name.lower() for name in hosts)
        self._origins = origins
        self._hosts = None if names is None or "*" in names else names

    def check(self, scope: Scope, *, is_own_key: bool) -> None:
        """Raise a 403 for a request by a page of another site, or under a host name of others.

        `is_own_key`: the request has a key that its sender added, not the browser.
        """
        headers = scope["headers"]
        host = header_of(headers, b"host")
        if self._hosts is not None and host and not self._is_ours(host):
            raise _unknown_host(host)
        if is_own_key or scope["method"] in _READING:
            return
        site, origin = header_of(headers, b"sec-fetch-site"), header_of(headers, b"origin")
        if (site is None and origin is None) or self._origins.allows(origin):
            return
        if site not in _OURS if site is not None else not _is_same(origin or "", host or ""):
            raise forbidden(
                "pages of other origins may not call this service from a browser; --cors-origin ORIGIN allows one",
                "cross_site",
            )

    def _is_ours(self, host: str) -> bool:
        """Return whether `Host` is a name that no other site can have: an address, a local name, or an allowed one."""
        assert self._hosts is not None
        name = (_split("//" + host).hostname or "").removesuffix(".")
        if name and not _SEVERAL_PARTS.search(name):  # not a name of the public DNS
            return True
        return name in self._hosts or name.endswith(".localhost") or _is_address(name)


def _is_same(origin: str, host: str) -> bool:
    """Return whether an origin has the name and port of `Host`; a proxy may end TLS, so schemes are not compared."""
    page = _split(origin)
    here = _split(f"{page.scheme}://{host}")
    return bool(page.hostname) and (page.hostname, _port(page)) == (here.hostname, _port(here))


def _split(url: str) -> SplitResult:
    try:
        found = urlsplit(url)
        return found if found.port != 0 else urlsplit("")
    except ValueError:
        return urlsplit("")


def _port(url: SplitResult) -> int | None:
    return url.port or _PORTS.get(url.scheme)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _unknown_host(host: str) -> ApiError:
    return forbidden(
        f"the name {host[:200]!r} in the header Host is not one of this service: call it by its address or as "
        "localhost, or start it with --allowed-host NAME",
        "unknown_host",
    )
