"""The service's pages: static files that hold no secret and no state, and ask nothing of any other host.

Each comes with a Content-Security-Policy that allows the one style and the one script that stand in it, by their
hashes, computed when the page is read.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import HTMLResponse


def page(name: str) -> HTMLResponse:
    """The file `static/NAME.html` and what it may do."""
    return HTMLResponse(_text(name), headers=_headers(name))


@cache
def _text(name: str) -> str:
    """A page, with what all pages have in common in the places of its marks."""
    html = _file(f"{name}.html")
    for mark, shared in (("<!-- head.html -->", "head.html"), ("/* look.css */", "look.css")):
        html = html.replace(mark, _file(shared).strip())
    return html


def _file(name: str) -> str:
    return files("service").joinpath(f"static/{name}").read_text(encoding="utf-8")


@cache
def _headers(name: str) -> dict[str, str]:
    policy = (
        "default-src 'none'",
        f"script-src {_hashes(name, 'script')}",
        f"style-src {_hashes(name, 'style')}",
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


def _hashes(name: str, tag: str) -> str:
    """The sources of every inline `tag` of a page, as a policy names them (https://www.w3.org/TR/CSP3/)."""
    sources = re.findall(rf"<{tag}>(.*?)</{tag}>", _text(name), re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in sources)
