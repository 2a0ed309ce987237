"""The HTML page of a result: `page.html` with the document in it, in one file without network access."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PAGE = Path(__file__).parent / "page.html"
_MAX_REQUESTS = 20_000  # drawn; of a larger number, every k-th


def page(document: dict[str, Any]) -> str:
    """Return the page of a run, a sweep or a mix with columns."""
    parts = {"sweep": "points", "mix": "works"}.get(document["kind"])
    if parts is None:
        shown = _thinned(document)
    else:
        shown = {**document, parts: [{**part, "run": _thinned(part["run"])} for part in document[parts]]}
    data = json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c")
    return _PAGE.read_text(encoding="utf-8").replace("@@DATA@@", data)


def style() -> str:
    """Return the page's style sheet, for other pages with the same design."""
    page = _PAGE.read_text(encoding="utf-8")
    return page[page.index("<style>") + len("<style>") : page.index("</style>")]


def _thinned(run: dict[str, Any]) -> dict[str, Any]:
    """Reduce a run to at most `_MAX_REQUESTS` rows; `drawn_every` is the step between them."""
    rows = len(run["columns"]["outcome"])
    step = -(-rows // _MAX_REQUESTS) or 1
    return {**run, "columns": {name: column[::step] for name, column in run["columns"].items()}, "drawn_every": step}
