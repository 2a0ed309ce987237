"""GET /: the playground, a static page that uses the public API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from service.http.route_prefix import is_bare, prefix_of
from service.http.route_table import Reply, Routes
from service.http.static_pages import page

routes = Routes()


@routes.get(
    "/",
    "The playground",
    {
        200: Reply("A page to try the models with.", texts=("text/html",)),
        307: Reply("Below a route prefix without its last slash: the page is there."),
    },
)
async def playground(request: Request) -> Response:
    """A page to select a model, generate with streaming, encode and compare. Browsers send the key as a password."""
    if is_bare(request.scope):  # the page's relative URLs need the slash
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"{prefix_of(request.scope)}/{query}")
    return page("playground")
