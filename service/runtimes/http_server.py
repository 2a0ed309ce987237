"""The uvicorn server of both ports: that of clients, and the one that monitoring reads (`--metrics-port`)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.service.core.errors import ApiError, not_found
from triptych.service.http.bodies import json_response
from triptych.service.http.bounded_protocol import bounded_protocol
from triptych.service.http.message_head import header_of
from triptych.service.lifecycle.state import Service
from triptych.service.settings.service_settings import Limits

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
    """Answers /metrics, /livez and /readyz of a service without a key, and nothing else."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = self._reply(scope["method"], scope["path"], header_of(scope["headers"], b"accept") or "")
        except ApiError as error:
            response = json_response(error.body(), error.status, error.headers)
        await response(scope, receive, send)

    def _reply(self, method: str, path: str, accept: str) -> Response:
        service = self._service
        if method not in ("GET", "HEAD") or path not in _MONITORING:
            raise not_found(f"this port answers GET of {', '.join(_MONITORING)}")
        if path == "/metrics":
            text, content_type = service.metrics.render(service.client, accept)
            return Response(text, headers={"Content-Type": content_type})
        if path == "/livez":
            service.check_live()
        else:
            service.check_ready()
        return json_response({"status": "ok"})
