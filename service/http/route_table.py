"""The table of routes: the method, path, task, body, replies, errors and handler of each, declared once.

Routing, /openapi.json and the counts by task use it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych.service.core.errors import ApiError, not_found, render
from triptych.service.core.request_context import current

Handler = Callable[[Request], Awaitable[Response]]
Access = Literal["open", "key", "admin"]  # required key of a route: none, an API key, an admin key
JSON: Final = "application/json"
FORM: Final = "multipart/form-data"
MAX_BODY: Final = "max_body_bytes"  # the setting that limits the bytes of a body
BODY_ERRORS: Final = (400, 408, 415)
WORK_ERRORS: Final = (*BODY_ERRORS, 404, 409, 429, 499, 503, 504)


@dataclass(frozen=True, slots=True)
class Example:
    """An example of a body: the ability that a model needs for it, and the body without the model's name.

    /openapi.json names a served model with the ability in it. `{text}` becomes a text for that model, `{mask}` its mask
    token. With `own`, or without a body, the example is the model's own one in
    `triptych.service.planning.capabilities`.
    """

    ability: str
    body: Mapping[str, Any] | list[Any] | None = None
    own: bool = False


@dataclass(frozen=True, slots=True)
class Body:
    """The request body of a route: JSON of one of `models`, or by `media_types` a form or a file."""

    models: Sequence[type[BaseModel]]
    examples: Mapping[str, Example]
    media_types: Sequence[str] = (JSON,)
    limit: str = MAX_BODY  # the setting that limits its bytes
    ability: str | None = None  # what a model needs for the example that is made of the required fields
    sample: str = ""  # for a body that is a file: a path of the service that sends one, or a file as base64


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of a route: one of `shapes` (types) as JSON, a stream of `events` or of `lines` of JSON, or a text.

    The shape `Any` is described in the reference of another API.
    """

    description: str
    shapes: Sequence[Any] = ()
    events: Sequence[Any] = ()
    texts: Sequence[str] = ()  # media types
    lines: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A part of the URL that a route reads."""

    name: str
    place: str  # "path" or "query"
    description: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table; `task` is the task of the request's model."""

    method: str
    path: str
    handler: Handler
    summary: str
    task: str | None = None
    body: Body | None = None
    replies: Mapping[int, Reply] | None = None  # by status; None: the route is not described
    errors: Sequence[int] = ()  # statuses, in addition to those of every route
    parameters: Sequence[Parameter] = ()
    access: Access = "key"


def json_body(*models: type[BaseModel], ability: str | None = None, **examples: Example) -> Body:
    """Return a body of JSON that is one of `models`; without `examples`, one is made for a model with `ability`."""
    return Body(models, examples, ability=ability)


def form_body(model: type[BaseModel], ability: str, limit: str = MAX_BODY) -> Body:
    """Return a body that is a form with a file."""
    return Body((model,), {}, (FORM,), limit, ability)


def file_body(model: type[BaseModel], media_type: str, ability: str, sample: str, limit: str = MAX_BODY) -> Body:
    """Return a body that is a file such as `sample`, or `model` with the file in it."""
    return Body((model,), {}, (media_type, "application/octet-stream", JSON), limit, ability, sample)


def replies(
    description: str,
    *shapes: Any,
    events: Sequence[Any] = (),
    texts: Sequence[str] = (),
    lines: Sequence[Any] = (),
) -> dict[int, Reply]:
    """Return the replies of a route whose only reply has status 200."""
    return {200: Reply(description, shapes, events, texts, lines)}


def in_query(name: str, description: str, **schema: Any) -> Parameter:
    return Parameter(name, "query", description, schema)


def in_path(name: str, description: str) -> Parameter:
    return Parameter(name, "path", description, {"type": "string"})


MODEL_IN_QUERY: Final = in_query("model", "The model to use, if the body names none.", type="string")


class Routes:
    """The rows of one module."""

    def __init__(self, task: str | None = None, access: Access = "key") -> None:
        """Start without rows; `task` and `access` are the defaults of the rows, `task` only of those with a body."""
        self.rows: list[Route] = []
        self._task = task
        self._access = access

    def post(
        self,
        path: str,
        summary: str,
        body: Body | None,
        replies: Mapping[int, Reply],
        *parameters: Parameter,
        errors: Sequence[int] = WORK_ERRORS,
        task: str | None = None,
    ) -> Callable[[Handler], Handler]:
        return self._add("POST", path, summary, replies, parameters, errors, task=task or self._task, body=body)

    def get(
        self,
        path: str,
        summary: str,
        replies: Mapping[int, Reply] | None,
        *parameters: Parameter,
        errors: Sequence[int] = (),
        access: Access | None = None,
    ) -> Callable[[Handler], Handler]:
        return self._add("GET", path, summary, replies, parameters, errors, access=access or self._access)

    def delete(
        self, path: str, summary: str, replies: Mapping[int, Reply], *parameters: Parameter, errors: Sequence[int] = ()
    ) -> Callable[[Handler], Handler]:
        return self._add("DELETE", path, summary, replies, parameters, errors)

    def hidden(self, method: str, path: str) -> Callable[[Handler], Handler]:
        """Add a route that is not described; its body, if any, is not read."""
        return self._add(method, path, "", None, (), ())

    def _add(
        self,
        method: str,
        path: str,
        summary: str,
        replies: Mapping[int, Reply] | None,
        parameters: Sequence[Parameter],
        errors: Sequence[int],
        **others: Any,
    ) -> Callable[[Handler], Handler]:
        fields = {"access": self._access, **others}

        def add(handler: Handler) -> Handler:
            row = Route(method, path, handler, summary, replies=replies, parameters=parameters, errors=errors, **fields)
            self.rows.append(row)
            return handler

        return add


class RouteTable:
    """All routes of an application, as the ASGI application that calls the route of a request."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.rows = tuple(routes)
        self.tasks = {row.path: row.task for row in self.rows if row.task is not None}
        self.open_paths = frozenset(row.path for row in self.rows if row.access == "open")
        self.body_limits = {row.path: row.body.limit for row in self.rows if row.body and row.body.limit != MAX_BODY}
        self.admin_paths = frozenset(row.path for row in self.rows if row.access == "admin")
        self._fixed: dict[str, dict[str, Route]] = {}
        named: dict[str, dict[str, Route]] = {}
        for row in self.rows:
            (named if "{" in row.path else self._fixed).setdefault(row.path, {})[row.method] = row
        self._named = [(_pattern(path), methods) for path, methods in named.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            route = self._find(scope)
            response = await route.handler(Request(scope, receive, send))
            await response(scope, receive, send)
        except ApiError as error:
            context = current()
            if context is not None and context.status:  # too late for an error reply
                raise
            await render(error)(scope, receive, send)

    def path_of(self, path: str) -> str:
        """Return the path of the table that a request's path matches, such as `/requests/{id}`; "" without one."""
        methods, _ = self._matching(path)
        return next(iter(methods.values())).path if methods else ""

    def _find(self, scope: Scope) -> Route:
        """Return the route of a request; raises a 404 or 405."""
        methods, parameters = self._matching(scope["path"])
        if not methods:
            raise not_found("there is no such route; /docs lists them")
        if parameters:
            scope["path_params"] = parameters
        route = methods.get(scope["method"])
        if route is None:
            allowed = ", ".join(sorted({*methods, *(("HEAD",) if "GET" in methods else ())}))
            message = f"this route does not accept that method; it accepts {allowed}"
            headers = {"Allow": allowed}
            raise ApiError(405, message, type="invalid_request_error", code="method_not_allowed", headers=headers)
        return route

    def _matching(self, path: str) -> tuple[Mapping[str, Route], dict[str, str]]:
        """Return the routes of a path by their methods, and the parameters in the path."""
        fixed = self._fixed.get(path)
        if fixed is not None:
            return fixed, {}
        for pattern, methods in self._named:
            if found := pattern.fullmatch(path):
                return methods, found.groupdict()
        return {}, {}


def _pattern(path: str) -> re.Pattern[str]:
    """Return the pattern of a path with parameters: `{name}` matches one part of it, `{name:path}` the whole rest."""
    parts = re.split(r"\{(\w+)(:path)?\}", path)
    found = re.escape(parts[0])
    for name, rest, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        found += f"(?P<{name}>{'.*' if rest else '[^/]+'}){re.escape(text)}"
    return re.compile(found)
