"""The HTML page of a result, and the description of the machine that it was measured on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

# -- A description of the machine and the source code that a result was measured with.


def describe() -> dict[str, Any]:
    """Describe the machine that generates the load."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "httpx": importlib.metadata.version("httpx"),
    }


def commit() -> str | None:
    """Return the commit of this project's checkout, with `+` if files differ; None without a checkout."""
    root = Path(__file__).resolve().parents[2]
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


# -- The HTML page of a result: `page.html` with the document in it, in one file without network access.

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
