"""One self-contained HTML page of a result: `page.html` with the document in it. No outside asset, no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PAGE = Path(__file__).parent / "page.html"
_MOST_REQUESTS = 20_000  # drawn; of more, every k-th


def page(document: dict[str, Any]) -> str:
    """The page of a run, a sweep or a mix that has its columns."""
    parts = {"sweep": "points", "mix": "works"}.get(document["kind"])
    if parts is None:
        shown = _thinned(document)
    else:
        shown = {**document, parts: [{**part, "run": _thinned(part["run"])} for part in document[parts]]}
    data = json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c")
    return _PAGE.read_text(encoding="utf-8").replace("@@DATA@@", data)


def style() -> str:
    """The page's style sheet, for other pages of the same look."""
    page = _PAGE.read_text(encoding="utf-8")
    return page[page.index("<style>") + len("<style>") : page.index("</style>")]


def _thinned(run: dict[str, Any]) -> dict[str, Any]:
    """The run with at most `_MOST_REQUESTS` rows; `drawn_every` says which."""
    rows = len(run["columns"]["outcome"])
    step = -(-rows // _MOST_REQUESTS) or 1
    return {**run, "columns": {name: column[::step] for name, column in run["columns"].items()}, "drawn_every": step}
