"""Which web pages may make a browser send requests here: those of this service, and of origins that are allowed.

Two attacks are closed. A page of another site may send forms and files without asking, and a browser adds a saved
password: `Sec-Fetch-Site`, or `Origin` against `Host` where a browser does not send it (plain http), tells. A page of a
name that its owner lets point at 127.0.0.1 is of the same origin for a browser, which DNS rebinding uses: `Host` has
that name. Programs that are no browsers send neither header and are not concerned.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import SplitResult, urlsplit

from starlette.types import Scope

from service.core.errors import ApiError, forbidden
from service.http.cors import CrossOrigins
from service.http.headers import header_of

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_OURS = frozenset({"same-origin", "none"})  # none: a person typed the address
_PORTS = {"http": 80, "https": 443}


class Sites:
    """Refuses requests of pages of other sites, and of names that are not this service's."""

    def __init__(self, origins: CrossOrigins, hosts: Iterable[str] | None) -> None:
        """`hosts`: names of this service besides the usual ones; None: any name, `*` among them too."""
        names = None if hosts is None else frozenset(name.lower() for name in hosts)
        self._origins = origins
        self._hosts = None if names is None or "*" in names else names

    def check(self, scope: Scope, *, is_own_key: bool) -> None:
        """Raise a 403 for a request that a page of another site has made.

        `is_own_key`: it has a key that its sender knows, and no browser adds.
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
        """Whether `Host` is a name that nobody else can have: an address, a local name, or one that is allowed."""
        assert self._hosts is not None
        name = (_split("//" + host).hostname or "").removesuffix(".")
        if name and "." not in name and ":" not in name:  # no name of the public DNS
            return True
        return name in self._hosts or name.endswith(".localhost") or _is_address(name)


def _is_same(origin: str, host: str) -> bool:
    """Whether an origin has the name and port of `Host`; not the scheme, as TLS may end before the service."""
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
