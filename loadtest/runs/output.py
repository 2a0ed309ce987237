"""The output of a command: files in one folder, and a JSON line as the last line of standard output."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from triptych.loadtest import records
from triptych.loadtest.errors import UsageError
from triptych.loadtest.records import Record
from triptych.loadtest.results import page, statistics
from triptych.loadtest.runs.plan import Mixed
from triptych.loadtest.runs.run import SCHEMA, Measured

Json = dict[str, Any]


def folder(options: str | None, kind: str) -> Path:
    """Create the folder of results, named by the time if none is given. Raises `UsageError`."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = Path(options) if options else Path("out") / "loadtest" / f"{now}-{kind}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: {path}: {error.strerror}") from None
    return path


def with_columns(measured: Measured) -> Any:
    """Return the document with the columns of its requests, as it is written."""
    return plain(measured.document | {"columns": statistics.of(measured.records)})


def write_run(measured: Measured, to: Path) -> None:
    """Write `run.json` (the document with columns), `requests.csv` and `report.html`."""
    full = with_columns(measured)
    (to / "run.json").write_text(line(full), encoding="utf-8")
    records.write_csv(measured.records, to / "requests.csv")
    (to / "report.html").write_text(page.page(full), encoding="utf-8")


def write_sweep(document: Json, requests: Iterable[tuple[float, Iterable[Record]]], to: Path) -> None:
    """Write `sweep.json` (with columns in every point), `requests.csv` (of all points) and `report.html`."""
    (to / "sweep.json").write_text(line(document), encoding="utf-8")
    parts = ((f"{load:g}", made) for load, made in requests)
    records.write_parts_csv(document["over"], parts, to / "requests.csv")
    (to / "report.html").write_text(page.page(plain(document)), encoding="utf-8")


def write_mix(mixed: Mixed, to: Path) -> None:
    """Write `mix.json` (with columns in every workload), `requests.csv` (of all) and `report.html`."""
    works = [{"name": name, "run": with_columns(one)} for name, one in mixed.works.items()]
    full = plain(mixed.document | {"works": works})
    (to / "mix.json").write_text(line(full), encoding="utf-8")
    records.write_parts_csv("work", ((name, one.records) for name, one in mixed.works.items()), to / "requests.csv")
    (to / "report.html").write_text(page.page(full), encoding="utf-8")


def read(path: str, *kinds: str) -> Json:
    """Read a result; raises `UsageError` if it is none of the two or more `kinds`."""
    expected = f"{', '.join(kinds[:-1])} or {kinds[-1]}.json of this tool"
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: expected a {expected} ({error})") from None
    if not isinstance(found, dict) or found.get("kind") not in kinds:
        raise UsageError(f"{path}: expected a {expected}, found another JSON document")
    if found.get("schema") != SCHEMA:
        raise UsageError(f"{path}: expected schema {SCHEMA}, found {found.get('schema')!r}")
    return found


def print_end(document: Json, to: Path | None, console: Console) -> None:
    """Print where the files are, then the JSON line."""
    if to is not None:
        console.print(f"report: {to / 'report.html'}", soft_wrap=True)
    console.file.flush()
    print(line(document), flush=True)


def line(document: Json) -> str:
    """Return JSON in one line."""
    return json.dumps(plain(document), separators=(",", ":"), ensure_ascii=False)


def plain(value: Any) -> Any:
    """Round numbers to significant digits, and replace nan and infinity by null."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
