"""The uvicorn server of both ports: that of clients, and the one that monitoring reads (`--metrics-port`)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.service.app import Application
from triptych.service.core.errors import ApiError, not_found, render
from triptych.service.http.bounded_protocol import bounded_protocol
from triptych.service.http.sites import CrossOrigins, Sites
from triptych.service.lifecycle.state import service_of
from triptych.service.settings.service_settings import Limits, is_loopback

_CLOSE_SECONDS = 5  # after the drain, for replies that are still being sent
_MONITORING: Final = ("/metrics", "/livez", "/readyz")


class _Server(uvicorn.Server):
    """A uvicorn server without its signal handlers: the runtime has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def http_server(app: ASGIApp, listeners: list[socket.socket], limits: Limits) -> AsyncIterator[uvicorn.Server]:
    """Serve `app` on the listeners inside the block; the caller runs the app's lifespan."""
    server = _Server(
        uvicorn.Config(
            app,
            http=bounded_protocol(limits),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # the application writes its own access log
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=limits.idle_connection_s,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
    )
    serving = asyncio.create_task(server.serve(listeners))
    try:
        yield server
    finally:
        server.should_exit = True
        await serving


class MonitoringApp:
    """Answers /metrics, /livez and /readyz of an application without a key, by its routes, and nothing else.

    A name in the header Host is checked as on the port of clients: else a web page could read /metrics by DNS
    rebinding.
    """

    def __init__(self, app: Application) -> None:
        settings = service_of(app).settings
        checks_host = settings.allowed_hosts or is_loopback(settings.host)
        self._app = app
        self._sites = Sites(CrossOrigins(()), settings.allowed_hosts if checks_host else None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] not in ("GET", "HEAD") or scope["path"] not in _MONITORING:
                raise not_found(f"this port answers GET of {', '.join(_MONITORING)}")
            if scope["path"] == "/metrics":
                self._sites.check(scope, is_own_key=False)
        except ApiError as error:
            await render(error)(scope, receive, send)
            return
        await self._app.table({**scope, "app": self._app, "method": "GET"}, receive, send)
