"""The service's static pages, which have no secrets and no state and load nothing from other hosts.

Each is sent with a Content-Security-Policy that allows only its own style and script, by hashes computed when the page
is read.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import HTMLResponse


def page(name: str) -> HTMLResponse:
    """Return the page `static/NAME.html` with its Content-Security-Policy."""
    return HTMLResponse(_text(name), headers=_headers(name))


@cache
def _text(name: str) -> str:
    """Return the text of a page with its parts, which marks such as `/* chat.js */` name, inserted."""
    html = _file(f"{name}.html")
    return re.sub(
        r"<!-- (\w+\.html) -->|/\* (\w+\.(?:css|js)) \*/", lambda mark: _file(mark[1] or mark[2]).strip(), html
    )


def _file(name: str) -> str:
    return files("triptych.service").joinpath(f"static/{name}").read_text(encoding="utf-8")


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
        "require-trusted-types-for 'script'",  # the browser refuses innerHTML and similar
        "trusted-types 'none'",
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _hashes(name: str, tag: str) -> str:
    """Return the hashes of all inline `tag` elements in the form of a policy (https://www.w3.org/TR/CSP3/)."""
    sources = re.findall(rf"<{tag}>(.*?)</{tag}>", _text(name), re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in sources)
