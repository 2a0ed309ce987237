"""GET /: the playground, a static page that uses the public API."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from service.http.route_docs import error_responses
from service.http.route_prefix import is_bare, prefix_of
from service.http.static_pages import page

router = APIRouter()


@router.get(
    "/",
    summary="The playground",
    response_class=HTMLResponse,
    responses={
        200: {"description": "A page to try the models with."},
        307: {"description": "Below a route prefix without its last slash: the page is there."},
        **error_responses(),
    },
)
async def playground(request: Request) -> Response:
    """A page to select a model, generate with streaming, encode and compare. Browsers send the key as a password."""
    if is_bare(request.scope):  # the page's relative URLs need the slash
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"{prefix_of(request.scope)}/{query}")
    return page("playground")
