"""Calls the endpoints of a POST to a fixed path without FastAPI's layers, which cost 150 us a request.

The endpoints read their bodies and render their replies themselves, so those layers (error pages, telemetry, exit
stacks, matching of sixty routes, dependencies) do nothing for them. FastAPI keeps the routes: it describes them in
/openapi.json, and answers other methods on their paths.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from service.core.errors import ApiError, render
from service.core.request_context import current

Endpoint = Callable[[Request], Awaitable[Response]]


def direct_endpoints(routes: Iterable[BaseRoute]) -> dict[str, Endpoint]:
    """Return by path the endpoints that need nothing of FastAPI: POST alone, no parameters but the request.

    Of several routes for the POST of a path the first counts, as when requests are routed.
    """
    first: dict[str, Route] = {}
    for route in routes:
        if isinstance(route, Route) and "POST" in (route.methods or ()):
            first.setdefault(route.path, route)
    found = {path: route for path, route in first.items() if isinstance(route, APIRoute)}
    return {path: route.endpoint for path, route in found.items() if _needs_nothing(route)}


def _needs_nothing(route: APIRoute) -> bool:
    found = route.dependant
    parameters = (found.path_params, found.query_params, found.header_params, found.cookie_params, found.body_params)
    alone = found.request_param_name == "request" and not any(parameters) and not found.dependencies
    return route.methods == {"POST"} and route.response_model is None and "{" not in route.path and alone


class DirectRoutes:
    """Answers requests by the endpoint of their path; stands behind the middleware that all requests pass."""

    def __init__(self, endpoints: dict[str, Endpoint]) -> None:
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints[scope["path"]]
        try:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)
        except ApiError as error:
            context = current()
            if context is not None and context.status:  # too late for an error reply
                raise
            await render(error)(scope, receive, send)
