"""HTTP connections, one httpx transport each.

A pool of httpx looks through all its connections for each request, which at hundreds of streams costs more than the
request. Here a free connection is taken from the top of a stack: the one that was used last, hence the least likely to
have been closed by the server.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

HEADERS = {"Content-Type": "application/json", "User-Agent": "triptych-loadtest"}


class Connections:
    """Sends bodies to one route of one server."""

    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        self._url = httpx.URL(url)
        self._headers = HEADERS | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._timeout = httpx.Timeout(timeout_s).as_dict()
        self._tls: ssl.SSLContext | bool = ssl.create_default_context() if self._url.scheme == "https" else False
        self._free: list[httpx.AsyncHTTPTransport] = []
        self._all: list[httpx.AsyncHTTPTransport] = []

    @asynccontextmanager
    async def post(self, body: bytes) -> AsyncIterator[httpx.Response]:
        """The reply, its body unread. Leaving before its end closes the connection. Raises `httpx.HTTPError`."""
        transport = self._free.pop() if self._free else self._new()
        try:
            request = httpx.Request("POST", self._url, headers=self._headers, content=body)
            request.extensions["timeout"] = self._timeout
            response = await transport.handle_async_request(request)
            try:
                yield response
            finally:
                await response.aclose()
        finally:
            self._free.append(transport)

    async def aclose(self) -> None:
        for transport in self._all:
            await transport.aclose()

    def _new(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=60)
        transport = httpx.AsyncHTTPTransport(verify=self._tls, limits=limits, trust_env=False)
        self._all.append(transport)
        return transport
