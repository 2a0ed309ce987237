"""`GET /`: the playground, one static page over the public API.

The page holds no secret and no state, and asks nothing of any other host. Its Content-Security-Policy allows the one
style and the one script that stand in it, by their hashes, computed here when the page is read.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from service.prefix import is_bare, prefix_of
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
    return HTMLResponse(_page(), headers=_headers())


@cache
def _page() -> str:
    return files("service").joinpath("static/playground.html").read_text(encoding="utf-8")


@cache
def _headers() -> dict[str, str]:
    policy = (
        "default-src 'none'",
        f"script-src {_hashes('script')}",
        f"style-src {_hashes('style')}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # the browser refuses innerHTML and its like
        "trusted-types 'none'",
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _hashes(tag: str) -> str:
    """The sources of every inline `tag` of the page, as a policy names them (https://www.w3.org/TR/CSP3/)."""
    sources = re.findall(rf"<{tag}>(.*?)</{tag}>", _page(), re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in sources)
