"""`GET /`: the playground, one static page over the public API."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from service.http.route_prefix import is_bare, prefix_of
from service.http.static_pages import page
from service.routes.docs import errors

router = APIRouter()


@router.get(
    "/",
    summary="The playground",
    response_class=HTMLResponse,
    responses={
        200: {"description": "A page to try the models with."},
        307: {"description": "Below a route prefix without its last slash: the page is there."},
        **errors(),
    },
)
async def playground(request: Request) -> Response:
    """Pick a model, generate with streaming, encode and compare. A browser may send the key as a Basic password."""
    if is_bare(request.scope):  # the page asks for what lies beside it: without the slash, for the root's
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"{prefix_of(request.scope)}/{query}")
    return page("playground")
